"""Transport gather: every rank gathers the whole trunk once; the least traffic for many queries."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchspec.attention.call import AttentionCall
from torchspec.attention.transports.base import Traffic, Transport
from torchspec.attention.trunk import trunk_attention, trunk_gather


class Gather(Transport):
    """One all-gather of keys and values for all passes, one reduce-scatter of their gradients."""

    name = "gather"

    def attend(self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, call: AttentionCall) -> Tensor:
        trunk = trunk_gather(k, v, cu_seqlens, group=call.group)
        return trunk_attention(q, trunk, [], [], cu_seqlens, call)[0]

    def sent(self, traffic: Traffic) -> float:
        return traffic.share * traffic.trunk * (traffic.itemsize + traffic.accumulator)

    def running(self, traffic: Traffic) -> dict[str, int]:
        pair = traffic.trunk // traffic.size
        elements = (1 + traffic.size) * pair  # shards by rank, beside the pack's rows in order
        name = "torchspec::trunk_gather"
        return {name: elements * traffic.itemsize, f"{name}_backward": elements * traffic.accumulator}

    def gathered(self, traffic: Traffic) -> int:
        """Return the bytes of the gathered trunks of all layers, and of the gradient of one."""
        return traffic.trunk * (traffic.layers * traffic.itemsize + traffic.accumulator)

    def save_ops(self) -> Sequence[torch._ops.OpOverload]:
        return torch.ops.torchspec.trunk_gather.default, torch.ops.torchspec.trunk_attention.default
