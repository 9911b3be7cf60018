"""Transport query_ring: queries travel to the keys and come back as partial results; for few queries."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._library.effects import EffectType

from torchspec.attention import core
from torchspec.attention.call import (
    AttentionCall,
    fake_grads,
    make_call,
    own_grads,
    save_with_branches,
    saved,
)
from torchspec.attention.comm import ProcessGroupComm, padded, padded_pair
from torchspec.attention.core import Keys
from torchspec.attention.kernels import accumulator, kernels_for
from torchspec.attention.plan import Task


def branch_attention_query_ring(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    branch_k: list[Tensor],
    branch_v: list[Tensor],
    cu_seqlens: Tensor,
    *,
    group: str,
    layout: str = "doc_zigzag",
    window: int | None = None,
    anchors: Tensor | None = None,
    slots: int = 0,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """As `branch_ring_attention`, but the queries travel; for few queries on a long trunk."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out, lse, _ = torch.ops.torchspec.branch_attention_query_ring(
        q, k, v, branch_k, branch_v, cu_seqlens, group, layout, window, anchors, slots, scale
    )
    return out, lse


@torch.library.custom_op("torchspec::branch_attention_query_ring", mutates_args=())
def _passq(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    branch_k: list[Tensor],
    branch_v: list[Tensor],
    cu_seqlens: Tensor,
    group: str,
    layout: str,
    window: int | None,
    anchors: Tensor | None,
    slots: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """out, lse, and all ranks' queries [C, longest, H, D] for the backward."""
    job = make_call(q, k, v, branch_k, branch_v, cu_seqlens, group, layout, window, anchors, slots)
    q, k, v = (x.contiguous() for x in (q, k, v))
    queries = job.wire.gather(padded(q, _longest(job))).clone()
    returned = job.wire.exchange(
        torch.stack(
            [_partial(x, k, v, job.tasks(job.wire.rank, plan), scale) for x, plan in zip(queries, job.plans)]
        )
    )
    out, lse = core.merge_parts(q, job.own(branch_k, branch_v), scale)
    out = None if out is None else out.to(accumulator(q.dtype))
    for step in range(job.wire.size):  # own shard first: there every row finds its own key
        source = (job.wire.rank - step) % job.wire.size
        part, part_lse = returned[source, : q.shape[0], :, :-1], returned[source, : q.shape[0], :, -1].T
        if out is not None and lse is not None:
            core.merge_part(out, lse, slice(None), part, part_lse)
        elif job.tasks(source):
            out, lse = part.contiguous(), part_lse.contiguous()
    diagonal = ([], []) if slots else (branch_k, branch_v)
    return *core.join_branches(q, out, lse, *diagonal, window, scale), queries


def _partial(q: Tensor, k: Tensor, v: Tensor, tasks: tuple[Task, ...], scale: float) -> Tensor:
    """[T, H, D + 1]: out and lse of some rank's queries over this rank's keys, as one message.

    Rows without a key here hold (0, -inf), the identity of the merge into their owner's own part.
    """
    acc = accumulator(q.dtype)
    out = torch.zeros_like(q, dtype=acc)
    lse = q.new_full((q.shape[1], q.shape[0]), -torch.inf, dtype=acc)
    for rows, part, part_lse, _ in kernels_for(q.device).part_fwd(q, k, v, tasks, scale):
        core.merge_part(out, lse, rows, part, part_lse)
    return torch.cat([out, lse.T.unsqueeze(-1)], dim=-1)


def _longest(job: AttentionCall) -> int:
    return max(job.queries_of(plan) for plan in job.plans)


@_passq.register_fake
def _(q, k, v, branch_k, branch_v, cu_seqlens, group, layout, window, anchors, slots, scale):
    # How many rows the longest rank has is in the values of cu_seqlens.
    longest = torch.library.get_ctx().new_dynamic_size()
    ranks = ProcessGroupComm(group).size
    return *core.empty_outputs(q), q.new_empty(ranks, longest, *q.shape[1:])


@torch.library.custom_op("torchspec::branch_attention_query_ring_backward", mutates_args=())
def _passq_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    branch_k: list[Tensor],
    branch_v: list[Tensor],
    out: Tensor,
    lse: Tensor,
    queries: Tensor,
    cu_seqlens: Tensor,
    group: str,
    layout: str,
    window: int | None,
    anchors: Tensor | None,
    slots: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor], list[Tensor]]:
    job = make_call(q, k, v, branch_k, branch_v, cu_seqlens, group, layout, window, anchors, slots)
    dout, q, k, v = (x.contiguous() for x in (dout, q, k, v))
    dk, dv = (torch.zeros_like(x, dtype=accumulator(x.dtype)) for x in (k, v))
    longest = _longest(job)
    outs = job.wire.gather(padded_pair(out, dout, longest))
    lses = job.wire.gather(padded(lse.T, longest))
    dqueries = torch.zeros_like(queries, dtype=accumulator(q.dtype))
    for i, plan in enumerate(job.plans):
        source = Keys(k, v, job.tasks(job.wire.rank, plan), dk, dv)
        dq = core.part_grads(outs[i, 1], queries[i], [source], outs[i, 0], lses[i].T.contiguous(), scale)
        if dq is not None:
            dqueries[i] = dq
    dq = job.wire.exchange(dqueries).sum(0)[: q.shape[0]]
    own = list(job.own(branch_k, branch_v))
    own_dq = core.part_grads(dout, q, own, out, lse, scale)
    dq = dq if own_dq is None else dq + own_dq
    diagonal = ([], []) if slots else (branch_k, branch_v)
    dq, dbranch_k, dbranch_v = core.join_branch_grads(dout, q, *diagonal, out, lse, dq, window, scale)
    if slots:
        dbranch_k, dbranch_v = own_grads(own[0], branch_k[0].dtype)
    return dq, dk.to(k.dtype), dv.to(v.dtype), dbranch_k, dbranch_v


@_passq_backward.register_fake
def _(dout, q, k, v, branch_k, branch_v, out, lse, queries, cu, group, layout, window, anchors, slots, scale):
    return fake_grads(q, k, v, branches=(branch_k, branch_v))


def _passq_context(ctx, inputs, output):
    q, k, v, branch_k, branch_v, cu_seqlens, group, layout, window, anchors, slots, scale = inputs
    out, lse, queries = output
    ctx.mark_non_differentiable(lse, queries)
    save_with_branches(ctx, branch_k, branch_v, q, k, v, out, lse, queries, cu_seqlens, anchors)
    ctx.rest = group, layout, window, slots, scale


def _passq_autograd(ctx, dout, _dlse, _dqueries):
    (q, k, v, out, lse, queries, cu_seqlens, anchors), branch_k, branch_v = saved(ctx)
    group, layout, window, slots, scale = ctx.rest
    tensors = dout, q, k, v, branch_k, branch_v, out, lse, queries, cu_seqlens
    grads = torch.ops.torchspec.branch_attention_query_ring_backward(
        *tensors, group, layout, window, anchors, slots, scale
    )
    return *grads, *[None] * 7


_passq.register_autograd(_passq_autograd, setup_context=_passq_context)

for _op in (_passq, _passq_backward):
    _op.register_effect(EffectType.ORDERED)  # no rank may drop or reorder its part of a collective
