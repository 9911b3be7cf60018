"""Transport gather: the trunk on every rank, gathered once for all passes; least traffic for many queries."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch._library.effects import EffectType

from torchspec.attention import core
from torchspec.attention.call import fake_grads, make_call, own_grads, places, save_with_branches, saved
from torchspec.attention.comm import ProcessGroupComm, padded_pair
from torchspec.attention.core import Keys
from torchspec.attention.kernels import accumulator
from torchspec.attention.plan import build_plan


class Trunk(NamedTuple):
    """Keys and values of a whole pack, in pack order, on every rank.

    Attributes:
        kv: [2, L, G, D] in k's dtype; carries no gradient.
        sink: [2, L, G, D] zeros in the accumulator dtype, of one element's storage. Its gradient is that of
            kv: every pass adds to it in fp32, and its backward is the one reduce-scatter.
    """

    kv: Tensor
    sink: Tensor


def trunk_gather(
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    *,
    group: str,
    layout: str = "doc_zigzag",
    tokens: int | None = None,
) -> Trunk:
    """The trunk of the whole pack on every rank, for all passes: one all-gather, one reduce-scatter back.

    Keep it outside regions of activation checkpointing, or it is gathered again.

    Args:
        k, v: [T, G, D], this rank's shard.
        cu_seqlens: int32 [documents + 1] of the whole pack, on the CPU.
        tokens: L; None: read from cu_seqlens, which torch.compile cannot.

    Raises:
        ValueError: before any message is sent, what does not fit together.
    """
    tokens = int(cu_seqlens[-1]) if tokens is None else tokens
    return Trunk(*torch.ops.torchspec.trunk_gather(k, v, cu_seqlens, tokens, group, layout))


def trunk_attention(
    q: Tensor,
    trunk: Trunk,
    branch_k: list[Tensor],
    branch_v: list[Tensor],
    cu_seqlens: Tensor,
    *,
    group: str,
    layout: str = "doc_zigzag",
    window: int | None = None,
    rows: Tensor | None = None,
    anchors: Tensor | None = None,
    slots: int = 0,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """As `branch_ring_attention`, over a gathered trunk: sends nothing, and may do only some rows.

    Args:
        rows: int32 [R, 2] on the CPU, ascending ranges of this rank's rows. q and the branch entries hold
            just these rows, packed; None: all.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    queries = rows if rows is not None else anchors
    return torch.ops.torchspec.trunk_attention(
        q, trunk.kv, trunk.sink, branch_k, branch_v, cu_seqlens, group, layout, window, queries, slots, scale
    )


@torch.library.custom_op("torchspec::trunk_gather", mutates_args=())
def _trunk_gather(
    k: Tensor, v: Tensor, cu_seqlens: Tensor, tokens: int, group: str, layout: str
) -> tuple[Tensor, Tensor]:
    core.check_tensors(k, k, v, [], [])
    wire = ProcessGroupComm(group)
    plan = build_plan(core.pack_ends(cu_seqlens, tokens), wire.size, wire.rank, layout)
    if k.shape[0] != plan.rows[wire.rank]:
        raise ValueError(
            f"k has {k.shape[0]} rows; rank {wire.rank} of {wire.size} must have {plan.rows[wire.rank]} of this pack"
        )
    shards = wire.gather(padded_pair(k, v, max(plan.rows)))  # [C, 2, rows, G, D]
    owner, row = places(plan, k.device)
    return torch.stack([shards[owner, half, row] for half in (0, 1)]), _sink(k, tokens)


def _sink(k: Tensor, tokens: int) -> Tensor:
    # Not an expanded view: FSDP2 warns of outputs that are views.
    shape = (2, tokens, *k.shape[1:])
    sink = k.new_empty_strided(shape, [0] * len(shape), dtype=accumulator(k.dtype))
    if tokens:
        sink.as_strided((1,), (1,)).zero_()
    return sink


@_trunk_gather.register_fake
def _(k, v, cu_seqlens, tokens, group, layout):
    return k.new_empty(2, tokens, *k.shape[1:]), _sink(k, tokens)


@torch.library.custom_op("torchspec::trunk_gather_backward", mutates_args=())
def _trunk_gather_backward(
    dsink: Tensor, k: Tensor, cu_seqlens: Tensor, group: str, layout: str
) -> tuple[Tensor, Tensor]:
    wire = ProcessGroupComm(group)
    plan = build_plan(core.pack_ends(cu_seqlens), wire.size, wire.rank, layout)
    owner, row = places(plan, k.device)
    shards = dsink.new_zeros(wire.size, 2, max(plan.rows), *dsink.shape[2:])
    for half in (0, 1):
        shards[owner, half, row] = dsink[half]
    dk, dv = (x[: k.shape[0]].to(k.dtype).clone() for x in wire.scatter_sum(shards))
    return dk, dv


