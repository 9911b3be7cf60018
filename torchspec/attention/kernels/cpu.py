"""CPU kernels: aten's flash attention, a call or two per task, and branches in blocks of rows.

fp64 and fp32 inputs are computed in their own dtype. bf16 and fp16 inputs are computed in fp32, so that partial
results are rounded once, after they have been summed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from torchspec.attention.kernels import accumulator
from torchspec.attention.plan import Task

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_BAND_ROWS = 256  # rows of a windowed task that share one small mask
_BRANCH_ROWS = 1024  # bounds the temporaries; smaller blocks only cost calls

_Call = tuple[slice, slice, bool, Tensor | None]  # rows, keys, causal, additive mask


def part_fwd(
    q: Tensor, k: Tensor, v: Tensor, tasks: Iterable[Task], scale: float
) -> Iterator[tuple[slice, Tensor, Tensor, bool]]:
    acc = accumulator(q.dtype)
    for task in tasks:
        for rows, keys, causal, mask in _calls(task, acc):
            views = (_heads_first(x, acc) for x in (q[rows], k[keys], v[keys]))
            out, lse = _FORWARD(*views, 0.0, causal, attn_mask=mask, scale=scale)
            yield rows, out[0].transpose(0, 1), lse[0], causal or (task.causal and mask is not None)


def part_bwd(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    tasks: Iterable[Task],
    scale: float,
) -> Iterator[tuple[slice, slice, Tensor, Tensor, Tensor]]:
    acc = accumulator(q.dtype)
    for task in tasks:
        for rows, keys, causal, mask in _calls(task, acc):
            views = (_heads_first(x, acc) for x in (dout[rows], q[rows], k[keys], v[keys], out[rows]))
            grads = _BACKWARD(*views, lse[:, rows].unsqueeze(0), 0.0, causal, attn_mask=mask, scale=scale)
            dq, dk, dv = (x[0].transpose(0, 1) for x in grads)
            yield rows, keys, dq, dk, dv


def branch_fwd(
    q: Tensor,
    out: Tensor | None,
    lse: Tensor | None,
    branch_k: list[Tensor],
    branch_v: list[Tensor],
    scale: float,
) -> tuple[Tensor, Tensor]:
    """A branch entry is a part of one key: its lse is its score and its out is its value."""
    acc = accumulator(q.dtype)
    joined = out if out is not None and out.dtype == q.dtype else torch.empty_like(q)
    joint = torch.empty(q.shape[1], q.shape[0], dtype=acc)
    for rows in _row_blocks(q):
        parts = [] if lse is None else [lse[:, rows].T]
        parts += [_row_scores(q[rows], k[rows], scale) for k in branch_k]  # each [rows, H]
        scores = torch.stack(parts)
        joint[:, rows] = torch.logsumexp(scores, dim=0).T
        weights = list(torch.exp(scores - joint[:, rows].T).unsqueeze(-1))
        total = torch.zeros(q[rows].shape, dtype=acc) if out is None else weights.pop(0) * out[rows]
        for weight, v in zip(weights, branch_v, strict=True):
            _by_group(total, v).addcmul_(_by_group(weight, v), v[rows].unsqueeze(2).to(acc))
        joined[rows] = total
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
    """P = exp(s - lse), dv = P dout, ds = scale P (dout.v - D), dq += ds k, dk = ds q; D = rowsum(dout * out).

    dk and dv are summed over the H / G query heads that share an entry.
    """
    acc = accumulator(q.dtype)
    total = dq if dq is not None and dq.dtype == q.dtype else torch.empty_like(q)
    dbranch_k, dbranch_v = ([torch.empty_like(x) for x in branch] for branch in (branch_k, branch_v))
    for rows in _row_blocks(q):
        block_q, block_dout = q[rows].to(acc), dout[rows].to(acc)
        block_dq = torch.zeros_like(block_q) if dq is None else dq[rows].to(acc)
        delta = (block_dout * out[rows]).sum(-1)
        for k, v, dk, dv in zip(branch_k, branch_v, dbranch_k, dbranch_v, strict=True):
            p = torch.exp(_row_scores(block_q, k[rows], scale) - lse[:, rows].T)
            ds = scale * p * (_row_scores(block_dout, v[rows], 1.0) - delta)
            p, ds = p.unsqueeze(-1), ds.unsqueeze(-1)
            _by_group(block_dq, k).addcmul_(_by_group(ds, k), k[rows].unsqueeze(2).to(acc))
            dk[rows] = _by_group(ds * block_q, k).sum(2)
            dv[rows] = _by_group(p * block_dout, v).sum(2)
        total[rows] = block_dq
    return total, dbranch_k, dbranch_v


def _calls(task: Task, dtype: torch.dtype) -> Iterator[_Call]:
    """A task as what aten's kernel can do: no mask, a mask, or causal aligned top-left.

    The part that holds each row's own key comes first.
    """
    q0, q1, k0, k1, causal, left = task
    offset = (k1 - k0) - (q1 - q0)  # row i is aligned with key i + offset
    if left is not None:
        for start in range(0, q1 - q0, _BAND_ROWS):
            end = min(start + _BAND_ROWS, q1 - q0)
            low = max(0, start + offset - left)
            high = min(end + offset, k1 - k0) if causal else k1 - k0
            ahead = torch.arange(low, high) - torch.arange(start, end)[:, None] - offset
            hidden = (ahead < -left) | (ahead > 0) if causal else ahead < -left
            mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf)
            yield slice(q0 + start, q0 + end), slice(k0 + low, k0 + high), False, mask
        return
    if causal:
        yield slice(q0, q1), slice(k0 + offset, k1), True, None
        k1 = k0 + offset
    if k1 > k0:
        yield slice(q0, q1), slice(k0, k1), False, None


def _heads_first(x: Tensor, dtype: torch.dtype) -> Tensor:
    """[T, H, D] as the [1, H, T, D] view that aten wants; it honours strides if the last one is 1."""
    return x.to(dtype).transpose(0, 1).unsqueeze(0)


def _row_blocks(q: Tensor) -> Iterator[slice]:
    return (slice(i, min(i + _BRANCH_ROWS, len(q))) for i in range(0, len(q), _BRANCH_ROWS))


def _by_group(x: Tensor, k: Tensor) -> Tensor:
    """[T, H, ...] as [T, G, H / G, ...], the query heads of one k/v head together; a view."""
    return x.unflatten(1, (k.shape[1], -1))


def _row_scores(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """scale * q[i].k[i] per row and query head. q [T, H, D], k [T, G, D]; [T, H] in the accumulator dtype."""
    acc = accumulator(q.dtype)
    products = _by_group(q, k).to(acc) * k.unsqueeze(2).to(acc)
    return scale * products.sum(-1).flatten(1)
