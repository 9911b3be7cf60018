"""Transport ring: keys and values travel from rank to rank in every pass; little memory, most traffic."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch._library.effects import EffectType

from torchspec.attention import core
from torchspec.attention.call import AttentionCall, BoundCall, bind, fake_grads, save_call, saved_call
from torchspec.attention.comm import P2PTransfer, padded_pair
from torchspec.attention.core import Keys
from torchspec.attention.kernels import accumulator
from torchspec.attention.transports.base import Traffic, Transport


class Ring(Transport):
    """Keys and values make C - 1 hops in every pass; in the backward fp32 gradients follow them."""

    name = "ring"

    def attend(self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, call: AttentionCall) -> Tensor:
        return branch_ring_attention(q, k, v, [], [], cu_seqlens, call)[0]

    def sent(self, traffic: Traffic) -> float:
        element = 2 * traffic.itemsize + traffic.accumulator
        return traffic.passes * traffic.share * traffic.trunk * element

    def running(self, traffic: Traffic) -> dict[str, int]:
        pair = traffic.trunk // traffic.size
        shards = 2 * pair * traffic.itemsize  # the shard that is here and the one that comes
        grads = min(4, traffic.size + 1) * pair * traffic.accumulator  # one hop behind
        name = "torchspec::branch_ring_attention"
        return {name: shards, f"{name}_backward": shards + grads}

    def save_ops(self) -> Sequence[torch._ops.OpOverload]:
        return (torch.ops.torchspec.branch_ring_attention.default,)


def branch_ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    branch_k: list[Tensor],
    branch_v: list[Tensor],
    cu_seqlens: Tensor,
    call: AttentionCall,
    anchors: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return `branch_attention` of a pack spread over `call.group`. Nothing of the pack's length is kept.

    Collective in forward and backward. Source: arXiv 2609.07108.

    Args:
        q: [T, H, D], this rank's rows; with slots, those of its blocks.
        k, v: [T, G, D], this rank's shard of the trunk.
        branch_k, branch_v: lists of [rows of q, G, D]; with slots, one entry: the blocks' own keys.
        cu_seqlens: int32 [documents + 1] of the whole pack, on the CPU.
        anchors: with slots: int32 [A] on the CPU, ascending pack positions of all ranks' block anchors.

    Returns:
        out like q, and lse [H, rows of q], without gradient.

    Raises:
        ValueError: before any message is sent, what does not fit together.
    """
    return torch.ops.torchspec.branch_ring_attention(
        q, k, v, branch_k, branch_v, cu_seqlens, anchors, call.key()
    )


@torch.library.custom_op("torchspec::branch_ring_attention", mutates_args=())
def _ring(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    branch_k: list[Tensor],
    branch_v: list[Tensor],
    cu_seqlens: Tensor,
    anchors: Tensor | None,
    key: str,
) -> tuple[Tensor, Tensor]:
    call = bind(key, q, k, v, branch_k, branch_v, cu_seqlens, anchors)

    def sources() -> Iterator[Keys]:
        shards = call.comm.ring(padded_pair(k, v, max(call.plan.rows)))
        for step, (shard_k, shard_v) in enumerate(shards):
            yield Keys(shard_k, shard_v, call.tasks((call.comm.rank - step) % call.comm.size))

    return call.attend(q, sources(), branch_k, branch_v)


@_ring.register_fake
def _(q, k, v, branch_k, branch_v, cu_seqlens, anchors, key):
    return core.empty_outputs(q)


@torch.library.custom_op("torchspec::branch_ring_attention_backward", mutates_args=())
def _ring_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    branch_k: list[Tensor],
    branch_v: list[Tensor],
    cu_seqlens: Tensor,
    anchors: Tensor | None,
    key: str,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor], list[Tensor]]:
    call = bind(key, q, k, v, branch_k, branch_v, cu_seqlens, anchors)
    shard = padded_pair(k, v, max(call.plan.rows))
    home = torch.zeros_like(shard, dtype=accumulator(k.dtype))
    sources = _grad_sources(call, shard, home)
    dq, dbranch_k, dbranch_v = call.attend_grads(dout, q, sources, branch_k, branch_v, out, lse)
    dk, dv = (x[: k.shape[0]].to(k.dtype).clone() for x in home)
    return dq, dk, dv, dbranch_k, dbranch_v


def _grad_sources(call: BoundCall, shard: Tensor, home: Tensor) -> Iterator[Keys]:
    """Yield the shards as they arrive. Gradients travel one hop behind them and end up in `home`.

    What this rank adds to its own shard never leaves. The sum for another shard starts one hop before this rank
    has that shard, so it is home after C - 1 hops.
    """
    travelling: P2PTransfer | None = None
    for step, (k, v) in enumerate(call.comm.ring(shard)):
        grads = home if step == 0 else torch.zeros_like(home)
        yield Keys(k, v, call.tasks((call.comm.rank - step) % call.comm.size), grads[0], grads[1])
        if step:
            if travelling is not None:
                grads += travelling.wait()
            travelling = call.comm.pass_on(grads)
    if travelling is not None:
        home += travelling.wait()


@_ring_backward.register_fake
def _(dout, q, k, v, out, lse, branch_k, branch_v, cu_seqlens, anchors, key):
    return fake_grads(q, k, v, branches=(branch_k, branch_v))


def _ring_context(ctx, inputs, output):
    ctx.mark_non_differentiable(output[1])
    save_call(ctx, (*inputs[:3], *output), inputs[3:])


def _ring_autograd(ctx, dout, _dlse):
    grads = torch.ops.torchspec.branch_ring_attention_backward(dout, *saved_call(ctx))
    return *grads, None, None, None


_ring.register_autograd(_ring_autograd, setup_context=_ring_context)

for _op in (_ring, _ring_backward):
    _op.register_effect(EffectType.ORDERED)  # no rank may drop or reorder its part of a collective
