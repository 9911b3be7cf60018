"""Attention of packed documents: exact, packed causal, with row-local branches, over one rank or many."""

from torchspec.attention.context import Context, context_attention, layer_attention, save_ops
from torchspec.attention.halo import local_plan, with_halo
from torchspec.attention.ops import branch_attention, packed_attention
from torchspec.attention.plan import Plan, build_plan
from torchspec.attention.transports.choose import Traffic, choose_transport
from torchspec.attention.transports.gather import Trunk, trunk_attention, trunk_gather
from torchspec.attention.transports.query_ring import branch_attention_query_ring
from torchspec.attention.transports.ring import branch_ring_attention

__all__ = [
    "Context",
    "Plan",
    "Traffic",
    "Trunk",
    "branch_attention",
    "branch_attention_query_ring",
    "branch_ring_attention",
    "build_plan",
    "choose_transport",
    "context_attention",
    "layer_attention",
    "local_plan",
    "packed_attention",
    "save_ops",
    "trunk_attention",
    "trunk_gather",
    "with_halo",
]
