"""Transport ring: K/V ride from rank to rank in every pass; little memory, most traffic."""

from __future__ import annotations

from collections.abc import Iterator

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
from torchspec.attention.comm import P2PTransfer, padded_pair
from torchspec.attention.core import Keys
from torchspec.attention.kernels import accumulator


def branch_ring_attention(
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
    """`branch_attention` of a pack spread over `group`; K/V ride a ring, nothing of full length is kept.

    Collective in forward and backward. Source: arXiv 2609.07108.

    Args:
        q: [T, H, D], this rank's rows; with `slots`, of its blocks.
        k, v: [T, G, D], this rank's shard of the trunk.
        branch_k, branch_v: lists of [rows of q, G, D]; with `slots`, one entry: the blocks' own keys.
        cu_seqlens: int32 [documents + 1] of the whole pack, on the CPU.
        layout, window: see `plan`.
        anchors: int32 [A] on the CPU, ascending pack positions of all ranks' block anchors.
        slots: W > 0: q is blocks of W rows (`Plan.block_tasks`). They see the trunk before their anchor, and
            each other within the block in both directions.

    Returns:
        out like q, and lse [H, rows of q], without gradient.

    Raises:
        ValueError: before any message is sent, what does not fit together.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return torch.ops.torchspec.branch_ring_attention(
        q, k, v, branch_k, branch_v, cu_seqlens, group, layout, window, anchors, slots, scale
    )


@torch.library.custom_op("torchspec::branch_ring_attention", mutates_args=())
def _ring(
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
) -> tuple[Tensor, Tensor]:
    job = make_call(q, k, v, branch_k, branch_v, cu_seqlens, group, layout, window, anchors, slots)
    q = q.contiguous()

    def sources() -> Iterator[Keys]:
        yield from job.own(branch_k, branch_v)
        shards = job.wire.ring(padded_pair(k, v, max(job.plan.rows)))
        for step, (shard_k, shard_v) in enumerate(shards):
            yield Keys(shard_k, shard_v, job.tasks((job.wire.rank - step) % job.wire.size))

    diagonal = ([], []) if slots else (branch_k, branch_v)
    return core.attend(q, sources(), *diagonal, window, scale)


@_ring.register_fake
def _(q, k, v, branch_k, branch_v, cu_seqlens, group, layout, window, anchors, slots, scale):
    return core.empty_outputs(q)


@torch.library.custom_op("torchspec::branch_ring_attention_backward", mutates_args=())
def _ring_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    branch_k: list[Tensor],
    branch_v: list[Tensor],
    out: Tensor,
    lse: Tensor,
    cu_seqlens: Tensor,
    group: str,
    layout: str,
    window: int | None,
    anchors: Tensor | None,
    slots: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor], list[Tensor]]:
    job = make_call(q, k, v, branch_k, branch_v, cu_seqlens, group, layout, window, anchors, slots)
    dout, q = dout.contiguous(), q.contiguous()
    own = list(job.own(branch_k, branch_v))
    shard = padded_pair(k, v, max(job.plan.rows))
    home = torch.zeros_like(shard, dtype=accumulator(k.dtype))
    sources = _ring_grad_sources(job, own, shard, home)
    diagonal = ([], []) if slots else (branch_k, branch_v)
    dq, dbranch_k, dbranch_v = core.attend_grads(dout, q, sources, *diagonal, out, lse, window, scale)
    dk, dv = (x[: k.shape[0]].to(k.dtype).clone() for x in home)
    if slots:
        dbranch_k, dbranch_v = own_grads(own[0], branch_k[0].dtype)
    return dq, dk, dv, dbranch_k, dbranch_v


def _ring_grad_sources(job: AttentionCall, own: list[Keys], shard: Tensor, home: Tensor) -> Iterator[Keys]:
    """The shards as they come by; gradients travel one hop behind them and end up in `home`.

    What this rank adds to its own shard never leaves; the sum for another shard starts one hop before this
    rank has it, so it is home after C - 1 hops.
    """
    yield from own
    travelling: P2PTransfer | None = None
    for step, (k, v) in enumerate(job.wire.ring(shard)):
        grads = home if step == 0 else torch.zeros_like(home)
        yield Keys(k, v, job.tasks((job.wire.rank - step) % job.wire.size), grads[0], grads[1])
        if step:
            if travelling is not None:
                grads += travelling.wait()
            travelling = job.wire.pass_on(grads)
    if travelling is not None:
        home += travelling.wait()


@_ring_backward.register_fake
def _(dout, q, k, v, branch_k, branch_v, out, lse, cu, group, layout, window, anchors, slots, scale):
    return fake_grads(q, k, v, branches=(branch_k, branch_v))


def _ring_context(ctx, inputs, output):
    q, k, v, branch_k, branch_v, cu_seqlens, group, layout, window, anchors, slots, scale = inputs
    out, lse = output
    ctx.mark_non_differentiable(lse)
    save_with_branches(ctx, branch_k, branch_v, q, k, v, out, lse, cu_seqlens, anchors)
    ctx.rest = group, layout, window, slots, scale


def _ring_autograd(ctx, dout, _dlse):
    (q, k, v, out, lse, cu_seqlens, anchors), branch_k, branch_v = saved(ctx)
    group, layout, window, slots, scale = ctx.rest
    grads = torch.ops.torchspec.branch_ring_attention_backward(
        dout, q, k, v, branch_k, branch_v, out, lse, cu_seqlens, group, layout, window, anchors, slots, scale
    )
    return *grads, *[None] * 7


_ring.register_autograd(_ring_autograd, setup_context=_ring_context)

for _op in (_ring, _ring_backward):
    _op.register_effect(EffectType.ORDERED)  # no rank may drop or reorder its part of a collective
