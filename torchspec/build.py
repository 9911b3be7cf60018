"""Builds what a run needs from its config: checkpoint folder, tokenizer, sharded policy and draft."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from torchspec.attention import Traffic, choose_transport
from torchspec.checkpoint.cache import private_name, publish
from torchspec.checkpoint.export import load_draft
from torchspec.config.schema import Config, Draft
from torchspec.data.problems import check_tokenizer
from torchspec.distributed.fsdp import shard
from torchspec.distributed.mesh import Mesh
from torchspec.distributed.parallelize import load_pipelined, load_policy
from torchspec.drafts.eagle3.checkpoint import spec_from_json
from torchspec.drafts.eagle3.model import FSDP_METHODS, DraftSpec, Eagle3
from torchspec.drafts.trainer import DraftTrainer
from torchspec.drafts.vocab import build_d2t
from torchspec.errors import ConfigError
from torchspec.models.hf import read_tensor, resolve_source
from torchspec.models.policy import Policy
from torchspec.models.spec import PolicySpec, read_json
from torchspec.models.tiny import make_tiny
from torchspec.records import Problem, Rollout
from torchspec.rewards.scorer import Scorer
from torchspec.rollout.engine import Sampling
from torchspec.training.learner import DraftLearner, Learner
from torchspec.training.optim import ModelOptimizer

if TYPE_CHECKING:  # importing transformers takes seconds
    from transformers import PreTrainedTokenizerBase


def fingerprint(*parts: Any) -> str:
    """Twelve hex digits that change whenever a part (plain values or config sections) does."""
    plain = [dataclasses.asdict(p) if dataclasses.is_dataclass(p) else p for p in parts]
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:12]


def contents(*paths: str | Path) -> list[tuple[str, int, int]]:
    """Name, size and time of the files a run starts from: what a cache of its results must depend on."""
    files = [
        f
        for p in map(Path, filter(str, paths))
        for f in (sorted(p.iterdir()) if p.is_dir() else [p])
        if f.is_file()
    ]
    return [(str(f), f.stat().st_size, f.stat().st_mtime_ns) for f in files]


def special_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Ids that a reduced draft vocabulary must have: end tokens, and whatever was added, such as </think>."""
    return sorted({*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder})


def cache_folder(config: Config) -> Path:
    return Path(config.run.dir) / "cache"


def base_folder(config: Config, mesh: Mesh) -> Path:
    """The Hugging Face folder the run starts from; a tiny policy is made once and cached."""
    model = config.model
    if model.source != "tiny":
        return resolve_source(model.source)
    folder = cache_folder(config) / f"tiny-{fingerprint(model.tiny, model.max_len, config.run.seed)}"
    if mesh.from_main(not folder.exists()):
        private = private_name(folder, mesh)
        if mesh.is_main:
            make_tiny(private, model.tiny, model.max_len, config.run.seed)
        publish(private, folder, mesh)
    return folder


def load_tokenizer(folder: Path, spec: PolicySpec) -> PreTrainedTokenizerBase:
    """The folder's tokenizer, checked against the model.

    Raises:
        ConfigError: no tokenizer there, or one that does not fit.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:  # transformers' ways of saying that the files are not there
        raise ConfigError(f"{folder}: no usable tokenizer: {str(error).splitlines()[0]}") from None
    check_tokenizer(tokenizer, spec.vocab_size)
    return tokenizer


def build_policy(config: Config, mesh: Mesh, folder: Path, spec: PolicySpec) -> Policy:
    """The policy with the folder's weights, sharded; fp32 master weights."""
    recompute, dtype = config.train.activation_checkpointing, compute_dtype(config)
    if mesh.pp_size == 1:
        return load_policy(folder, spec, mesh, dtype, activation_checkpointing=recompute)
    return load_pipelined(
        folder,
        spec,
        mesh,
        config.parallel,
        dtype,
        placement=config.parallel.draft_placement,
        timeout_s=config.parallel.tap_timeout_s,
        activation_checkpointing=recompute,
    )


def score(
    scorer: Scorer, tokenizer: PreTrainedTokenizerBase, problems: list[Problem], rollouts: list[Rollout]
) -> None:
    """Fill `text`, `reward` and `reward_parts` of the problems' rollouts."""
    for rollout in rollouts:
        rollout.text = decode(tokenizer, rollout.tokens)
    scorer.score_all({problem.id: problem for problem in problems}, rollouts)


def decode(tokenizer: PreTrainedTokenizerBase, tokens: list[int]) -> str:
    """The text that rewards see: without special tokens."""
    text = tokenizer.decode(tokens, skip_special_tokens=True)
    assert isinstance(text, str)  # a list only for a batch
    return text


def sampling_of(config: Config) -> Sampling:
    rollout = config.rollout
    return Sampling(
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        max_new_tokens=rollout.max_new_tokens,
    )


def compute_dtype(config: Config) -> torch.dtype:
    return getattr(torch, config.model.dtype)


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
    """A learner for these models, with the compute dtype and the attention transport of the config."""
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


def policy_transport(config: Config, spec: PolicySpec, ranks: int) -> str:
    """How the policy's keys and values cross `ranks` context-parallel ranks; of no meaning for one."""
    if ranks == 1:
        return "ring"
    traffic = Traffic(
        tokens=config.train.pack_tokens,
        queries=config.train.pack_tokens,
        size=ranks,
        heads=spec.heads,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        itemsize=compute_dtype(config).itemsize,
        layers=spec.layers,
    )
    return choose_transport(traffic, config.parallel.attention)


def check_world(config: Config, mesh: Mesh, problems: int, held_out: int) -> None:
    """Refuse numbers that this world cannot divide.

    Args:
        problems, held_out: how many there are.

    Raises:
        ConfigError: the key, its value, what is allowed.
    """
    ranks, replicas = mesh.world_size, mesh.dp_size
    if mesh.device.type == "cuda" and config.model.dtype == "float32":
        raise ConfigError("model.dtype = float32 runs on CPU only (flash attention); set it to bfloat16")
    count, updates = config.rollout.problems_per_step, config.rl.minibatches
    if count % ranks:
        raise ConfigError(f"rollout.problems_per_step = {count} must be a multiple of the {ranks} ranks")
    if count // replicas < updates:
        raise ConfigError(
            f"rl.minibatches = {updates} exceeds the {count // replicas} problems of a replica's step"
        )
    if config.eval.every and held_out < ranks:
        raise ConfigError(f"data.eval_size = {held_out} must be at least the {ranks} ranks")
    most = max(count, config.warmup.problems_per_step if config.warmup.steps else 0)
    if problems < most:
        raise ConfigError(f"{problems} problems to train on cannot fill a step of {most}")


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
