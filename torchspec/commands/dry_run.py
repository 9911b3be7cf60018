"""`train.py CONFIG --dry-run`: the resolved config, the mesh, and what each rank will hold, without weights.

Everything is shapes: models live on the meta device, one policy layer and the draft's passes are run there to
see what autograd keeps, and the rest is counted. Packs are taken to be full and all rows scored. What is left
out: docs/durability.md.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from torchspec.commands.meta_memory import draft_bytes, layer_bytes, logits_bytes
from torchspec.config.keys import keys
from torchspec.config.schema import Config
from torchspec.distributed.context_parallel import policy_transport
from torchspec.distributed.fsdp import compute_dtype
from torchspec.distributed.mesh import dp_size
from torchspec.distributed.pipeline.schedule import stage_ranks
from torchspec.distributed.pipeline.schedule_memory import Snapshot, moments, schedule_order
from torchspec.distributed.pipeline.split import split_layers, tap_names
from torchspec.drafts.base import DraftModel
from torchspec.drafts.build import draft_spec, draft_trainer, meta_draft
from torchspec.errors import ConfigError
from torchspec.models.policy import Policy
from torchspec.models.spec import PolicySpec
from torchspec.models.tiny import tiny_spec
from torchspec.rollout.engine import CPU_KV_CACHE_GB
from torchspec.speculation.budgets.registry import rule_class

MB = 2**20


@dataclasses.dataclass(kw_only=True)
class RankMemory:
    """Bytes on one rank of a pipeline: of every kind the most there is at a time, which is not the same time
    for all of them; `training_peak` is the most there is of all together."""

    parameters: int
    """fp32 masters of policy and draft, this rank's shard; so are the gradients and AdamW's two moments."""
    gradients: int
    """In a pipeline the policy's are added up in full, and only sharded at the update's end."""
    optimizer: int
    reference: int
    """The frozen policy of the KL term."""
    gathered: int
    """The policy's full weights while it is trained, in the compute dtype: those outside of layers and of two
    layers, in a pipeline all of the rank's."""
    activations: int
    """What the policy's forwards keep for their backward, of all microbatches in flight."""
    backward: int
    """What the backward of one policy layer has beside that, recomputed activations included."""
    logits: int
    """What one chunk of rows takes from the policy's last hidden state to its log-probabilities."""
    taps: int
    """The draft's inputs, on their way and waiting, which activations do not hold anyway."""
    trunk: int
    """The draft's keys and values of the whole pack, and their gradient where it is in full."""
    draft_logits: int
    """Those of policy and draft for one chunk of the draft's rows."""
    passes: int
    """What else the draft's training takes: its full weights and gradients, its passes, the policy's head."""
    engine: int
    """Policy and draft as the engine has them."""
    kv_cache: int
    training_peak: int

    @property
    def total(self) -> int:
        return self.training_peak + self.engine + self.kv_cache


def report(config: Config, world: str) -> str:
    """What a run on `world` ranks ("": one) would be.

    Raises:
        ConfigError: a world that does not fit [parallel], a model that cannot be used, or an unknown budget rule.
    """
    rule_class(config.budget.rule)
    ranks = _ranks(world)
    replicas = dp_size(config.parallel, ranks)
    parallel = config.parallel
    lines = [f"{key.name} = {key.value!r}" for key in keys(config)] + [""]
    lines.append(f"mesh: {ranks} ranks = pp {parallel.pp} x dp_shard {replicas} x cp {parallel.cp}")
    spec = policy_spec(config)
    places = [estimate(config, spec, ranks, place) for place in range(parallel.pp)]
    each = ranks // parallel.pp
    names = [field.name for field in dataclasses.fields(RankMemory)] + ["total"]
    header = [f"ranks {i * each}-{(i + 1) * each - 1}" for i in range(parallel.pp)]
    lines.append(f"{'MB per rank':16}" + "".join(f"{name:>14}" for name in header))
    for name in names:
        lines.append(f"{name:16}" + "".join(f"{getattr(place, name) / MB:14.1f}" for place in places))
    return "\n".join(lines)


def policy_spec(config: Config) -> PolicySpec:
    """The policy's shape, from its config.json alone."""
    model = config.model
    if model.source == "tiny":
        return tiny_spec(model.tiny, model.max_len)
    if not Path(model.source).is_dir():
        raise ConfigError(
            f"model.source = {model.source!r}: a dry run reads config.json of a local folder; download that file"
        )
    return PolicySpec.from_hf(model.source, model.max_len)


