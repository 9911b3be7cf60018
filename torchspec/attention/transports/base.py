"""The contract of a transport, and the sizes by which transports are compared."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torchspec.attention.call import AttentionCall


@dataclass(frozen=True)
class Traffic:
    """Sizes of one attention layer under context parallelism.

    Attributes:
        tokens: L, rows of the trunk on all ranks together.
        queries: query rows of one pass on all ranks together: L for training-time test.
        size: C, ranks of the group.
        itemsize: bytes of an element of q, k and v.
        passes: K, attention calls over the same trunk.
        layers: whose gathered trunks are alive at the same time, kept for their backward.
    """

    tokens: int
    queries: int
    size: int
    heads: int
    kv_heads: int
    head_dim: int
    itemsize: int
    passes: int = 1
    layers: int = 1

    @property
    def accumulator(self) -> int:
        """Bytes of an element in which parts are merged and gradients summed."""
        return max(4, self.itemsize)

    @property
    def share(self) -> float:
        """The part of a pack that other ranks own."""
        return (self.size - 1) / self.size

    @property
    def trunk(self) -> int:
        """Elements of the keys and values of the whole pack."""
        return 2 * self.tokens * self.kv_heads * self.head_dim

    @property
    def query_elements(self) -> int:
        """Elements of all ranks' queries."""
        return self.queries * self.heads * self.head_dim


class Transport(ABC):
    """How the keys and values of a pack meet queries on other ranks.

    Attributes:
        name: as in the setting `parallel.attention`.
        stand_in: the transport whose op the dry run calls instead, where this one's op cannot run on the meta
            device; "" where it can.
    """

    name: str
    stand_in: str = ""

    @abstractmethod
    def attend(self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, call: AttentionCall) -> Tensor:
        """Return causal attention out [T, H, D] of this rank's rows. A collective of `call.group`.

        Args:
            q: [T, H, D]; k, v: [T, G, D]; this rank's rows, as `plan.build_plan` says.
            cu_seqlens: int32 [documents + 1] of the whole pack, on the CPU.
        """

    @abstractmethod
    def sent(self, traffic: Traffic) -> float:
        """Return the bytes a rank sends in forward and backward of all passes, for shards of equal length."""

    @abstractmethod
    def running(self, traffic: Traffic) -> dict[str, int]:
        """Return the bytes that each op holds while it runs, besides what it takes and returns, by its name."""

    def gathered(self, traffic: Traffic) -> int:
        """Return the bytes that grow with the whole pack and count against the memory budget."""
        return 0

    def unseen(self, traffic: Traffic) -> int:
        """Return the bytes kept for one layer's backward that `stand_in` does not keep."""
        return 0

    def save_ops(self) -> Sequence[torch._ops.OpOverload]:
        """Return the ops whose outputs selective activation checkpointing should save."""
        return ()
