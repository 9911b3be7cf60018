"""CPU kernels: aten's flash attention, one call per document. fp64, fp32, bf16 and fp16."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def _heads_first(x: Tensor) -> Tensor:
    """[T, H, D] as the [1, H, T, D] view that aten wants; it honours strides if the last one is 1."""
    return x.transpose(0, 1).unsqueeze(0)


def part_fwd(q: Tensor, k: Tensor, v: Tensor, bounds: list[int], scale: float) -> tuple[Tensor, Tensor]:
    out = torch.empty_like(q)
    lse = q.new_empty(q.shape[1], q.shape[0], dtype=torch.promote_types(q.dtype, torch.float32))
    for start, end in pairwise(bounds):
        doc = slice(start, end)
        part, part_lse = _FORWARD(*(_heads_first(x[doc]) for x in (q, k, v)), 0.0, True, scale=scale)
        out[doc] = part[0].transpose(0, 1)
        lse[:, doc] = part_lse[0]
    return out, lse


def part_bwd(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bounds: list[int], scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    for start, end in pairwise(bounds):
        doc = slice(start, end)
        views = (_heads_first(x[doc]) for x in (dout, q, k, v, out))
        parts = _BACKWARD(*views, lse[:, doc].unsqueeze(0), 0.0, True, scale=scale)
        for grad, part in zip(grads, parts, strict=True):
            grad[doc] = part[0].transpose(0, 1)
    return grads
