"""A pack's keys and values on every rank: gathered once, attended to by any number of passes and row blocks."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch._library.effects import EffectType

from torchspec.attention import core
from torchspec.attention.call import AttentionCall, bind, fake_grads, places, save_call, saved_call
from torchspec.attention.comm import ProcessGroupComm, padded_pair
from torchspec.attention.core import Keys
from torchspec.attention.kernels import accumulator
from torchspec.attention.plan import build_plan


class Trunk(NamedTuple):
    """Keys and values of a whole pack, in pack order, on every rank.

    Attributes:
        kv: [2, L, G, D] in k's dtype; carries no gradient.
        grad_accumulator: [2, L, G, D] zeros in the accumulator dtype, with the storage of one element. Its
            gradient is that of kv: every pass adds to it in fp32, and its backward is the one reduce-scatter.
    """

    kv: Tensor
    grad_accumulator: Tensor


def trunk_gather(k: Tensor, v: Tensor, cu_seqlens: Tensor, *, group: str, tokens: int | None = None) -> Trunk:
    """Return the trunk of the whole pack, for all passes: one all-gather, and one reduce-scatter back.

    Keep the call outside regions of activation checkpointing, or the trunk is gathered again.

    Args:
        k, v: [T, G, D], this rank's shard.
        cu_seqlens: int32 [documents + 1] of the whole pack, on the CPU.
        tokens: L; None: read from cu_seqlens, which torch.compile cannot.

    Raises:
        ValueError: before any message is sent, what does not fit together.
    """
    tokens = int(cu_seqlens[-1]) if tokens is None else tokens
    return Trunk(*torch.ops.torchspec.trunk_gather(k, v, cu_seqlens, tokens, group))


def trunk_attention(
    q: Tensor,
    trunk: Trunk,
    branch_k: list[Tensor],
    branch_v: list[Tensor],
    cu_seqlens: Tensor,
    call: AttentionCall,
    queries: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return `branch_attention` over a gathered trunk. Sends nothing, and may do only some rows.

    Args:
        q: [T, H, D], this rank's rows, or those that `queries` names, packed; branch entries [T, G, D] likewise.
        cu_seqlens: int32 [documents + 1] of the whole pack, on the CPU.
        queries: int32 on the CPU. With `call.slots`: [A], the anchors of all ranks' blocks. Else [R, 2],
            ascending ranges of this rank's rows; None: all rows.

    Returns:
        out like q, and lse [H, rows of q], without gradient.

    Raises:
        ValueError: what does not fit together.
    """
    return torch.ops.torchspec.trunk_attention(q, *trunk, branch_k, branch_v, cu_seqlens, queries, call.key())


@torch.library.custom_op("torchspec::trunk_gather", mutates_args=())
def _trunk_gather(k: Tensor, v: Tensor, cu_seqlens: Tensor, tokens: int, group: str) -> tuple[Tensor, Tensor]:
    core.check_tensors(k, k, v, [], [])
    comm = ProcessGroupComm(group)
    plan = build_plan(core.pack_ends(cu_seqlens, tokens), comm.size, comm.rank)
    rows = plan.rows[comm.rank]
    if k.shape[0] != rows:
        raise ValueError(
            f"k has {k.shape[0]} rows; rank {comm.rank} of {comm.size} must have {rows} of this pack"
        )
    shards = comm.gather(padded_pair(k, v, max(plan.rows)))  # [C, 2, rows, G, D]
    owner, row = places(plan, k.device)
    return torch.stack([shards[owner, half, row] for half in (0, 1)]), _grad_accumulator(k, tokens)


def _grad_accumulator(k: Tensor, tokens: int) -> Tensor:
    # Not an expanded view: FSDP2 warns of outputs that are views.
    shape = (2, tokens, *k.shape[1:])
    x = k.new_empty_strided(shape, [0] * len(shape), dtype=accumulator(k.dtype))
    if tokens:
        x.as_strided((1,), (1,)).zero_()
    return x


@_trunk_gather.register_fake
def _(k, v, cu_seqlens, tokens, group):
    return k.new_empty(2, tokens, *k.shape[1:]), _grad_accumulator(k, tokens)


