"""CUDA kernels, bf16 and fp16: flash-attn 2.8's varlen functions, or those that ship with torch; branches in
Triton.

The flash functions are private to their libraries, which is the only way to hand a flash backward the joint
out and lse. flash-attn's are called by keyword: their argument order has changed between releases.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from torchspec.attention.kernels.triton import branch_bwd, branch_fwd
from torchspec.attention.plan import Range, Task

__all__ = ["branch_bwd", "branch_fwd", "part_bwd", "part_fwd"]


@dataclass(frozen=True)
class _Call:
    """Tasks of one varlen call: the same mask, each row and each key at most once."""

    rows: slice | Tensor
    keys: slice | Tensor
    cu_q: Tensor
    cu_k: Tensor
    longest_q: int
    longest_k: int
    causal: bool
    left: int

    @property
    def window(self) -> tuple[int, int]:
        return self.left, 0 if self.causal else -1


@cache
def _flash_attn() -> Any:
    """flash-attn's interface module, or None where the package is not installed."""
    try:
        from flash_attn import flash_attn_interface  # pyrefly: ignore[missing-import]
    except ModuleNotFoundError:
        return None
    return flash_attn_interface


def part_fwd(
    q: Tensor, k: Tensor, v: Tensor, tasks: Iterable[Task], scale: float
) -> Iterator[tuple[slice | Tensor, Tensor, Tensor, bool]]:
    _check_dtype(q)
    for call in _calls(tuple(tasks), q.device):
        out, lse = _forward(q[call.rows], k[call.keys], v[call.keys], call, scale)
        # Flash-attn 2 reports a row without any key as +inf, the opposite of its weight in a merge.
        yield call.rows, out, lse.masked_fill(lse == torch.inf, -torch.inf), call.causal


def part_bwd(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    tasks: Iterable[Task],
    scale: float,
) -> Iterator[tuple[slice | Tensor, slice | Tensor, Tensor, Tensor, Tensor]]:
    _check_dtype(q)
    for call in _calls(tuple(tasks), q.device):
        rows, keys = call.rows, call.keys
        inputs = dout[rows], q[rows], k[keys], v[keys], out[rows], lse[:, rows].contiguous()
        yield rows, keys, *_backward(*inputs, call, scale)


def _forward(q: Tensor, k: Tensor, v: Tensor, call: _Call, scale: float) -> tuple[Tensor, Tensor]:
    if flash := _flash_attn():
        out, lse, _, _ = flash._flash_attn_varlen_forward(
            q=q,
            k=k,
            v=v,
            cu_seqlens_q=call.cu_q,
            cu_seqlens_k=call.cu_k,
            max_seqlen_q=call.longest_q,
            max_seqlen_k=call.longest_k,
            dropout_p=0.0,
            softmax_scale=scale,
            causal=call.causal,
            window_size_left=call.window[0],
            window_size_right=call.window[1],
        )
        return out, lse
    from torch.nn.attention import varlen  # noqa: F401  registers the ops

    out, lse, _ = torch.ops.torch_attn._varlen_attn(
        q,
        k,
        v,
        call.cu_q,
        call.cu_k,
        call.longest_q,
        call.longest_k,
        is_causal=call.causal,
        scale=scale,
        window_size=call.window,
        enable_gqa=True,
    )
    return out, lse


def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: _Call, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    if flash := _flash_attn():
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        flash._flash_attn_varlen_backward(
            dout=dout,
            q=q,
            k=k,
            v=v,
            out=out,
            softmax_lse=lse,
            dq=dq,
            dk=dk,
            dv=dv,
            cu_seqlens_q=call.cu_q,
            cu_seqlens_k=call.cu_k,
            max_seqlen_q=call.longest_q,
            max_seqlen_k=call.longest_k,
            dropout_p=0.0,
            softmax_scale=scale,
            causal=call.causal,
            window_size_left=call.window[0],
            window_size_right=call.window[1],
            softcap=0.0,
            alibi_slopes=None,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        return dq, dk, dv
    from torch.nn.attention import varlen  # noqa: F401  registers the ops

    no_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device)
    return torch.ops.torch_attn._varlen_attn_backward(
        dout,
        q,
        k,
        v,
        out,
        lse,
        call.cu_q,
        call.cu_k,
        call.longest_q,
        call.longest_k,
        is_causal=call.causal,
        rng_state=no_dropout,
        scale=scale,
        window_size=call.window,
    )


def _check_dtype(q: Tensor) -> None:
    if q.dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"q is {q.dtype}; CUDA attention kernels take bfloat16 or float16 (model.dtype)")


@lru_cache(maxsize=512)
def _calls(tasks: tuple[Task, ...], device: torch.device) -> tuple[_Call, ...]:
    """Tasks grouped into as few varlen calls as their masks and overlaps allow; causal ones first."""
    groups: list[tuple[tuple[bool, int | None], list[Task]]] = []
    for task in sorted(tasks, key=lambda t: (not t.causal, t.q0, t.k0)):
        mask = task.causal, task.left
        for other, group in groups:
            if other == mask and task.q0 >= group[-1].q1 and task.k0 >= group[-1].k1:
                group.append(task)
                break
        else:
            groups.append((mask, [task]))
    return tuple(_call(group, device) for _, group in groups)


def _call(group: list[Task], device: torch.device) -> _Call:
    rows, keys = [(t.q0, t.q1) for t in group], [(t.k0, t.k1) for t in group]
    left = group[0].left
    return _Call(
        rows=_select(rows, device),
        keys=_select(keys, device),
        cu_q=_ends(rows, device),
        cu_k=_ends(keys, device),
        longest_q=max(b - a for a, b in rows),
        longest_k=max(b - a for a, b in keys),
        causal=group[0].causal,
        left=-1 if left is None else left,
    )


def _select(ranges: Sequence[Range], device: torch.device) -> slice | Tensor:
    """The ranges as one slice if they are contiguous (no copy), else as an index."""
    if all(a[1] == b[0] for a, b in pairwise(ranges)):
        return slice(ranges[0][0], ranges[-1][1])
    return torch.cat([torch.arange(a, b) for a, b in ranges]).to(device, non_blocking=True)


def _ends(ranges: Sequence[Range], device: torch.device) -> Tensor:
    lengths = torch.tensor([0, *(b - a for a, b in ranges)])
    return lengths.cumsum(0).to(torch.int32).to(device, non_blocking=True)
