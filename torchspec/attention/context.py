"""Attention of packs that are spread over context-parallel ranks: the transports behind one door.

Every rank holds its rows of the pack as `plan.build_plan` says, and calls the same ops in the same order,
also where it has no rows. `group` is a process group's name (`mesh.get_group("cp").group_name`), "" for none.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torchspec.attention.ops import packed_attention
from torchspec.attention.transports.gather import trunk_attention, trunk_gather
from torchspec.attention.transports.query_ring import branch_attention_query_ring
from torchspec.attention.transports.ring import branch_ring_attention

__all__ = [
    "Context",
    "branch_attention_query_ring",
    "branch_ring_attention",
    "context_attention",
    "layer_attention",
    "save_ops",
    "trunk_attention",
    "trunk_gather",
]


class Context(NamedTuple):
    """Of which pack a rank's rows are, and how they meet the others: what a layer's attention must know.

    `cu_seqlens` is int32 [documents + 1] of the whole pack, on the CPU; `transport` as in
    `context_attention`.
    """

    cu_seqlens: Tensor
    group: str
    transport: str


def layer_attention(q: Tensor, k: Tensor, v: Tensor, context: Context, scale: float | None = None) -> Tensor:
    """Causal attention of one layer of a language model; q [T, H, D], k and v [T, G, D] -> [T, H, D]."""
    if not context.group:
        return packed_attention(q, k, v, context.cu_seqlens, scale)
    return context_attention(
        q, k, v, context.cu_seqlens, group=context.group, transport=context.transport, scale=scale
    )


def context_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    *,
    group: str,
    transport: str,
    layout: str = "doc_zigzag",
    window: int | None = None,
    tokens: int | None = None,
    scale: float | None = None,
) -> Tensor:
    """`packed_attention` of a pack spread over `group`: what a language model's layer calls.

    Args:
        transport: "ring", "gather" or "query_ring"; `transport.choose_transport` decides "auto".
    """
    if transport != "gather":
        op = {"ring": branch_ring_attention, "query_ring": branch_attention_query_ring}.get(transport)
        if op is None:
            raise ValueError(f"transport is {transport!r}; it must be ring, gather or query_ring")
        return op(q, k, v, [], [], cu_seqlens, group=group, layout=layout, window=window, scale=scale)[0]
    trunk = trunk_gather(k, v, cu_seqlens, group=group, layout=layout, tokens=tokens)
    return trunk_attention(
        q, trunk, [], [], cu_seqlens, group=group, layout=layout, window=window, scale=scale
    )[0]


def save_ops() -> list[torch._ops.OpOverload]:
    """Ops whose outputs selective activation checkpointing should save rather than recompute."""
    ops = torch.ops.torchspec
    return [
        ops.branch_attention.default,
        ops.branch_ring_attention.default,
        ops.trunk_gather.default,
        ops.trunk_attention.default,
        ops.branch_attention_query_ring.default,
    ]
