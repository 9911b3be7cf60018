"""CUDA kernels, bf16 and fp16: flash-attn 2.8's varlen functions, or those that ship with torch.

Both are private functions of their libraries, which is the only way to hand a flash backward the joint
out and lse. flash-attn's are called by keyword: their argument order has changed between releases.
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor


@cache
def _flash_attn() -> Any:
    """flash-attn's interface module, or None where the package is not installed."""
    try:
        from flash_attn import flash_attn_interface  # pyrefly: ignore[missing-import]
    except ModuleNotFoundError:
        return None
    return flash_attn_interface


def _varlen(q: Tensor, bounds: list[int]) -> tuple[Tensor, int]:
    """The documents as the kernels want them: int32 offsets on the device, and the longest length."""
    if q.dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"q is {q.dtype}; CUDA attention kernels take bfloat16 or float16 (model.dtype)")
    cu = torch.tensor(bounds, dtype=torch.int32).to(q.device, non_blocking=True)
    return cu, max(end - start for start, end in pairwise(bounds))


def part_fwd(q: Tensor, k: Tensor, v: Tensor, bounds: list[int], scale: float) -> tuple[Tensor, Tensor]:
    cu, longest = _varlen(q, bounds)
    if flash := _flash_attn():
        out, lse, _, _ = flash._flash_attn_varlen_forward(
            q=q,
            k=k,
            v=v,
            cu_seqlens_q=cu,
            cu_seqlens_k=cu,
            max_seqlen_q=longest,
            max_seqlen_k=longest,
            dropout_p=0.0,
            softmax_scale=scale,
            causal=True,
        )
    else:
        from torch.nn.attention import varlen  # noqa: F401  registers the ops

        out, lse, _ = torch.ops.torch_attn._varlen_attn(
            q, k, v, cu, cu, longest, longest, is_causal=True, scale=scale, enable_gqa=True
        )
    # Flash-attn 2 reports a row without any key as +inf, the opposite of its weight in a merge.
    return out, lse.masked_fill(lse == torch.inf, -torch.inf)


def part_bwd(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bounds: list[int], scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    cu, longest = _varlen(q, bounds)
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
            cu_seqlens_q=cu,
            cu_seqlens_k=cu,
            max_seqlen_q=longest,
            max_seqlen_k=longest,
            dropout_p=0.0,
            softmax_scale=scale,
            causal=True,
            window_size_left=-1,
            window_size_right=-1,
            softcap=0.0,
            alibi_slopes=None,
            deterministic=False,
        )
        return dq, dk, dv
    from torch.nn.attention import varlen  # noqa: F401  registers the ops

    no_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device)
    return torch.ops.torch_attn._varlen_attn_backward(
        dout, q, k, v, out, lse, cu, cu, longest, longest, is_causal=True, rng_state=no_dropout, scale=scale
    )
