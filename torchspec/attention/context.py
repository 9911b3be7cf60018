"""The attention of a language model's layer, on packs that may be spread over context-parallel ranks.

Every rank holds its rows of the pack as `plan.build_plan` says, and calls the same ops in the same order, also
where it has no rows. A group is named by `mesh.get_group("cp").group_name`, or "" for none.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torchspec.attention.call import AttentionCall
from torchspec.attention.ops import packed_attention
from torchspec.attention.transports.registry import TRANSPORTS, get_transport


class Context(NamedTuple):
    """What a layer's attention must know about the pack.

    Attributes:
        cu_seqlens: int32 [documents + 1] of the whole pack, on the CPU.
        group: of the ranks that share the pack; "" for none.
        transport: a name in the registry; of no meaning without a group.
    """

    cu_seqlens: Tensor
    group: str
    transport: str


def layer_attention(q: Tensor, k: Tensor, v: Tensor, context: Context, scale: float | None = None) -> Tensor:
    """Return the causal attention of one layer of a language model.

    Args:
        q: [T, H, D], this rank's rows; k, v: [T, G, D].

    Returns:
        [T, H, D].
    """
    if not context.group:
        return packed_attention(q, k, v, context.cu_seqlens, scale)
    call = AttentionCall(context.group, scale=scale)
    return context_attention(q, k, v, context.cu_seqlens, call, context.transport)


def context_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, call: AttentionCall, transport: str
) -> Tensor:
    """Return `packed_attention` of a pack that is spread over `call.group`.

    Args:
        transport: a name in the registry; `choose_transport` decides "auto".

    Raises:
        ValueError: before any message is sent, what does not fit together.
    """
    return get_transport(transport).attend(q, k, v, cu_seqlens, call)


def save_ops() -> list[torch._ops.OpOverload]:
    """Return the ops whose outputs selective activation checkpointing should save rather than recompute."""
    brought = [op for transport in TRANSPORTS.values() for op in transport.save_ops()]
    return [torch.ops.torchspec.branch_attention.default, *brought]
