"""`train.py CONFIG --dry-run`: the resolved config, the mesh, and what each rank will hold, without weights.

Everything is shapes: models live on the meta device, one policy layer and the draft's passes are run there to
see what autograd keeps, and the rest is counted. Packs are taken to be full and all rows scored. What is left
out: docs/durability.md.
"""

from __future__ import annotations

import dataclasses
import weakref
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from torchspec.assemble import compute_dtype, draft_spec
from torchspec.attention import branch_attention
from torchspec.config import Config, ConfigError
from torchspec.draft.eagle3 import DraftSpec, Eagle3
from torchspec.mesh import dp_size
from torchspec.models.policy import Policy
from torchspec.models.spec import PolicySpec
from torchspec.models.tiny import tiny_spec
from torchspec.packing import pack
from torchspec.records import Batch, Rollout
from torchspec.rollout.vllm_setup import CPU_KV_CACHE_GB
from torchspec.run_folder import flat

MB = 2**20


@dataclasses.dataclass(kw_only=True)
class RankMemory:
    """Bytes on one rank of a pipeline stage."""

    parameters: int
    gradients: int
    optimizer: int
    gathered: int
    """Full weights of the two largest units that FSDP gathers, in the compute dtype."""
    activations: int
    """What the policy's forward keeps for its backward; taps are among it as long as it lives."""
    backward: int
    """What the backward of one policy layer has beside that, recomputed activations included."""
    logits: int
    """The policy's logits of one chunk of rows: logits, log-softmax, gradient and a copy, fp32."""
    taps: int
    trunk: int
    """The draft's keys and values of all passes."""
    passes: int
    """What else the draft's passes keep and their backward has, students and teachers included."""
    draft_logits: int
    """Those of policy and draft for one chunk of the draft's rows."""
    engine: int
    """Policy and draft as the engine has them."""
    kv_cache: int

    @property
    def training_peak(self) -> int:
        """The policy's backward and the draft's passes come one after the other."""
        always = self.parameters + self.gradients + self.optimizer + self.gathered
        policy = self.activations + max(self.backward, self.logits)
        return always + max(policy, self.taps + self.trunk + self.passes + self.draft_logits)

    @property
    def total(self) -> int:
        return self.training_peak + self.engine + self.kv_cache


def report(config: Config, world: str) -> str:
    """What a run on `world` ranks ("": one) would be.

    Raises:
        ConfigError: a world that does not fit [parallel], or a model that cannot be used.
    """
    ranks = _ranks(world)
    replicas = dp_size(config.parallel, ranks)
    parallel = config.parallel
    lines = [f"{key} = {value!r}" for key, value in flat(dataclasses.asdict(config)).items()] + [""]
    lines.append(f"mesh: {ranks} ranks = pp {parallel.pp} x dp_shard {replicas} x cp {parallel.cp}")
    spec = policy_spec(config)
    stages = [estimate(config, spec, ranks, stage) for stage in range(parallel.pp)]
    per_stage = ranks // parallel.pp
    names = [field.name for field in dataclasses.fields(RankMemory)] + ["training_peak", "total"]
    header = [f"ranks {i * per_stage}-{(i + 1) * per_stage - 1}" for i in range(parallel.pp)]
    lines.append(f"{'MB per rank':16}" + "".join(f"{name:>14}" for name in header))
    for name in names:
        lines.append(f"{name:16}" + "".join(f"{getattr(stage, name) / MB:14.1f}" for stage in stages))
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