@_trunk_gather_backward.register_fake
def _(dsink, k, cu_seqlens, group, layout):
    return core.empty_like(k), core.empty_like(k)


def _gather_context(ctx, inputs, output):
    k, _v, cu_seqlens, _tokens, group, layout = inputs
    ctx.mark_non_differentiable(output[0])
    ctx.save_for_backward(k, cu_seqlens)
    ctx.rest = group, layout


def _gather_autograd(ctx, _dkv, dsink):
    k, cu_seqlens = ctx.saved_tensors
    grads = torch.ops.torchspec.trunk_gather_backward(dsink, k, cu_seqlens, *ctx.rest)
    return *grads, *[None] * 4


_trunk_gather.register_autograd(_gather_autograd, setup_context=_gather_context)


@torch.library.custom_op("torchspec::trunk_attention", mutates_args=())
def _trunk_attention(
    q: Tensor,
    kv: Tensor,
    sink: Tensor,
    branch_k: list[Tensor],
    branch_v: list[Tensor],
    cu_seqlens: Tensor,
    group: str,
    layout: str,
    window: int | None,
    queries: Tensor | None,
    slots: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    job = make_call(
        q, kv[0], kv[1], branch_k, branch_v, cu_seqlens, group, layout, window, queries, slots, True
    )
    sources = [*job.own(branch_k, branch_v), Keys(kv[0], kv[1], job.tasks(None))]
    diagonal = ([], []) if slots else (branch_k, branch_v)
    return core.attend(q.contiguous(), sources, *diagonal, window, scale)


@_trunk_attention.register_fake
def _(q, kv, sink, branch_k, branch_v, cu_seqlens, group, layout, window, queries, slots, scale):
    return core.empty_outputs(q)


@torch.library.custom_op("torchspec::trunk_attention_backward", mutates_args=())
def _trunk_attention_backward(
    dout: Tensor,
    q: Tensor,
    kv: Tensor,
    branch_k: list[Tensor],
    branch_v: list[Tensor],
    out: Tensor,
    lse: Tensor,
    cu_seqlens: Tensor,
    group: str,
    layout: str,
    window: int | None,
    queries: Tensor | None,
    slots: int,
    scale: float,
) -> tuple[Tensor, Tensor, list[Tensor], list[Tensor]]:
    job = make_call(
        q, kv[0], kv[1], branch_k, branch_v, cu_seqlens, group, layout, window, queries, slots, True
    )
    own = list(job.own(branch_k, branch_v))
    dsink = torch.zeros_like(kv, dtype=accumulator(kv.dtype))
    sources = [*own, Keys(kv[0], kv[1], job.tasks(None), dsink[0], dsink[1])]
    diagonal = ([], []) if slots else (branch_k, branch_v)
    dq, dbranch_k, dbranch_v = core.attend_grads(
        dout.contiguous(), q.contiguous(), sources, *diagonal, out, lse, window, scale
    )
    if slots:
        dbranch_k, dbranch_v = own_grads(own[0], branch_k[0].dtype)
    return dq, dsink, dbranch_k, dbranch_v


@_trunk_attention_backward.register_fake
def _(dout, q, kv, branch_k, branch_v, out, lse, cu, group, layout, window, queries, slots, scale):
    dsink = core.empty_like(kv, accumulator(kv.dtype))
    dq, *dbranches = fake_grads(q, branches=(branch_k, branch_v))
    return dq, dsink, *dbranches


def _trunk_context(ctx, inputs, output):
    q, kv, _sink, branch_k, branch_v, cu_seqlens, group, layout, window, queries, slots, scale = inputs
    out, lse = output
    ctx.mark_non_differentiable(lse)
    save_with_branches(ctx, branch_k, branch_v, q, kv, out, lse, cu_seqlens, queries)
    ctx.rest = group, layout, window, slots, scale


def _trunk_autograd(ctx, dout, _dlse):
    (q, kv, out, lse, cu_seqlens, queries), branch_k, branch_v = saved(ctx)
    group, layout, window, slots, scale = ctx.rest
    dq, dsink, dbranch_k, dbranch_v = torch.ops.torchspec.trunk_attention_backward(
        dout, q, kv, branch_k, branch_v, out, lse, cu_seqlens, group, layout, window, queries, slots, scale
    )
    return dq, None, dsink, dbranch_k, dbranch_v, *[None] * 7


_trunk_attention.register_autograd(_trunk_autograd, setup_context=_trunk_context)

for _op in (_trunk_gather, _trunk_gather_backward):
    _op.register_effect(EffectType.ORDERED)  # no rank may drop or reorder its part of a collective
