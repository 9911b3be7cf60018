"""Exact attention of packed documents over a trunk and row-local branches, as one torch.library op.

A row looks, under one softmax, at the trunk (causally, inside its document) and at its own entry of every
branch. Training-time test is the case with d - 1 branches, a language model the case with none.
The trunk part runs in a flash kernel, the branch part is closed form; they are joined through their
log-sum-exps. The backward is ours: each part needs only the joint out and lse (flash kernels silently
drop the gradient of their lse, so differentiating a merge of their outputs would be wrong).
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchspec.attention.kernels import kernels_for


def packed_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float | None = None
) -> Tensor:
    """Causal attention inside each document of a pack. Differentiable once in q, k and v.

    Grouped-query attention is native: query head h reads k/v head h // (H / G).

    Args:
        q: [T, H, D]. CPU: fp64, fp32, bf16, fp16; CUDA: bf16, fp16.
        k, v: [T, G, D], G divides H; dtype and device of q.
        cu_seqlens: int32 [documents + 1] on the CPU, from 0 to T, never falling.
        scale: factor of the scores; None: D ** -0.5.

    Returns:
        out [T, H, D] in q's dtype.

    Raises:
        ValueError: shapes, dtypes, devices or cu_seqlens that do not fit together.
    """
    return branch_attention(q, k, v, [], [], cu_seqlens, scale)[0]


def branch_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    branch_k: list[Tensor],
    branch_v: list[Tensor],
    cu_seqlens: Tensor,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """`packed_attention` in which row i also sees row i of every branch entry, under the same softmax.

    Differentiable once in q, k, v and every branch entry. Source: arXiv 2609.07108, the merge of
    rank-local branch attention with causal attention over the main sequence.

    Args:
        q, k, v, cu_seqlens, scale: as in `packed_attention`; k and v are the trunk.
        branch_k, branch_v: equally many [T, G, D] each, possibly none.

    Returns:
        out [T, H, D] in q's dtype, and lse [H, T], the natural log-sum-exp of a row's scores over trunk and
        branches, in fp32 (fp64 for fp64 inputs). lse carries no gradient.

    Raises:
        ValueError: shapes, dtypes, devices or cu_seqlens that do not fit together.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return torch.ops.torchspec.branch_attention(q, k, v, branch_k, branch_v, cu_seqlens, scale)


def save_ops() -> list[torch._ops.OpOverload]:
    """Ops whose outputs selective activation checkpointing should save rather than recompute."""
    return [torch.ops.torchspec.branch_attention.default]


@torch.library.custom_op("torchspec::branch_attention", mutates_args=())
def _branch_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    branch_k: list[Tensor],
    branch_v: list[Tensor],
    cu_seqlens: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    _check_tensors(q, k, v, branch_k, branch_v)
    bounds = _bounds(cu_seqlens, q.shape[0])
    if not q.shape[0]:
        return _empty_outputs(q)
    # aten's CPU kernel reads garbage where the last stride is not 1, without an error.
    q, k, v = (x.contiguous() for x in (q, k, v))
    out, lse = kernels_for(q.device).part_fwd(q, k, v, bounds, scale)
    return _join_branches(q, out, lse, branch_k, branch_v, scale) if branch_k else (out, lse)


@_branch_attention.register_fake
def _(q, k, v, branch_k, branch_v, cu_seqlens, scale):
    return _empty_outputs(q)


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
) -> tuple[Tensor, Tensor, Tensor, list[Tensor], list[Tensor]]:
    bounds = _bounds(cu_seqlens, q.shape[0])
    if not q.shape[0]:
        return _empty_grads(q, k, v, branch_k, branch_v)
    dout, q, k, v = (x.contiguous() for x in (dout, q, k, v))
    dq, dk, dv = kernels_for(q.device).part_bwd(dout, q, k, v, out, lse, bounds, scale)
    dbranch_k, dbranch_v = [], []
    if branch_k:
        dq, dbranch_k, dbranch_v = _branch_grads(dout, q, branch_k, branch_v, out, lse, dq, scale)
    return dq, dk, dv, dbranch_k, dbranch_v


@_branch_attention_backward.register_fake
def _(dout, q, k, v, branch_k, branch_v, out, lse, cu_seqlens, scale):
    return _empty_grads(q, k, v, branch_k, branch_v)


def _setup_context(ctx, inputs, output):
    q, k, v, branch_k, branch_v, cu_seqlens, scale = inputs
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(q, k, v, out, lse, cu_seqlens, *branch_k, *branch_v)
    ctx.scale = scale


def _backward(ctx, dout, _dlse):
    q, k, v, out, lse, cu_seqlens, *branches = ctx.saved_tensors
    entries = len(branches) // 2
    grads = torch.ops.torchspec.branch_attention_backward(
        dout, q, k, v, branches[:entries], branches[entries:], out, lse, cu_seqlens, ctx.scale
    )
    return *grads, None, None


_branch_attention.register_autograd(_backward, setup_context=_setup_context)


