"""Transport query_ring: queries travel to the keys and come back as partial results; for few queries."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch._library.effects import EffectType

from torchspec.attention import core
from torchspec.attention.call import (
    AttentionCall,
    BoundCall,
    bind,
    fake_grads,
    own_grads,
    save_call,
    saved_call,
)
from torchspec.attention.comm import ProcessGroupComm, padded, padded_pair
from torchspec.attention.core import Keys
from torchspec.attention.kernels import accumulator, kernels_for
from torchspec.attention.plan import Task
from torchspec.attention.transports.base import Traffic, Transport


class QueryRing(Transport):
    """Keys, values and their gradients stay at home."""

    name = "query_ring"
    stand_in = "ring"  # how many queries the longest rank has is in the values of cu_seqlens

    def attend(self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, call: AttentionCall) -> Tensor:
        return branch_attention_query_ring(q, k, v, [], [], cu_seqlens, call)[0]

    def sent(self, traffic: Traffic) -> float:
        size, acc = traffic.itemsize, traffic.accumulator
        row = traffic.head_dim * (3 * size + 2 * acc) + 2 * acc
        return traffic.passes * traffic.share * traffic.queries * traffic.heads * row

    def running(self, traffic: Traffic) -> dict[str, int]:
        """Count queries and partial results, as they go and as they come."""
        size, acc, queries = traffic.itemsize, traffic.accumulator, traffic.query_elements
        name = "torchspec::branch_ring_attention"
        return {name: queries * (size + 2 * acc), f"{name}_backward": queries * (2 * size + 2 * acc)}

    def unseen(self, traffic: Traffic) -> int:
        """Return the bytes of all ranks' queries."""
        return traffic.query_elements * traffic.itemsize

    def save_ops(self) -> Sequence[torch._ops.OpOverload]:
        return (torch.ops.torchspec.branch_attention_query_ring.default,)


