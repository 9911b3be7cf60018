"""Exact attention of packed documents over a trunk and row-local branches, as one torch.library op.

A row looks, under one softmax, at the trunk (causally, inside its document) and at its own entry of every
branch. Training-time test is the case with d - 1 branches, a language model the case with none.
The trunk part runs in a flash kernel, the branch part is closed form; they are joined through their
log-sum-exps. The backward is ours: each part needs only the joint out and lse (flash kernels silently
drop the gradient of their lse, so differentiating a merge of their outputs would be wrong).

This module needs one rank; `torchspec.attention.context` has the ops for packs that are spread over ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchspec.attention import core
from torchspec.attention.kernels import accumulator
from torchspec.attention.plan import build_plan


def packed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    scale: float | None = None,
    window: int | None = None,
) -> Tensor:
    """Causal attention inside each document of a pack. Differentiable once in q, k and v.

    Grouped-query attention is native: query head h reads k/v head h // (H / G).

    Args:
        q: [T, H, D]. CPU: fp64, fp32, bf16, fp16; CUDA: bf16, fp16.
        k, v: [T, G, D], G divides H; dtype and device of q.
        cu_seqlens: int32 [documents + 1] on the CPU, from 0 to T, never falling.
        scale: factor of the scores; None: D ** -0.5.
        window: a row sees at most this many positions back, itself included; None: all.

    Returns:
        out [T, H, D] in q's dtype.

    Raises:
        ValueError: shapes, dtypes, devices or cu_seqlens that do not fit together.
    """
    return branch_attention(q, k, v, [], [], cu_seqlens, scale, window)[0]


def branch_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    branch_k: list[Tensor],
    branch_v: list[Tensor],
    cu_seqlens: Tensor,
    scale: float | None = None,
    window: int | None = None,
) -> tuple[Tensor, Tensor]:
    """`packed_attention` in which row i also sees row i of every branch entry, under the same softmax.

    Differentiable once in q, k, v and every branch entry. Source: arXiv 2609.07108, the merge of
    rank-local branch attention with causal attention over the main sequence.

    Args:
        q, k, v, cu_seqlens, scale: as in `packed_attention`; k and v are the trunk.
        branch_k, branch_v: equally many [T, G, D] each, possibly none. With n of them the rows of q stand n
            positions after their trunk keys and entry j (from 1) stands at j: that is what a window cuts.

    Returns:
        out [T, H, D] in q's dtype, and lse [H, T], the natural log-sum-exp of a row's scores over trunk and
        branches, in fp32 (fp64 for fp64 inputs). lse carries no gradient.

    Raises:
        ValueError: shapes, dtypes, devices or cu_seqlens that do not fit together.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return torch.ops.torchspec.branch_attention(q, k, v, branch_k, branch_v, cu_seqlens, scale, window)


@torch.library.custom_op("torchspec::branch_attention", mutates_args=())
def _branch_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    branch_k: list[Tensor],
    branch_v: list[Tensor],
    cu_seqlens: Tensor,
    scale: float,
    window: int | None,
) -> tuple[Tensor, Tensor]:
    core.check_tensors(q, k, v, branch_k, branch_v)
    if k.shape[0] != q.shape[0]:
        raise ValueError(f"k has shape {list(k.shape)}; it needs the {q.shape[0]} rows of q")
    plan = build_plan(core.pack_ends(cu_seqlens, q.shape[0]), 1, 0, window=window)
    # aten's CPU kernel reads garbage where the last stride is not 1, without an error.
    q, k, v = (x.contiguous() for x in (q, k, v))
    source = core.Keys(k, v, plan.tasks(0, len(branch_k)))
    return core.attend(q, [source], branch_k, branch_v, window, scale)


@_branch_attention.register_fake
def _(q, k, v, branch_k, branch_v, cu_seqlens, scale, window):
    return core.empty_outputs(q)


@torch.library.custom_op("torchspec::branch_attention_backward", mutates_args=())
def _branch_attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    branch_k: list[Tensor],
    branch_v: list[Tensor],
    out: Tensor,
    lse: Tensor,
    cu_seqlens: Tensor,
    scale: float,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor], list[Tensor]]:
    plan = build_plan(core.pack_ends(cu_seqlens, q.shape[0]), 1, 0, window=window)
    dout, q, k, v = (x.contiguous() for x in (dout, q, k, v))
    dk, dv = (torch.zeros_like(x, dtype=accumulator(x.dtype)) for x in (k, v))
    source = core.Keys(k, v, plan.tasks(0, len(branch_k)), dk, dv)
    dq, dbranch_k, dbranch_v = core.attend_grads(
        dout, q, [source], branch_k, branch_v, out, lse, window, scale
    )
    return dq, dk.to(k.dtype), dv.to(v.dtype), dbranch_k, dbranch_v


@_branch_attention_backward.register_fake
def _(dout, q, k, v, branch_k, branch_v, out, lse, cu_seqlens, scale, window):
    grads = [core.empty_like(x) for x in (q, k, v)]
    return *grads, [core.empty_like(x) for x in branch_k], [core.empty_like(x) for x in branch_v]


def _setup_context(ctx, inputs, output):
    q, k, v, branch_k, branch_v, cu_seqlens, scale, window = inputs
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(q, k, v, out, lse, cu_seqlens, *branch_k, *branch_v)
    ctx.scale, ctx.window = scale, window


def _backward(ctx, dout, _dlse):
    q, k, v, out, lse, cu_seqlens, *branches = ctx.saved_tensors
    entries = len(branches) // 2
    grads = torch.ops.torchspec.branch_attention_backward(
        dout, q, k, v, branches[:entries], branches[entries:], out, lse, cu_seqlens, ctx.scale, ctx.window
    )
    return *grads, None, None, None


_branch_attention.register_autograd(_backward, setup_context=_setup_context)
