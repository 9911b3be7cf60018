"""Dense oracles for the attention ops: literal masks, plain softmax, any dtype, plain autograd. For tests."""

from __future__ import annotations

import torch
from torch import Tensor


def staircase_mask(cu_seqlens: Tensor, entries: int, window: int | None = None) -> Tensor:
    """The literal 0/1 mask of one pass of training-time test.

    Columns are the keys of all passes so far, side by side: the first T are the trunk (pass 1), visible
    causally inside a document; each further T are one branch entry, where row i sees only its own column.

    Args:
        cu_seqlens: int32 [documents + 1], from 0 to T.
        entries: number of branch entries (pass d has d - 1).
        window: row i stands at i + entries, trunk column j at j, its entry p (from 1) at i + p; keys that
            are `window` or more positions back are hidden. None: no window.

    Returns:
        bool [T, T * (1 + entries)]; True where the row may look.
    """
    lengths = cu_seqlens.diff()
    document = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    position = torch.arange(len(document))
    reach = len(document) + entries + 1 if window is None else window
    trunk = (document[:, None] == document[None, :]).tril()
    trunk &= position[:, None] + entries - position[None, :] < reach
    diagonal = torch.eye(len(document), dtype=torch.bool)
    return torch.cat([trunk] + [diagonal & (entries - p < reach) for p in range(1, entries + 1)], dim=1)


def block_mask(cu_seqlens: Tensor, anchors: Tensor, slots: int, window: int | None = None) -> Tensor:
    """The mask of block drafts: slots see the trunk before their anchor, and each other in both directions.

    Args:
        anchors: [A] pack positions.
        slots: W, rows of a block; slot j stands at anchor + j.

    Returns:
        bool [A * W, T + A * W]; columns are the trunk, then all blocks' own keys.
    """
    lengths = cu_seqlens.diff()
    document = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    anchor = anchors.long().repeat_interleave(slots)
    place = anchor + torch.arange(slots).repeat(len(anchors))
    block = torch.arange(len(anchors)).repeat_interleave(slots)
    position = torch.arange(len(document))
    trunk = (document[anchor, None] == document[None, :]) & (position[None, :] < anchor[:, None])
    if window is not None:
        trunk &= place[:, None] - position[None, :] < window
    return torch.cat([trunk, block[:, None] == block[None, :]], dim=1)


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
    window: int | None = None,
) -> tuple[Tensor, Tensor]:
    """What `torchspec.attention.branch_attention` must compute, the slow way."""
    mask = staircase_mask(cu_seqlens, len(branch_k), window)
    return masked_attention(q, torch.cat([k, *branch_k]), torch.cat([v, *branch_v]), mask, scale)
