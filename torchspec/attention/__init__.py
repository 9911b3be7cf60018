"""Attention of packed documents: exact, packed causal, with row-local branches, over one rank or many."""

from torchspec.attention.call import AttentionCall
from torchspec.attention.context import Context, context_attention, layer_attention, save_ops
from torchspec.attention.halo import local_plan, with_halo
from torchspec.attention.ops import branch_attention, packed_attention
from torchspec.attention.plan import Plan, build_plan
from torchspec.attention.transports.base import Traffic, Transport
from torchspec.attention.transports.choose import choose_transport
from torchspec.attention.transports.registry import get_transport, register_transport
from torchspec.attention.trunk import Trunk, trunk_attention, trunk_gather

__all__ = [
    "AttentionCall",
    "Context",
    "Plan",
    "Traffic",
    "Transport",
    "Trunk",
    "branch_attention",
    "build_plan",
    "choose_transport",
    "context_attention",
    "get_transport",
    "layer_attention",
    "local_plan",
    "packed_attention",
    "register_transport",
    "save_ops",
    "trunk_attention",
    "trunk_gather",
    "with_halo",
]
