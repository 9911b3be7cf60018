"""Dense oracles for the attention ops: literal masks, plain softmax, any dtype, plain autograd. For tests."""

from __future__ import annotations

import torch
from torch import Tensor


def staircase_mask(cu_seqlens: Tensor, entries: int) -> Tensor:
    """The literal 0/1 mask of one pass of training-time test.

    Columns are the keys of all passes so far, side by side: the first T are the trunk (pass 1), visible
    causally inside a document; each further T are one branch entry, where row i sees only its own column.

    Args:
        cu_seqlens: int32 [documents + 1], from 0 to T.
        entries: number of branch entries (pass d has d - 1).

    Returns:
        bool [T, T * (1 + entries)]; True where the row may look.
    """
    lengths = cu_seqlens.diff()
    document = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    trunk = (document[:, None] == document[None, :]).tril()
    diagonal = torch.eye(len(document), dtype=torch.bool)
    return torch.cat([trunk] + [diagonal] * entries, dim=1)


def masked_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Softmax attention under a dense mask. q [T, H, D], k and v [S, G, D], mask bool [T, S].

    Returns:
        out [T, H, D] and lse [H, T], both in q's dtype.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = scale * torch.einsum("thd,shd->hts", q, k)
    scores = scores.masked_fill(~mask, -torch.inf)
    return torch.einsum("hts,shd->thd", scores.softmax(-1), v), scores.logsumexp(-1)


def branch_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    branch_k: list[Tensor],
    branch_v: list[Tensor],
    cu_seqlens: Tensor,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """What `torchspec.attention.branch_attention` must compute, the slow way."""
    mask = staircase_mask(cu_seqlens, len(branch_k))
    return masked_attention(q, torch.cat([k, *branch_k]), torch.cat([v, *branch_v]), mask, scale)
