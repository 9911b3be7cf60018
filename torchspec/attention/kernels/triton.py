# pyrefly: ignore-errors
"""Branches on CUDA, fused in Triton: one kernel forward, one backward, nothing in memory but the results.

Each of the K entries is a tensor of its own, reached through its own pointer: no stack of the passes. The
arithmetic is fp32 in registers. On the CPU the kernels run under TRITON_INTERPRET=1 in fp32, for tests.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS = 32  # rows of one program


def branch_fwd(
    q: Tensor,
    out: Tensor | None,
    lse: Tensor | None,
    branch_k: list[Tensor],
    branch_v: list[Tensor],
    scale: float,
) -> tuple[Tensor, Tensor]:
    tokens, heads, dim = q.shape
    joined, joint = torch.empty_like(q), torch.empty(heads, tokens, dtype=torch.float32, device=q.device)
    keys, values = (tuple(x.contiguous() for x in branch) for branch in (branch_k, branch_v))
    trunk = out is not None
    _forward[triton.cdiv(tokens, _ROWS), heads](
        q,
        out if trunk else q,
        lse if trunk else joint,
        joined,
        joint,
        keys,
        values,
        scale,
        tokens,
        TRUNK=trunk,
        ENTRIES=len(keys),
        HEADS=heads,
        KV_HEADS=keys[0].shape[1],
        DIM=dim,
        WIDTH=triton.next_power_of_2(dim),
        ROWS=_ROWS,
    )
    return joined, joint


def branch_bwd(
    dout: Tensor,
    q: Tensor,
    branch_k: list[Tensor],
    branch_v: list[Tensor],
    out: Tensor,
    lse: Tensor,
    dq: Tensor | None,
    scale: float,
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    tokens, heads, dim = q.shape
    keys, values = (tuple(x.contiguous() for x in branch) for branch in (branch_k, branch_v))
    kv_heads = keys[0].shape[1]
    total = torch.empty_like(q)
    dkeys, dvalues = (tuple(torch.empty_like(x) for x in branch) for branch in (keys, values))
    _backward[triton.cdiv(tokens, _ROWS), kv_heads](
        dout,
        q,
        out,
        lse,
        total if dq is None else dq,
        total,
        keys,
        values,
        dkeys,
        dvalues,
        scale,
        tokens,
        TRUNK=dq is not None,
        ENTRIES=len(keys),
        HEADS=heads,
        KV_HEADS=kv_heads,
        DIM=dim,
        WIDTH=triton.next_power_of_2(dim),
        ROWS=_ROWS,
    )
    return total, list(dkeys), list(dvalues)


@triton.jit
def _rows_of(x, at, mask):
    return tl.load(x + at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _forward(
    q_ptr,
    trunk_ptr,
    trunk_lse_ptr,
    out_ptr,
    lse_ptr,
    keys,
    values,
    scale,
    tokens,
    TRUNK: tl.constexpr,
    ENTRIES: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):
    """One program merges ROWS rows of one query head: an online softmax that starts from the trunk's part."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    head = tl.program_id(1)
    kv_head = head // (HEADS // KV_HEADS)
    dim = tl.arange(0, WIDTH)
    inside = row < tokens
    mask = inside[:, None] & (dim < DIM)[None, :]
    at = (row[:, None] * HEADS + head) * DIM + dim[None, :]
    kv_at = (row[:, None] * KV_HEADS + kv_head) * DIM + dim[None, :]
    q = _rows_of(q_ptr, at, mask)
    if TRUNK:
        high = tl.load(trunk_lse_ptr + head.to(tl.int64) * tokens + row, mask=inside, other=0.0)
        weight = tl.full((ROWS,), 1.0, tl.float32)
        total = _rows_of(trunk_ptr, at, mask)
    else:
        high = tl.full((ROWS,), -1.0e30, tl.float32)  # finite: -inf minus -inf is not a number
        weight = tl.zeros((ROWS,), tl.float32)
        total = tl.zeros((ROWS, WIDTH), tl.float32)
    for entry in tl.static_range(ENTRIES):
        score = scale * tl.sum(q * _rows_of(keys[entry], kv_at, mask), axis=1)
        new_high = tl.maximum(high, score)
        shrink = tl.exp(high - new_high)
        p = tl.exp(score - new_high)
        total = total * shrink[:, None] + p[:, None] * _rows_of(values[entry], kv_at, mask)
        weight = weight * shrink + p
        high = new_high
    tl.store(out_ptr + at, (total / weight[:, None]).to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(lse_ptr + head.to(tl.int64) * tokens + row, high + tl.log(weight), mask=inside)


@triton.jit
def _backward(
    dout_ptr,
    q_ptr,
    out_ptr,
    lse_ptr,
    trunk_dq_ptr,
    dq_ptr,
    keys,
    values,
    dkeys,
    dvalues,
    scale,
    tokens,
    TRUNK: tl.constexpr,
    ENTRIES: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):
    """One program does ROWS rows of one k/v head, in two sweeps over heads and entries.

    The first sums every query head's dq over the entries, the second every entry's dk and dv over the query
    heads that share it. Scores are computed twice; in return each sum stays in registers until it is final.
    """
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    kv_head = tl.program_id(1)
    dim = tl.arange(0, WIDTH)
    inside = row < tokens
    mask = inside[:, None] & (dim < DIM)[None, :]
    kv_at = (row[:, None] * KV_HEADS + kv_head) * DIM + dim[None, :]
    GROUP: tl.constexpr = HEADS // KV_HEADS
    for member in range(GROUP):  # unrolled it spills: 3 kB a thread at 6 entries (sm_90), 0.5 kB so
        head = kv_head * GROUP + member
        at = (row[:, None] * HEADS + head) * DIM + dim[None, :]
        q, dout = _rows_of(q_ptr, at, mask), _rows_of(dout_ptr, at, mask)
        delta = tl.sum(_rows_of(out_ptr, at, mask) * dout, axis=1)
        lse = tl.load(lse_ptr + head.to(tl.int64) * tokens + row, mask=inside, other=0.0)
        dq = _rows_of(trunk_dq_ptr, at, mask) if TRUNK else tl.zeros((ROWS, WIDTH), tl.float32)
        for entry in tl.static_range(ENTRIES):
            k = _rows_of(keys[entry], kv_at, mask)
            p = tl.exp(scale * tl.sum(q * k, axis=1) - lse)
            ds = scale * p * (tl.sum(dout * _rows_of(values[entry], kv_at, mask), axis=1) - delta)
            dq += ds[:, None] * k
        tl.store(dq_ptr + at, dq.to(dq_ptr.dtype.element_ty), mask=mask)
    for entry in tl.static_range(ENTRIES):
        k, v = _rows_of(keys[entry], kv_at, mask), _rows_of(values[entry], kv_at, mask)
        dk = tl.zeros((ROWS, WIDTH), tl.float32)
        dv = tl.zeros((ROWS, WIDTH), tl.float32)
        for member in range(GROUP):
            head = kv_head * GROUP + member
            at = (row[:, None] * HEADS + head) * DIM + dim[None, :]
            q, dout = _rows_of(q_ptr, at, mask), _rows_of(dout_ptr, at, mask)
            delta = tl.sum(_rows_of(out_ptr, at, mask) * dout, axis=1)
            lse = tl.load(lse_ptr + head.to(tl.int64) * tokens + row, mask=inside, other=0.0)
            p = tl.exp(scale * tl.sum(q * k, axis=1) - lse)
            ds = scale * p * (tl.sum(dout * v, axis=1) - delta)
            dk += ds[:, None] * q
            dv += p[:, None] * dout
        tl.store(dkeys[entry] + kv_at, dk.to(dkeys[entry].dtype.element_ty), mask=mask)
        tl.store(dvalues[entry] + kv_at, dv.to(dvalues[entry].dtype.element_ty), mask=mask)
