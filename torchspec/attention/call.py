"""The description of one attention call over context-parallel ranks, and what the ops of the transports share."""

from __future__ import annotations

from ast import literal_eval
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from torchspec.attention import core
from torchspec.attention.comm import ProcessGroupComm
from torchspec.attention.core import Keys
from torchspec.attention.kernels import accumulator
from torchspec.attention.plan import Plan, Task, build_plan


class AttentionCall(NamedTuple):
    """Everything about a call that is not a tensor. It is hashable.

    torch.library ops take tensors, numbers and strings only, so an op takes the description as `key()`. The key
    spells the description out: it means the same in the forward, in the backward and in a compiled graph that
    another process has cached.

    Attributes:
        group: name of the process group whose ranks share the pack; "" for one rank without a group.
        window: a row sees at most this many positions back, itself included; None: all.
        slots: W > 0: q holds blocks of W rows (`Plan.block_tasks`). A block sees the trunk before its anchor,
            and its own rows in both directions. 0: q holds rows of the pack.
        scale: factor of the scores; None: D ** -0.5.
    """

    group: str = ""
    window: int | None = None
    slots: int = 0
    scale: float | None = None

    def key(self) -> str:
        """Return the description as a string that `of_key` reads."""
        return f"{self.group!r}, {self.window}, {self.slots}, {self.scale}"

    @classmethod
    def of_key(cls, key: str) -> AttentionCall:
        """Return the description that a key spells out."""
        return cls(*literal_eval(key))