def _join_branches(
    q: Tensor, out: Tensor, lse: Tensor, branch_k: list[Tensor], branch_v: list[Tensor], scale: float
) -> tuple[Tensor, Tensor]:
    """Merge the branch entries into the trunk's out and lse; arithmetic in lse's dtype.

    An entry is a part of one key: its lse is its score and its out is its value.
    """
    parts = [lse.T] + [_row_scores(q, k, lse.dtype, scale) for k in branch_k]  # each [T, H]
    scores = torch.stack(parts)
    joint = torch.logsumexp(scores, dim=0)
    weights = torch.exp(scores - joint).unsqueeze(-1)
    merged = weights[0] * out
    for weight, v in zip(weights[1:], branch_v, strict=True):
        _by_group(merged, v).addcmul_(_by_group(weight, v), v.unsqueeze(2).to(lse.dtype))
    return merged.to(q.dtype), joint.T.contiguous()


def _branch_grads(
    dout: Tensor,
    q: Tensor,
    branch_k: list[Tensor],
    branch_v: list[Tensor],
    out: Tensor,
    lse: Tensor,
    dq: Tensor,
    scale: float,
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """The branch part of the backward: `dq` completed, and the gradients of every entry.

    P = exp(s - lse), dv = P dout, ds = P (dout.v - D), dq += scale ds k, dk = scale ds q with
    D = rowsum(dout * out); dk and dv are summed over the H / G query heads that share an entry.
    """
    acc = lse.dtype
    dout_acc, q_acc, dq = dout.to(acc), q.to(acc), dq.to(acc)
    delta = (dout_acc * out).sum(-1)  # [T, H]
    dbranch_k, dbranch_v = [], []
    for k, v in zip(branch_k, branch_v, strict=True):
        p = torch.exp(_row_scores(q, k, acc, scale) - lse.T)
        ds = scale * p * (_row_scores(dout, v, acc, 1.0) - delta)
        p, ds = p.unsqueeze(-1), ds.unsqueeze(-1)
        _by_group(dq, k).addcmul_(_by_group(ds, k), k.unsqueeze(2).to(acc))
        dbranch_k.append(_by_group(ds * q_acc, k).sum(2).to(k.dtype))
        dbranch_v.append(_by_group(p * dout_acc, v).sum(2).to(v.dtype))
    return dq.to(q.dtype), dbranch_k, dbranch_v


def _by_group(x: Tensor, k: Tensor) -> Tensor:
    """[T, H, ...] as [T, G, H / G, ...], the query heads of one k/v head together; a view."""
    return x.unflatten(1, (k.shape[1], -1))


def _row_scores(q: Tensor, k: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    """scale * q[i].k[i] per row and query head. q [T, H, D], k [T, G, D]; returns [T, H] in `dtype`."""
    products = _by_group(q, k).to(dtype) * k.unsqueeze(2).to(dtype)
    return scale * products.sum(-1).flatten(1)


def _empty_outputs(q: Tensor) -> tuple[Tensor, Tensor]:
    lse = q.new_empty(q.shape[1], q.shape[0], dtype=torch.promote_types(q.dtype, torch.float32))
    return q.new_empty(q.shape), lse


def _empty_grads(
    q: Tensor, k: Tensor, v: Tensor, branch_k: list[Tensor], branch_v: list[Tensor]
) -> tuple[Tensor, Tensor, Tensor, list[Tensor], list[Tensor]]:
    def like(x: Tensor) -> Tensor:
        return x.new_empty(x.shape)

    return like(q), like(k), like(v), [*map(like, branch_k)], [*map(like, branch_v)]


def _check_tensors(q: Tensor, k: Tensor, v: Tensor, branch_k: list[Tensor], branch_v: list[Tensor]) -> None:
    if q.dim() != 3:
        raise ValueError(f"q has shape {list(q.shape)}; expected [tokens, heads, head_dim]")
    if k.dim() != 3 or not k.shape[1] or q.shape[1] % k.shape[1]:
        raise ValueError(
            f"k has shape {list(k.shape)} and q {list(q.shape)}; k's heads (dim 1) must divide q's evenly"
        )
    if len(branch_k) != len(branch_v):
        raise ValueError(f"branch_k has {len(branch_k)} entries and branch_v {len(branch_v)}; they are pairs")
    named = [("k", k), ("v", v)]
    named += [(f"branch_k[{i}]", x) for i, x in enumerate(branch_k)]
    named += [(f"branch_v[{i}]", x) for i, x in enumerate(branch_v)]
    shape = (q.shape[0], k.shape[1], q.shape[2])
    for name, x in named:
        if x.shape != shape:
            raise ValueError(f"{name} has shape {list(x.shape)}; with this q and k it must be {list(shape)}")
        if (x.dtype, x.device) != (q.dtype, q.device):
            raise ValueError(f"{name} is {x.dtype} on {x.device}; it must be as q, {q.dtype} on {q.device}")


def _bounds(cu_seqlens: Tensor, tokens: int) -> list[int]:
    """cu_seqlens as host integers without empty documents, on which aten's CPU kernel dies (SIGFPE)."""
    if cu_seqlens.dtype != torch.int32 or cu_seqlens.device.type != "cpu" or cu_seqlens.dim() != 1:
        raise ValueError(
            f"cu_seqlens is {cu_seqlens.dtype} {list(cu_seqlens.shape)} on {cu_seqlens.device}; "
            "it must be int32 [documents + 1] on cpu"
        )
    values = cu_seqlens.tolist()
    if not values or values[0] != 0 or values[-1] != tokens or values != sorted(values):
        raise ValueError(f"cu_seqlens is {values}; it must rise from 0 to the {tokens} tokens of q")
    return sorted(set(values))
