"""The integers of one context-parallel call, checked before its first message; helpers of the three ops."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from torchspec.attention import core
from torchspec.attention.comm import ProcessGroupComm
from torchspec.attention.core import Keys
from torchspec.attention.kernels import accumulator
from torchspec.attention.plan import Plan, Task, build_plan


@dataclass(frozen=True)
class AttentionCall:
    """The integers of one call: who this rank is, and what its queries are."""

    wire: ProcessGroupComm
    plan: Plan
    entries: int
    anchors: tuple[int, ...]
    slots: int
    ranges: tuple[tuple[int, int], ...] | None

    def tasks(self, source: int | None, plan: Plan | None = None) -> tuple[Task, ...]:
        """Of this rank, or of the one whose plan is given."""
        plan = plan or self.plan
        if self.slots:
            return plan.block_tasks(source, self.anchors, self.slots)
        return plan.tasks(source, self.entries, self.ranges)

    def own(self, branch_k: list[Tensor], branch_v: list[Tensor]) -> Iterator[Keys]:
        """The blocks' own keys as a source; nothing where queries are rows."""
        if self.slots:
            k, v = branch_k[0].contiguous(), branch_v[0].contiguous()
            dk, dv = (torch.zeros_like(x, dtype=accumulator(x.dtype)) for x in (k, v))
            yield Keys(k, v, _block_tasks(k.shape[0], self.slots), dk, dv, opens=True)

    @cached_property
    def plans(self) -> list[Plan]:
        """Every rank's."""
        p = self.plan
        return [build_plan(p.cu_seqlens, p.size, r, p.layout, p.window) for r in range(p.size)]

    def queries_of(self, plan: Plan) -> int:
        """Query rows of the rank whose plan it is."""
        if self.slots:
            return len(plan.own_anchors(self.anchors)) * self.slots
        if self.ranges is not None:
            return sum(b - a for a, b in self.ranges)
        return plan.rows[plan.rank]


def make_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    branch_k: list[Tensor],
    branch_v: list[Tensor],
    cu_seqlens: Tensor,
    group: str,
    layout: str,
    window: int | None,
    queries: Tensor | None,
    slots: int,
    whole_trunk: bool = False,
) -> AttentionCall:
    """Check everything that can be wrong with a call, before its first message."""
    if slots < 0:
        raise ValueError(f"slots is {slots}; it must be 0, or the rows of a block")
    core.check_tensors(q, k, v, branch_k, branch_v, slots)
    wire = ProcessGroupComm(group)
    plan = build_plan(core.pack_ends(cu_seqlens), wire.size, wire.rank, layout, window)
    anchors, ranges = (), None
    if slots:
        if queries is None:
            raise ValueError(f"anchors is None; blocks (slots = {slots}) need their anchors")
        anchors = tuple(core.host_integers("anchors", queries, 1, "[anchors]"))
    elif queries is not None:
        ranges = tuple(map(tuple, core.host_integers("rows", queries, 2, "[ranges, 2]")))
    job = AttentionCall(wire, plan, len(branch_k), anchors, slots, ranges)
    expected = [
        ("k", k, plan.tokens if whole_trunk else plan.rows[wire.rank]),
        ("q", q, job.queries_of(plan)),
    ]
    for name, x, rows in expected:
        if x.shape[0] != rows:
            raise ValueError(
                f"{name} has {x.shape[0]} rows; rank {wire.rank} of {wire.size} must have {rows} of this pack"
            )
    job.tasks(None)  # a plan that cannot be made fails here
    return job


@lru_cache(maxsize=64)
def _block_tasks(rows: int, slots: int) -> tuple[Task, ...]:
    return tuple(Task(i, i + slots, i, i + slots, False) for i in range(0, rows, slots))


@lru_cache(maxsize=64)
def places(plan: Plan, device: torch.device) -> tuple[Tensor, Tensor]:
    owner, row = (torch.from_numpy(x).to(device) for x in plan.places)
    return owner, row


def save_with_branches(ctx, branch_k: list[Tensor], branch_v: list[Tensor], *tensors: Tensor | None) -> None:
    ctx.save_for_backward(*tensors, *branch_k, *branch_v)
    ctx.entries = len(branch_k)


def saved(ctx) -> tuple[list, list[Tensor], list[Tensor]]:
    """(the other tensors, branch_k, branch_v)"""
    saved = list(ctx.saved_tensors)
    first = len(saved) - 2 * ctx.entries
    return saved[:first], saved[first : first + ctx.entries], saved[first + ctx.entries :]


def fake_grads(*tensors: Tensor, branches: tuple[list[Tensor], list[Tensor]]) -> tuple:
    grads = [core.empty_like(x) for x in tensors]
    return *grads, *([core.empty_like(x) for x in branch] for branch in branches)


def own_grads(own: Keys, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    assert own.dk is not None
    assert own.dv is not None
    return [own.dk.to(dtype)], [own.dv.to(dtype)]