@dataclass(frozen=True)
class BoundCall:
    """An `AttentionCall` on one rank and one pack.

    Attributes:
        entries: branch entries of every query row.
        anchors: of all ranks' blocks; empty without blocks.
        ranges: the local rows that are queries; None: all.
    """

    comm: ProcessGroupComm
    plan: Plan
    entries: int
    anchors: tuple[int, ...]
    slots: int
    ranges: tuple[tuple[int, int], ...] | None
    scale: float

    def tasks(self, source: int | None, plan: Plan | None = None) -> tuple[Task, ...]:
        """Return what this rank's queries, or those of the rank of `plan`, do with the keys of `source`."""
        plan = plan or self.plan
        if self.slots:
            return plan.block_tasks(source, self.anchors, self.slots)
        return plan.tasks(source, self.entries, self.ranges)

    def own(self, branch_k: list[Tensor], branch_v: list[Tensor]) -> Iterator[Keys]:
        """Yield the blocks' own keys as a source; nothing where queries are rows."""
        if self.slots:
            k, v = branch_k[0].contiguous(), branch_v[0].contiguous()
            dk, dv = (torch.zeros_like(x, dtype=accumulator(x.dtype)) for x in (k, v))
            yield Keys(k, v, _block_tasks(k.shape[0], self.slots), dk, dv, opens=True)

    def diagonal(self, branch_k: list[Tensor], branch_v: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Return the entries that only their own row sees: none where the entry is the blocks' own keys."""
        return ([], []) if self.slots else (branch_k, branch_v)

    def attend(
        self, q: Tensor, sources: Iterable[Keys], branch_k: list[Tensor], branch_v: list[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Return out and lse over the trunk's `sources` and the branch entries."""
        sources = chain(self.own(branch_k, branch_v), sources)
        diagonal = self.diagonal(branch_k, branch_v)
        return core.attend(q.contiguous(), sources, *diagonal, self.plan.window, self.scale)

    def attend_grads(
        self,
        dout: Tensor,
        q: Tensor,
        sources: Iterable[Keys],
        branch_k: list[Tensor],
        branch_v: list[Tensor],
        out: Tensor,
        lse: Tensor,
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Return dq and the entries' gradients; the trunk's are added to the sources' dk and dv."""
        own = list(self.own(branch_k, branch_v))
        sources = chain(own, sources)
        diagonal = self.diagonal(branch_k, branch_v)
        window, scale = self.plan.window, self.scale
        dq, dk, dv = core.attend_grads(
            dout.contiguous(), q.contiguous(), sources, *diagonal, out, lse, window, scale
        )
        dk, dv = own_grads(own[0], q.dtype) if own else (dk, dv)
        return dq, dk, dv

    @cached_property
    def plans(self) -> list[Plan]:
        """The plans of all ranks."""
        p = self.plan
        return [build_plan(p.cu_seqlens, p.size, r, p.window) for r in range(p.size)]

    def queries_of(self, plan: Plan) -> int:
        """Return how many query rows the rank of `plan` has."""
        if self.slots:
            return len(plan.own_anchors(self.anchors)) * self.slots
        if self.ranges is not None:
            return sum(b - a for a, b in self.ranges)
        return plan.rows[plan.rank]


def bind(
    key: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    branch_k: list[Tensor],
    branch_v: list[Tensor],
    cu_seqlens: Tensor,
    queries: Tensor | None,
    whole_trunk: bool = False,
) -> BoundCall:
    """Check everything that can be wrong with a call, before its first message.

    Args:
        key: of an `AttentionCall`.
        queries: int32 on the CPU; with slots the anchors [A], else ranges of local rows [R, 2] or None.
        whole_trunk: k and v are of the whole pack, not this rank's rows.

    Raises:
        ValueError: what does not fit together.
    """
    call = AttentionCall.of_key(key)
    if call.slots < 0:
        raise ValueError(f"slots is {call.slots}; it must be 0, or the rows of a block")
    core.check_tensors(q, k, v, branch_k, branch_v, call.slots)
    comm = ProcessGroupComm(call.group)
    plan = build_plan(core.pack_ends(cu_seqlens), comm.size, comm.rank, call.window)
    anchors, ranges = _queries(call.slots, queries)
    scale = q.shape[-1] ** -0.5 if call.scale is None else call.scale
    bound = BoundCall(comm, plan, len(branch_k), anchors, call.slots, ranges, scale)
    expected = [
        ("k", k, plan.tokens if whole_trunk else plan.rows[comm.rank]),
        ("q", q, bound.queries_of(plan)),
    ]
    for name, x, rows in expected:
        if x.shape[0] != rows:
            raise ValueError(
                f"{name} has {x.shape[0]} rows; rank {comm.rank} of {comm.size} must have {rows} of this pack"
            )
    bound.tasks(None)  # a plan that cannot be made fails here
    return bound


def _queries(
    slots: int, queries: Tensor | None
) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...] | None]:
    """Return the anchors and the ranges that `queries` holds."""
    if slots:
        if queries is None:
            raise ValueError(f"anchors is None; blocks (slots = {slots}) need their anchors")
        return tuple(core.host_integers("anchors", queries, 1, "[anchors]")), None
    if queries is None:
        return (), None
    return (), tuple(map(tuple, core.host_integers("rows", queries, 2, "[ranges, 2]")))


@lru_cache(maxsize=64)
def _block_tasks(rows: int, slots: int) -> tuple[Task, ...]:
    return tuple(Task(i, i + slots, i, i + slots, False) for i in range(0, rows, slots))


@lru_cache(maxsize=64)
def places(plan: Plan, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return `plan.places` as tensors on `device`."""
    owner, row = (torch.from_numpy(x).to(device) for x in plan.places)
    return owner, row


def save_call(ctx, tensors: Iterable[Tensor], rest: Iterable) -> None:
    """Keep tensors, and (branch_k, branch_v, cu_seqlens, queries, key) of an op, for its backward."""
    branch_k, branch_v, cu_seqlens, queries, ctx.key = rest
    ctx.save_for_backward(*tensors, cu_seqlens, queries, *branch_k, *branch_v)
    ctx.entries = len(branch_k)


def saved_call(ctx) -> tuple:
    """Return what `save_call` kept, in one row."""
    saved, entries = list(ctx.saved_tensors), ctx.entries  # checkpointing unpacks them only once
    first = len(saved) - 2 * entries
    *tensors, cu_seqlens, queries = saved[:first]
    return *tensors, saved[first : first + entries], saved[first + entries :], cu_seqlens, queries, ctx.key


def fake_grads(*tensors: Tensor, branches: tuple[list[Tensor], list[Tensor]]) -> tuple:
    """Return uninitialised gradients of tensors and branch entries, for fake implementations."""
    grads = [core.empty_like(x) for x in tensors]
    return *grads, *([core.empty_like(x) for x in branch] for branch in branches)


def own_grads(own: Keys, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """Return the gradients of the blocks' own keys and values, as those of the one branch entry."""
    assert own.dk is not None
    assert own.dv is not None
    return [own.dk.to(dtype)], [own.dv.to(dtype)]