@torch.library.custom_op("torchspec::trunk_gather_backward", mutates_args=())
def _trunk_gather_backward(dkv: Tensor, k: Tensor, cu_seqlens: Tensor, group: str) -> tuple[Tensor, Tensor]:
    comm = ProcessGroupComm(group)
    plan = build_plan(core.pack_ends(cu_seqlens), comm.size, comm.rank)
    owner, row = places(plan, k.device)
    shards = dkv.new_zeros(comm.size, 2, max(plan.rows), *dkv.shape[2:])
    for half in (0, 1):
        shards[owner, half, row] = dkv[half]
    dk, dv = (x[: k.shape[0]].to(k.dtype).clone() for x in comm.scatter_sum(shards))
    return dk, dv


@_trunk_gather_backward.register_fake
def _(dkv, k, cu_seqlens, group):
    return core.empty_like(k), core.empty_like(k)


def _gather_context(ctx, inputs, output):
    k, _v, cu_seqlens, _tokens, ctx.group = inputs
    ctx.mark_non_differentiable(output[0])
    ctx.save_for_backward(k, cu_seqlens)


def _gather_autograd(ctx, _dkv, dkv):
    grads = torch.ops.torchspec.trunk_gather_backward(dkv, *ctx.saved_tensors, ctx.group)
    return *grads, None, None, None


_trunk_gather.register_autograd(_gather_autograd, setup_context=_gather_context)


@torch.library.custom_op("torchspec::trunk_attention", mutates_args=())
def _trunk_attention(
    q: Tensor,
    kv: Tensor,
    grad_accumulator: Tensor,
    branch_k: list[Tensor],
    branch_v: list[Tensor],
    cu_seqlens: Tensor,
    queries: Tensor | None,
    key: str,
) -> tuple[Tensor, Tensor]:
    k, v = kv
    call = bind(key, q, k, v, branch_k, branch_v, cu_seqlens, queries, whole_trunk=True)
    return call.attend(q, [Keys(k, v, call.tasks(None))], branch_k, branch_v)


@_trunk_attention.register_fake
def _(q, kv, grad_accumulator, branch_k, branch_v, cu_seqlens, queries, key):
    return core.empty_outputs(q)


@torch.library.custom_op("torchspec::trunk_attention_backward", mutates_args=())
def _trunk_attention_backward(
    dout: Tensor,
    q: Tensor,
    kv: Tensor,
    out: Tensor,
    lse: Tensor,
    branch_k: list[Tensor],
    branch_v: list[Tensor],
    cu_seqlens: Tensor,
    queries: Tensor | None,
    key: str,
) -> tuple[Tensor, Tensor, list[Tensor], list[Tensor]]:
    k, v = kv
    call = bind(key, q, k, v, branch_k, branch_v, cu_seqlens, queries, whole_trunk=True)
    dkv = torch.zeros_like(kv, dtype=accumulator(kv.dtype))
    source = Keys(k, v, call.tasks(None), dkv[0], dkv[1])
    dq, dbranch_k, dbranch_v = call.attend_grads(dout, q, [source], branch_k, branch_v, out, lse)
    return dq, dkv, dbranch_k, dbranch_v


@_trunk_attention_backward.register_fake
def _(dout, q, kv, out, lse, branch_k, branch_v, cu_seqlens, queries, key):
    dkv = core.empty_like(kv, accumulator(kv.dtype))
    dq, *dbranches = fake_grads(q, branches=(branch_k, branch_v))
    return dq, dkv, *dbranches


def _trunk_context(ctx, inputs, output):
    q, kv, _grad_accumulator, *rest = inputs
    ctx.mark_non_differentiable(output[1])
    save_call(ctx, (q, kv, *output), rest)


def _trunk_autograd(ctx, dout, _dlse):
    dq, dkv, *dbranches = torch.ops.torchspec.trunk_attention_backward(dout, *saved_call(ctx))
    return dq, None, dkv, *dbranches, None, None, None


_trunk_attention.register_autograd(_trunk_autograd, setup_context=_trunk_context)

for _op in (_trunk_gather, _trunk_gather_backward):
    _op.register_effect(EffectType.ORDERED)  # no rank may drop or reorder its part of a collective