def branch_attention_query_ring(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    branch_k: list[Tensor],
    branch_v: list[Tensor],
    cu_seqlens: Tensor,
    call: AttentionCall,
    anchors: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return what `branch_ring_attention` returns. The queries travel: for few queries on a long trunk."""
    out, lse, _ = torch.ops.torchspec.branch_attention_query_ring(
        q, k, v, branch_k, branch_v, cu_seqlens, anchors, call.key()
    )
    return out, lse


@torch.library.custom_op("torchspec::branch_attention_query_ring", mutates_args=())
def _query_ring(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    branch_k: list[Tensor],
    branch_v: list[Tensor],
    cu_seqlens: Tensor,
    anchors: Tensor | None,
    key: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return out, lse, and all ranks' queries [C, longest, H, D] for the backward."""
    call = bind(key, q, k, v, branch_k, branch_v, cu_seqlens, anchors)
    comm = call.comm
    q, k, v = (x.contiguous() for x in (q, k, v))
    queries = comm.gather(padded(q, _longest(call))).clone()
    parts = [
        _partial(x, k, v, call.tasks(comm.rank, plan), call.scale) for x, plan in zip(queries, call.plans)
    ]
    returned = comm.exchange(torch.stack(parts))
    out, lse = core.merge_parts(q, call.own(branch_k, branch_v), call.scale)
    out = None if out is None else out.to(accumulator(q.dtype))
    for step in range(comm.size):  # own shard first: there every row finds its own key
        source = (comm.rank - step) % comm.size
        part, part_lse = returned[source, : q.shape[0], :, :-1], returned[source, : q.shape[0], :, -1].T
        if out is not None and lse is not None:
            core.merge_part(out, lse, slice(None), part, part_lse)
        elif call.tasks(source):
            out, lse = part.contiguous(), part_lse.contiguous()
    diagonal = call.diagonal(branch_k, branch_v)
    return *core.join_branches(q, out, lse, *diagonal, call.plan.window, call.scale), queries


def _partial(q: Tensor, k: Tensor, v: Tensor, tasks: tuple[Task, ...], scale: float) -> Tensor:
    """Return [T, H, D + 1]: out and lse of some rank's queries over this rank's keys, as one message.

    Rows without a key here hold (0, -inf), the identity of the merge into their owner's own part.
    """
    acc = accumulator(q.dtype)
    out = torch.zeros_like(q, dtype=acc)
    lse = q.new_full((q.shape[1], q.shape[0]), -torch.inf, dtype=acc)
    for rows, part, part_lse, _ in kernels_for(q.device).part_fwd(q, k, v, tasks, scale):
        core.merge_part(out, lse, rows, part, part_lse)
    return torch.cat([out, lse.T.unsqueeze(-1)], dim=-1)


def _longest(call: BoundCall) -> int:
    return max(call.queries_of(plan) for plan in call.plans)


@_query_ring.register_fake
def _(q, k, v, branch_k, branch_v, cu_seqlens, anchors, key):
    # How many rows the longest rank has is in the values of cu_seqlens.
    longest = torch.library.get_ctx().new_dynamic_size()
    ranks = ProcessGroupComm(AttentionCall.of_key(key).group).size
    return *core.empty_outputs(q), q.new_empty(ranks, longest, *q.shape[1:])


@torch.library.custom_op("torchspec::branch_attention_query_ring_backward", mutates_args=())
def _query_ring_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    queries: Tensor,
    branch_k: list[Tensor],
    branch_v: list[Tensor],
    cu_seqlens: Tensor,
    anchors: Tensor | None,
    key: str,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor], list[Tensor]]:
    call = bind(key, q, k, v, branch_k, branch_v, cu_seqlens, anchors)
    comm, scale = call.comm, call.scale
    dout, q, k, v = (x.contiguous() for x in (dout, q, k, v))
    dk, dv = (torch.zeros_like(x, dtype=accumulator(x.dtype)) for x in (k, v))
    longest = _longest(call)
    outs = comm.gather(padded_pair(out, dout, longest))
    lses = comm.gather(padded(lse.T, longest))
    dqueries = torch.zeros_like(queries, dtype=accumulator(q.dtype))
    for i, plan in enumerate(call.plans):
        source = Keys(k, v, call.tasks(comm.rank, plan), dk, dv)
        dq = core.part_grads(outs[i, 1], queries[i], [source], outs[i, 0], lses[i].T.contiguous(), scale)
        if dq is not None:
            dqueries[i] = dq
    dq = comm.exchange(dqueries).sum(0)[: q.shape[0]]
    own = list(call.own(branch_k, branch_v))
    own_dq = core.part_grads(dout, q, own, out, lse, scale)
    dq = dq if own_dq is None else dq + own_dq
    diagonal = call.diagonal(branch_k, branch_v)
    dq, dbranch_k, dbranch_v = core.join_branch_grads(
        dout, q, *diagonal, out, lse, dq, call.plan.window, scale
    )
    if own:
        dbranch_k, dbranch_v = own_grads(own[0], q.dtype)
    return dq, dk.to(k.dtype), dv.to(v.dtype), dbranch_k, dbranch_v


@_query_ring_backward.register_fake
def _(dout, q, k, v, out, lse, queries, branch_k, branch_v, cu_seqlens, anchors, key):
    return fake_grads(q, k, v, branches=(branch_k, branch_v))


def _query_ring_context(ctx, inputs, output):
    ctx.mark_non_differentiable(*output[1:])
    save_call(ctx, (*inputs[:3], *output), inputs[3:])


def _query_ring_autograd(ctx, dout, _dlse, _dqueries):
    grads = torch.ops.torchspec.branch_attention_query_ring_backward(dout, *saved_call(ctx))
    return *grads, None, None, None


_query_ring.register_autograd(_query_ring_autograd, setup_context=_query_ring_context)

for _op in (_query_ring, _query_ring_backward):
    _op.register_effect(EffectType.ORDERED)  # no rank may drop or reorder its part of a collective
