"""Builds the objects of a run from its config: checkpoint folder, sharded policy, draft, learner."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import torch

from torchspec.checkpoint.cache import cache_folder, fingerprint
from torchspec.checkpoint.export import load_draft
from torchspec.config.schema import Config, Draft, Optim
from torchspec.distributed.context_parallel import policy_transport
from torchspec.distributed.fsdp import compute_dtype, shard
from torchspec.distributed.mesh import Mesh
from torchspec.distributed.parallelize import load_policy
from torchspec.drafts.eagle3.checkpoint import spec_from_json
from torchspec.drafts.eagle3.model import FSDP_METHODS, DraftSpec, Eagle3
from torchspec.drafts.trainer import DraftTrainer
from torchspec.drafts.vocab import build_d2t
from torchspec.errors import ConfigError
from torchspec.models.hf import read_tensor, resolve_source
from torchspec.models.policy import Policy
from torchspec.models.spec import PolicySpec, read_json
from torchspec.models.tiny import make_tiny
from torchspec.training.learner import DraftLearner, Learner
from torchspec.training.optim import ModelOptimizer


def base_folder(config: Config, mesh: Mesh) -> Path:
    """Return the Hugging Face folder that the run starts from; a tiny policy is created once and cached."""
    model = config.model
    if model.source != "tiny":
        return resolve_source(model.source)
    folder = cache_folder(config) / f"tiny-{fingerprint(model.tiny, model.max_len, config.run.seed)}"
    if mesh.is_main and not folder.exists():
        make_tiny(folder, model.tiny, model.max_len, config.run.seed)
    mesh.barrier()
    return folder


def build_policy(config: Config, mesh: Mesh, folder: Path, spec: PolicySpec) -> Policy:
    """Return the policy with the folder's weights, parallelized; master weights are fp32."""
    return load_policy(folder, spec, mesh, config)


def draft_trainer(settings: Draft, draft: Eagle3) -> DraftTrainer:
    """What trains `draft` as [draft] says."""
    return DraftTrainer(
        draft,
        passes=settings.ttt_steps,
        pass_decay=settings.pass_decay,
        loss_rows=settings.loss_rows,
        row_block=settings.row_block,
    )


def build_learner(
    config: Config,
    mesh: Mesh,
    policy: Policy,
    policy_optimizer: ModelOptimizer,
    draft: DraftLearner | None = None,
    reference: Policy | None = None,
) -> Learner:
    """Return a learner for these models, with the compute dtype and the attention transport of the config."""
    return Learner(
        config,
        mesh,
        policy,
        policy_optimizer,
        draft,
        reference,
        dtype=compute_dtype(config),
        transport=policy_transport(config, policy.spec, mesh.cp_size),
    )


def rl_learner(config: Config, mesh: Mesh, policy: Policy, draft: Eagle3 | None, start: Path) -> Learner:
    """Return the learner of the RL steps.

    Args:
        start: the folder of the policy before the first step, the reference of the KL term.
    """
    updates = config.run.steps * config.rl.minibatches
    draft_updates = updates // config.draft.train_every if config.draft.train_every else 0
    reference = None
    if config.rl.kl_coef:
        reference = build_policy(config, mesh, start, policy.spec).eval().requires_grad_(False)
    optimizer = _policy_optimizer(policy, config.optim, updates)
    return build_learner(
        config, mesh, policy, optimizer, _draft_learner(config, draft, draft_updates), reference
    )


def warmup_learner(config: Config, mesh: Mesh, policy: Policy, draft: Eagle3 | None) -> Learner:
    """Return the learner of the supervised warm-up, with its own learning rate and schedule."""
    warmup = config.warmup
    optim = Optim(lr=warmup.lr, schedule="cosine", min_lr_ratio=0.1, warmup_steps=10)
    optimizer = _policy_optimizer(policy, optim, warmup.steps)
    return build_learner(config, mesh, policy, optimizer, _draft_learner(config, draft, warmup.draft_steps))


