"""A run's draft, from its config: shape, sharded model, weights of a checkpoint, trainer. Of any architecture."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import torch

from torchspec.config.schema import Config, Draft
from torchspec.distributed.fsdp import shard
from torchspec.distributed.mesh import Mesh
from torchspec.drafts import registry
from torchspec.drafts.base import FSDP_METHODS, DraftModel, DraftSpec
from torchspec.drafts.trainer import DraftTrainer
from torchspec.drafts.vocab import build_d2t, build_t2d, check_maps
from torchspec.errors import ConfigError
from torchspec.models.hf import copy_full, read_tensor, read_tensors
from torchspec.models.spec import PolicySpec, read_json


def draft_spec(config: Config, policy: PolicySpec) -> DraftSpec:
    """Return the shape of the draft: its checkpoint's, or the policy's but for what [draft] says.

    Raises:
        ConfigError: the two do not fit; both values are named.
    """
    draft = config.draft
    if draft.init != "random":
        return _checkpoint_spec(draft, policy)
    if draft.vocab_size > policy.vocab_size:
        raise ConfigError(
            f"draft.vocab_size = {draft.vocab_size} exceeds the policy's vocabulary of {policy.vocab_size}"
        )
    return registry.get(draft.arch).make_spec(draft, policy)


def _checkpoint_spec(draft: Draft, policy: PolicySpec) -> DraftSpec:
    arch, path = registry.get(draft.arch), Path(draft.init) / "config.json"
    spec = arch.spec_from_json(read_json(path, "draft.init"), policy.layers, f"draft.init: {path}")
    for name in ("vocab_size", "dim"):
        theirs, ours = getattr(spec, name), getattr(policy, name)
        if theirs != ours:
            raise ConfigError(
                f"draft.init: {path} has {name} {theirs}, the policy {ours}; the draft was made for another policy"
            )
    if spec.draft_vocab_size > spec.vocab_size:
        raise ConfigError(
            f"draft.init: {path} has draft_vocab_size {spec.draft_vocab_size}, more than vocab_size {spec.vocab_size}"
        )
    if spec.max_len < policy.max_len:
        raise ConfigError(
            f"draft.init: {path} has {spec.max_len} positions, model.max_len is {policy.max_len}; lower it"
        )
    try:
        arch.check_spec(spec, policy)
    except ConfigError as error:
        raise ConfigError(f"draft.init: {path}: {error}") from None
    return spec


def check_draft(config: Config, policy_folder: Path) -> None:
    """Refuse a draft.init that brings embeddings of its own: a draft shares the policy's.

    Raises:
        ConfigError: it has some, and they are not the policy's.
    """
    if not config.draft.enabled or config.draft.init == "random":
        return
    theirs = read_tensor(Path(config.draft.init), "embed_tokens.weight")
    if theirs is None:
        return
    ours = read_tensor(policy_folder, "model.embed_tokens.weight")
    if ours is None or ours.shape != theirs.shape or not torch.equal(ours.to(theirs.dtype), theirs):
        raise ConfigError(
            f"draft.init: {config.draft.init} brings an embed_tokens.weight {list(theirs.shape)} that is not the "
            f"policy's{'' if ours is None else f' {list(ours.shape)}'}; only drafts that share the policy's "
            f"embeddings are supported"
        )


def build_draft(
    config: Config, mesh: Mesh, spec: DraftSpec, text: Counter[int], keep: list[int]
) -> DraftModel:
    """Return the draft, sharded: random (the same on every rank) or from draft.init; masters as the policy's.

    Args:
        text: how often each token occurs in the training text; decides a random draft's reduced vocabulary.
        keep: tokens that a reduced vocabulary must have.
    """
    dtype, d2t = getattr(torch, config.model.dtype), None
    if spec.draft_vocab_size < spec.vocab_size:
        counts = torch.tensor([text[token] for token in range(spec.vocab_size)])
        d2t = build_d2t(counts, spec.draft_vocab_size, keep)
    torch.manual_seed(config.run.seed + 1)
    draft = registry.get(spec.arch).model(spec, d2t)
    draft.to(mesh.device, torch.promote_types(dtype, torch.float32))
    shard(draft, [], mesh, dtype, methods=FSDP_METHODS)
    if config.draft.init != "random":
        load_draft(draft, Path(config.draft.init))
    return draft


def meta_draft(spec: DraftSpec, dtype: torch.dtype) -> DraftModel:
    """Return a draft on the meta device, for counting what it takes."""
    reduced = spec.draft_vocab_size != spec.vocab_size
    with torch.device("meta"):
        d2t = torch.zeros(spec.draft_vocab_size, dtype=torch.int64) if reduced else None
        return registry.get(spec.arch).model(spec, d2t).to(dtype)


def draft_trainer(settings: Draft, draft: DraftModel) -> DraftTrainer:
    """Return what trains `draft` as [draft] says."""
    return DraftTrainer(draft, registry.get(draft.spec.arch).objective(settings, draft.spec))


def load_draft(draft: DraftModel, folder: Path) -> None:
    """Copy the weights and the vocabulary map of a checkpoint into `draft`, sharded or not.

    Any layout of the draft's architecture. Embeddings in it are not read: `check_draft` has compared them with
    the policy's.

    Raises:
        ConfigError: no weights, or a missing, unknown or mis-shaped tensor; nothing has been loaded then.
    """
    arch = registry.get(draft.spec.arch)
    _check_maps(draft.spec, folder)
    own = {**dict(draft.named_parameters()), **dict(draft.named_buffers())}
    # t2d is d2t's inverse; checkpoints need not have it, and vLLM ignores it.
    t2d = own.pop("t2d", None)
    layout = arch.layout_of(read_json(folder / "config.json", "draft"))
    own = {arch.renamed(name, layout): x for name, x in own.items()}
    shapes = {name: x.shape for name, x in own.items()}
    ignored = ("t2d", "embed_tokens.weight", *(() if "d2t" in own else ("d2t",)))
    for name, tensor in read_tensors(folder, shapes, ignored):
        copy_full(own[name], tensor)
    if t2d is not None:
        t2d.copy_(build_t2d(own["d2t"], draft.spec.vocab_size))


def _check_maps(spec: DraftSpec, folder: Path) -> None:
    """Check the vocabulary maps of a checkpoint, before weights are read."""
    d2t, t2d = read_tensor(folder, "d2t"), read_tensor(folder, "t2d")
    if d2t is None:
        return
    if len(d2t) != spec.draft_vocab_size or (spec.draft_vocab_size == spec.vocab_size and d2t.any()):
        raise ConfigError(
            f"{folder}: d2t has {len(d2t)} entries, {'some' if d2t.any() else 'none'} of them not 0, and in "
            f"config.json draft_vocab_size is {spec.draft_vocab_size} of {spec.vocab_size}; set draft_vocab_size "
            f"to the number of tokens the draft was trained for"
        )
    check_maps(d2t, t2d, spec.vocab_size, folder)
