"""Attention of packed documents: exact, packed causal, with row-local branches."""

from torchspec.attention.ops import branch_attention, packed_attention, save_ops

__all__ = ["branch_attention", "packed_attention", "save_ops"]
