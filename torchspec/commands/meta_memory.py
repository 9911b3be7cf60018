"""What the parts of an update hold in memory, counted on the meta device: shapes only, no weights."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from torchspec.attention import Traffic, get_transport
from torchspec.data.packing import pack
from torchspec.drafts.trainer import DraftTrainer
from torchspec.models.logprobs import chunk_logprobs
from torchspec.models.policy import Policy
from torchspec.models.spec import PolicySpec
from torchspec.records import Batch, Rollout, SamplingLaw, Taps

META = torch.device("meta")


def layer_bytes(
    policy: Policy, rows: int, dtype: torch.dtype, ranks: int = 1, transport: str = ""
) -> tuple[int, int]:
    """Return the bytes one policy layer keeps for its backward, and the most it has beyond that in its backward.

    Args:
        rows: of a pack, on this rank.
        ranks, transport: that share the pack, and how their keys and values meet.
    """
    batch, running, unseen = meta_batch(rows), {}, 0
    if ranks > 1:
        spec, how, tokens = policy.spec, get_transport(transport), rows * ranks
        sizes = spec.heads, spec.kv_heads, spec.head_dim, dtype.itemsize
        traffic = Traffic(tokens, tokens, ranks, *sizes)
        running, unseen = how.running(traffic), how.unseen(traffic)
        ends = torch.tensor([0, tokens], dtype=torch.int32)
        batch = replace(batch, cu_seqlens=ends, group="meta", transport=how.stand_in or transport)
    h = torch.empty(1, rows, policy.spec.dim, device=META, dtype=dtype, requires_grad=True)
    live = LiveBytes(running)
    with live:
        out = policy.run_layer(policy.layers[0], h, batch)
        kept = live.now
        out.backward(torch.empty_like(out))
    return kept + unseen, live.peak - kept - out.nbytes  # the layer above was the last to need `out`


def logits_bytes(spec: PolicySpec, rows: int, dtype: torch.dtype, law: SamplingLaw) -> int:
    """What the log-probabilities of one chunk of `rows` rows take, forward and backward; the head's gradient is
    among it."""

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, device=META, dtype=dtype, requires_grad=True)

    final, head = empty(rows, spec.dim), empty(spec.vocab_size, spec.dim)
    live = LiveBytes()
    with live:
        logprobs, _ = chunk_logprobs(final, head, torch.zeros(rows, dtype=torch.int64, device=META), law)
        logprobs.backward(torch.empty_like(logprobs))
    return live.peak


def draft_bytes(trainer: DraftTrainer, rows: int) -> int:
    """The most that the draft's training on a pack of `rows` rows makes, gradients of its weights included."""
    spec, dtype = trainer.draft.spec, next(trainer.draft.parameters()).dtype

    def tap() -> Tensor:
        return torch.empty(rows, spec.dim, device=META, dtype=dtype)

    taps = Taps(embeds=tap(), aux=tuple(tap() for _ in spec.aux_layers), final=tap())
    head = torch.empty(spec.draft_vocab_size, spec.dim, device=META, dtype=dtype)
    live = LiveBytes()
    with live:
        trainer.backward(meta_batch(rows), taps, head, 1.0)
    return live.peak


def meta_batch(rows: int) -> Batch:
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
    return pack([rollout], rows, 1)[0].to(META)


class LiveBytes(TorchDispatchMode):
    """Counts the storages on the meta device that are made while it is entered, less those that have died.

    Args:
        inside: bytes that ops of these names have while they run, besides what they take and return.

    Raises:
        LookupError: on leaving, an op of `inside` was never run: it may have been renamed.
    """

    def __init__(self, inside: Mapping[str, int] | None = None) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._inside = inside or {}
        self._unseen = set(self._inside)
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tree_map_only(Tensor, lambda x: self._see(x, is_new=False), (args, kwargs))
        out = func(*args, **(kwargs or {}))
        tree_map_only(Tensor, lambda x: self._see(x, is_new=True), out)
        name = func._schema.name
        self._unseen.discard(name)
        self.peak = max(self.peak, self.now + self._inside.get(name, 0))
        return out

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        super().__exit__(exc_type, exc_val, exc_tb)
        if self._unseen and exc_type is None:
            raise LookupError(f"ops {sorted(self._unseen)} were not run, so their bytes are not counted")

    def _see(self, x: Tensor, *, is_new: bool) -> None:
        """Count a storage unless it is known. What is first seen as an argument was there before."""
        storage = x.untyped_storage()
        key, size = storage._cdata, storage.nbytes() if is_new else 0
        if x.device.type != "meta" or key in self._known:
            return

        def died(_: object) -> None:
            self.now -= size
            del self._known[key]

        self._known[key] = weakref.ref(storage, died)
        self.now += size