def estimate(config: Config, spec: PolicySpec, ranks: int, pp_rank: int = 0) -> RankMemory:
    """Bytes on the fullest rank of those that share a place in their pipelines.

    Raises:
        ConfigError: layers that cannot be split as asked for.
    """
    parallel, dtype = config.parallel, compute_dtype(config)
    rows = -(-config.train.pack_tokens // parallel.cp)
    hidden = rows * spec.dim * dtype.itemsize
    pipeline = _Pipeline(config, spec, ranks)
    last = len(pipeline.split) - 1
    mine = [stage for stage, rank in enumerate(pipeline.where) if rank == pp_rank]
    with torch.device("meta"):
        policy = Policy(spec, activation_checkpointing=config.train.activation_checkpointing).to(dtype)
    draft = meta_draft(draft_spec(config, spec), dtype) if config.draft.enabled else None
    layers = [policy.layers[i] for stage in mine for i in pipeline.split[stage]]
    weights = _weights(layers, _ends(policy, first=0 in mine, last=last in mine), ranks, parallel.pp, dtype)
    drafted = 4 * sum(_shard(p, ranks // parallel.pp) for p in draft.parameters()) if draft else 0
    learned = drafted if config.draft.train_every else 0
    reference = weights.shard if config.rl.kl_coef else 0

    transport = policy_transport(config, spec, parallel.cp)
    kept, backward = layer_bytes(policy, rows, dtype, parallel.cp, transport)
    # The embedding's output or what came from below; of the last stage also the normed output, and its chunks.
    in_stage = {s: hidden * (3 if s == last else 1) + kept * len(pipeline.split[s]) for s in mine}
    logits = (
        logits_bytes(spec, min(config.train.logprob_rows, rows), dtype, config.rollout.law) + hidden
        if last in mine
        else 0
    )
    trunk = draft_logits = training = 0
    if draft and learned and pp_rank in pipeline.draft_ranks:
        trunk, draft_logits, training = _draft_bytes(config, draft, rows)

    always = 3 * weights.shard + drafted + 3 * learned + reference
    in_flight = taps = peak = 0
    for moment in pipeline.moments(pp_rank):
        activations = sum(in_stage[stage] * count for stage, count in moment.in_flight.items())
        held = always + activations + moment.taps * hidden
        held += weights.shard if moment.last else weights.gathered + weights.gradients
        if moment.doing == "draft":
            held += training
        elif moment.doing == "B":
            held += max(backward + weights.reducing, logits if moment.stage == last else 0)
        in_flight, taps = max(in_flight, activations), max(taps, moment.taps * hidden)
        peak = max(peak, held)
    if parallel.pp > 1 and (reference or config.rl.minibatches > 1):
        # Before an update every pack is scored; what came from below and goes on above is kept for all packs.
        ways = sum((stage > 0) + (stage < last) for stage in mine)
        peak = max(peak, always + weights.gathered + len(pipeline.draft_ranks) * ways * hidden)
    return RankMemory(
        parameters=weights.shard + drafted,
        gradients=weights.gradients + learned,
        optimizer=2 * (weights.shard + learned),
        reference=reference,
        gathered=weights.gathered,
        activations=in_flight,
        backward=backward,
        logits=logits,
        taps=taps,
        trunk=trunk,
        draft_logits=draft_logits,
        passes=training - trunk - draft_logits,
        engine=sum(p.numel() for m in (policy, draft) if m for p in m.parameters()) * dtype.itemsize,
        kv_cache=_kv_cache(config),
        training_peak=peak,
    )


class _Weights(NamedTuple):
    """The policy's, on one rank in bytes: fp32 shard, and while it is trained full weights, gradients, and
    gradients on their way to their shards."""

    shard: int
    gathered: int
    gradients: int
    reducing: int


def _weights(
    layers: list[nn.Module], ends: list[Tensor], ranks: int, stages: int, dtype: torch.dtype
) -> _Weights:
    a_layer = sum(p.numel() for p in layers[0].parameters())
    outside = sum(p.numel() for p in ends)
    trained = [*(p for layer in layers for p in layer.parameters()), *ends]
    shard = 4 * sum(_shard(p, ranks // stages) for p in trained)
    if stages == 1:
        # Those outside of layers, a layer's and the next one's; a layer's gradients are also sent in fp32.
        size = dtype.itemsize
        return _Weights(shard, (outside + 2 * a_layer) * size, shard, 4 * a_layer + outside * size)
    whole = len(layers) * a_layer + outside  # until a schedule ends
    return _Weights(shard, whole * dtype.itemsize, 4 * whole, 0)


def _draft_bytes(config: Config, draft: DraftModel, rows: int) -> tuple[int, int, int]:
    """Of the draft's training on one pack: trunk, a chunk's logits, and all there is at most, these included."""
    spec, dtype = draft.spec, next(draft.parameters()).dtype
    trainer = draft_trainer(config.draft, draft)
    weights = sum(p.numel() for p in draft.parameters())
    head = spec.draft_vocab_size * spec.dim
    # Full weights in the compute dtype and their gradients in fp32; on meta these are in the compute dtype.
    training = draft_bytes(trainer, rows) + weights * 4 + head * dtype.itemsize
    whole, acc = (
        config.train.pack_tokens * spec.trunk_width,
        torch.promote_types(dtype, torch.float32).itemsize,
    )
    # Every rank has the keys and values of all, the sum of their gradients, and one pass's share.
    training += (whole - rows * spec.trunk_width) * (dtype.itemsize + 2 * acc)
    chunk = min(trainer.objective.loss_rows, trainer.objective.most_scored(rows))
    return whole * (dtype.itemsize + 2 * acc), 4 * 4 * chunk * spec.draft_vocab_size, training


def _kv_cache(config: Config) -> int:
    gb = config.rollout.kv_cache_gb or (0 if torch.cuda.is_available() else CPU_KV_CACHE_GB)
    return int(gb * 2**30)


class _Pipeline:
    """Which stages there are, who runs them when, and who trains the draft; one stage where there is no pipeline."""

    def __init__(self, config: Config, spec: PolicySpec, ranks: int) -> None:
        parallel = config.parallel
        if parallel.pp == 1:  # the trainer makes no schedule then, whichever is named
            schedule, self.split = "1F1B", [range(spec.layers)]
        else:
            schedule = parallel.schedule
            self.split = split_layers(spec.layers, schedule, parallel.pp, parallel.layers_per_stage)
        self.where = stage_ranks(schedule, parallel.pp, len(self.split))
        microbatches = _microbatches(config, dp_size(parallel, ranks))
        self.order = schedule_order(schedule, parallel.pp, len(self.split), microbatches)
        last = parallel.pp == 1 or config.parallel.draft_placement == "last"
        self.draft_ranks = [self.where[-1] if last else m % parallel.pp for m in range(microbatches)]
        self.sources = {}
        if config.draft.enabled and config.draft.train_every:
            names = tap_names(self.split, draft_spec(config, spec).aux_layers)
            self.sources = {stage: len(made) for stage, made in names.items()}

    def moments(self, rank: int) -> Iterator[Snapshot]:
        return moments(self.order, rank, self.where, self.sources, self.draft_ranks)


def _microbatches(config: Config, replicas: int) -> int:
    """Of one update, if every response is as long as can be; without a pipeline they come one by one."""
    if config.parallel.pp == 1:
        return 1
    rollouts = config.rollout.problems_per_step * config.rollout.samples_per_problem
    of_update = -(-rollouts // (replicas * config.rl.minibatches))
    a_pack = max(1, config.train.pack_tokens // config.model.max_len)
    count = -(-of_update // a_pack)
    return count + -count % config.parallel.pp


def _ranks(world: str) -> int:
    if world and not (world.isdecimal() and int(world) > 0):
        raise ConfigError(f"--dry-run.world {world!r} must be a number of ranks, 1 or more")
    return int(world or 1)


def _ends(policy: Policy, *, first: bool, last: bool) -> list[Tensor]:
    """Parameters outside of layers on the first and the last stage; a tied head once."""
    decoder = policy.decoder
    modules = [decoder.tok_embeddings] * first + [decoder.norm, decoder.lm_head] * last
    return list({id(p): p for module in modules for p in module.parameters()}.values())


def _shard(p: Tensor, shards: int) -> int:
    """Elements of the largest shard: FSDP2 splits the first dimension."""
    return -(-p.shape[0] // shards) * (p.numel() // p.shape[0])