def _policy_optimizer(policy: Policy, optim: Optim, updates: int) -> ModelOptimizer:
    return ModelOptimizer("policy", policy, optim, updates, policy.sum_over_stages)


def _draft_learner(config: Config, draft: Eagle3 | None, updates: int) -> DraftLearner | None:
    if draft is None:
        return None
    optimizer = ModelOptimizer("draft", draft, config.draft.optim, updates)
    return DraftLearner(draft_trainer(config.draft, draft), optimizer)


def draft_spec(config: Config, policy: PolicySpec) -> DraftSpec:
    """The shape of the draft: its checkpoint's, or the policy's but for what [draft] says.

    Raises:
        ConfigError: the two do not fit; both values are named.
    """
    if config.draft.init != "random":
        return _checkpoint_spec(Path(config.draft.init), policy)
    draft = config.draft
    heads, kv_heads = draft.heads or policy.heads, draft.kv_heads or policy.kv_heads
    if heads % kv_heads:
        raise ConfigError(f"draft: {heads} heads are not a multiple of {kv_heads} kv_heads")
    if draft.vocab_size > policy.vocab_size:
        raise ConfigError(
            f"draft.vocab_size = {draft.vocab_size} exceeds the policy's vocabulary of {policy.vocab_size}"
        )
    return DraftSpec(
        vocab_size=policy.vocab_size,
        draft_vocab_size=draft.vocab_size or policy.vocab_size,
        dim=policy.dim,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=policy.head_dim,
        ffn_dim=draft.ffn_dim or policy.ffn_dim,
        norm_eps=policy.norm_eps,
        rope_theta=policy.rope_theta,
        max_len=policy.max_len,
        aux_layers=_aux_layers(draft.aux_layers, policy.layers),
        fc_norm=draft.fc_norm,
        norm_output=draft.norm_output,
    )


def _aux_layers(ids: list[int], layers: int) -> tuple[int, int, int]:
    ids = ids or [2, layers // 2, layers - 3]  # the default of vLLM and of EAGLE-3
    if len(ids) != 3 or not 0 <= ids[0] < ids[1] < ids[2] <= layers:
        raise ConfigError(
            f"draft.aux_layers = {ids} must be three ascending ids from 0 to {layers}, the "
            f"number of layers; the default 2, L//2, L-3 needs a policy of at least 7"
        )
    return ids[0], ids[1], ids[2]


def _checkpoint_spec(folder: Path, policy: PolicySpec) -> DraftSpec:
    path = folder / "config.json"
    spec = spec_from_json(read_json(path, "draft.init"))
    for name in ("vocab_size", "dim"):
        theirs, ours = getattr(spec, name), getattr(policy, name)
        if theirs != ours:
            raise ConfigError(
                f"draft.init: {path} has {name} {theirs}, the policy {ours}; the draft was made for another policy"
            )
    if spec.max_len < policy.max_len:
        raise ConfigError(
            f"draft.init: {path} has {spec.max_len} positions, model.max_len is {policy.max_len}; lower it"
        )
    try:
        _aux_layers(list(spec.aux_layers), policy.layers)
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


def build_draft(config: Config, mesh: Mesh, spec: DraftSpec, text: Counter[int], keep: list[int]) -> Eagle3:
    """The draft, sharded: random (the same on every rank) or from draft.init; masters as the policy's.

    Args:
        text: how often each token occurs in the training text; decides a random draft's reduced vocabulary.
        keep: tokens that a reduced vocabulary must have.
    """
    d2t = None
    if spec.draft_vocab_size < spec.vocab_size:
        counts = torch.tensor([text[token] for token in range(spec.vocab_size)])
        d2t = build_d2t(counts, spec.draft_vocab_size, keep)
    torch.manual_seed(config.run.seed + 1)
    draft = Eagle3(spec, d2t).to(mesh.device, torch.promote_types(compute_dtype(config), torch.float32))
    shard(draft, [], mesh, compute_dtype(config), methods=FSDP_METHODS)
    if config.draft.init != "random":
        load_draft(draft, Path(config.draft.init))
    return draft