def estimate(config: Config, spec: PolicySpec, ranks: int, stage: int = 0) -> RankMemory:
    """Bytes on the fullest rank of a pipeline stage: layers are dealt evenly, the last stage has head and draft."""
    parallel = config.parallel
    shards = ranks // parallel.pp
    dtype = compute_dtype(config)
    rows = -(-config.train.pack_tokens // parallel.cp)
    last = stage == parallel.pp - 1
    with torch.device("meta"):
        recompute = config.train.activation_checkpointing
        policy = Policy(spec, activation_checkpointing=recompute).to(dtype)
        draft = _meta_draft(draft_spec(config, spec)) if config.draft.enabled and last else None
    layers = policy.layers[stage :: parallel.pp]
    ends = _ends(policy, first=stage == 0, last=last)
    trained = [*(p for layer in layers for p in layer.parameters()), *ends]
    drafted = list(draft.parameters()) if draft else []
    shard_bytes = sum(_shard(p, shards) for p in (*trained, *drafted)) * 4  # fp32 masters
    units = [sum(p.numel() for p in layers[0].parameters()), sum(p.numel() for p in ends)]
    units += [sum(p.numel() for p in drafted)]
    trunk = passes = draft_logits = 0
    taps = 0
    if draft:
        taps = rows * spec.dim * (len(draft.spec.aux_layers) + 2) * dtype.itemsize
        block = min(config.draft.row_block or rows, rows)
        trunk, passes = _draft_bytes(draft.to(dtype), rows, block, config.draft.ttt_steps)
        chunk = min(config.draft.loss_rows, block * config.draft.ttt_steps)
        draft_logits = 4 * 4 * chunk * draft.spec.draft_vocab_size
    chunk = min(config.train.logprob_rows, rows)
    policy_logits = 4 * 4 * chunk * spec.vocab_size if last else 0
    kept, backward = _layer_bytes(config, policy, rows)
    weights = sum(p.numel() for p in policy.parameters()) + sum(p.numel() for p in drafted)
    kv = config.rollout.kv_cache_gb or (CPU_KV_CACHE_GB if not torch.cuda.is_available() else 0)
    return RankMemory(
        parameters=shard_bytes,
        gradients=shard_bytes,
        optimizer=2 * shard_bytes,
        gathered=sum(sorted(units)[-2:]) * dtype.itemsize,
        taps=taps,
        activations=kept * len(layers),
        backward=backward,
        logits=policy_logits,
        trunk=trunk,
        passes=passes,
        draft_logits=draft_logits,
        engine=weights * dtype.itemsize,
        kv_cache=int(kv * 2**30),
    )


def _ranks(world: str) -> int:
    if world and not (world.isdecimal() and int(world) > 0):
        raise ConfigError(f"--dry-run.world {world!r} must be a number of ranks, 1 or more")
    return int(world or 1)


def _meta_draft(spec: DraftSpec) -> Eagle3:
    reduced = spec.draft_vocab_size != spec.vocab_size
    return Eagle3(spec, torch.zeros(spec.draft_vocab_size, dtype=torch.int64) if reduced else None)


def _ends(policy: Policy, *, first: bool, last: bool) -> list[Tensor]:
    """Parameters outside of layers on the first and the last stage; a tied head once."""
    decoder = policy.decoder
    modules = [decoder.tok_embeddings] * first + [decoder.norm, decoder.lm_head] * last
    return list({id(p): p for module in modules for p in module.parameters()}.values())


def _shard(p: Tensor, shards: int) -> int:
    """Elements of the largest shard: FSDP2 splits the first dimension."""
    return -(-p.shape[0] // shards) * (p.numel() // p.shape[0])


def _layer_bytes(config: Config, policy: Policy, rows: int) -> tuple[int, int]:
    """What one policy layer keeps for its backward, and the most it has beyond that during its backward."""
    h = torch.empty(1, rows, policy.spec.dim, device="meta", dtype=compute_dtype(config), requires_grad=True)
    batch, live = _meta_batch(rows), LiveBytes()
    with live:
        out = policy._run_layer(policy.layers[0], h, batch)
        kept = live.now
        out.backward(torch.empty_like(out))
    return kept, live.peak - kept


def _draft_bytes(draft: Eagle3, rows: int, block: int, passes: int) -> tuple[int, int]:
    """Keys and values of all passes; the most that the draft has besides: the trunk of all rows, and one block's
    passes, students, teachers and gradients."""
    spec, dtype, layer = draft.spec, draft.fc.weight.dtype, draft.midlayer

    def empty(n: int, dim: int = spec.dim) -> Tensor:
        return torch.empty(n, dim, device="meta", dtype=dtype, requires_grad=True)

    def positions(n: int) -> Tensor:
        return torch.zeros(n, dtype=torch.int64, device="meta")

    cu_seqlens, live = torch.tensor([0, block], dtype=torch.int32), LiveBytes()
    with live:
        start = draft._project([empty(rows) for _ in spec.aux_layers])
        trunk = layer.self_attn.keys(layer.inputs(empty(rows), start), positions(rows))
        hidden, stash, students = empty(block), [], []
        for _ in range(passes):
            x = layer.inputs(empty(block), hidden)
            stash.append(layer.self_attn.keys(x, positions(block)))
            keys, values = map(list, zip(*stash))
            queries = layer.self_attn.queries(x, positions(block))
            attended, _ = branch_attention(queries, keys[0], values[0], keys[1:], values[1:], cu_seqlens)
            hidden = layer.outputs(hidden, attended)
            students.append(draft.norm(hidden))
            hidden = students[-1] if spec.norm_output else hidden
        student, teacher = torch.cat(students), empty(passes * block)
        student.backward(torch.empty_like(student))
        torch.autograd.backward([start, *trunk], [torch.empty_like(x) for x in (start, *trunk)])
        del teacher
    kv = 2 * spec.kv_heads * spec.head_dim * dtype.itemsize * (rows + block * passes)
    return kv, live.peak - kv


def _meta_batch(rows: int) -> Batch:
    """A pack of one document."""
    rollout = Rollout(
        problem_id="",
        sample=0,
        prompt_tokens=[0],
        tokens=[0] * (rows - 1),
        logprobs=[0.0] * (rows - 1),
        finish="stop",
        policy_version=0,
        draft_version=0,
    )
    return pack([rollout], rows, 1)[0].to(torch.device("meta"))


class LiveBytes(TorchDispatchMode):
    """Counts the storages on the meta device that are made while it is entered, less those that have died."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        tree_map_only(Tensor, self._count, out)
        return out

    def _count(self, x: Tensor) -> None:
        storage = x.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if x.device.type != "meta" or key in self._known:
            return

        def died(_: object) -> None:
            self.now -= size
            del self._known[key]

        self._known[key] = weakref.ref(storage, died)
        self.now += size
        self.peak = max(self.peak, self.now)
