"""How the trunk's keys and values meet queries on other ranks: which of three transports, by bytes.

ring    K/V ride to the next rank C - 1 times in every pass, in backward with fp32 dK/dV behind them
gather  one all-gather of K/V for all passes, one fp32 reduce-scatter of dK/dV
query_ring   the queries travel and come back as partial results; K/V and dK/dV stay at home
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache

TRANSPORTS = ("ring", "gather", "query_ring")
MEMORY_BUDGET = 4 << 30  # bytes a rank may spend on a gathered trunk and its gradient

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Traffic:
    """Sizes of one attention layer under context parallelism, and what they cost.

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
    def _accumulator(self) -> int:
        return max(4, self.itemsize)

    @property
    def _share(self) -> float:
        return (self.size - 1) / self.size

    @property
    def _trunk(self) -> int:
        """Elements of K and V."""
        return 2 * self.tokens * self.kv_heads * self.head_dim

    def sent(self, transport: str) -> float:
        """Bytes a rank sends in forward and backward of all passes, for shards of equal length."""
        if transport == "gather":
            return self._share * self._trunk * (self.itemsize + self._accumulator)
        if transport == "ring":
            return self.passes * self._share * self._trunk * (2 * self.itemsize + self._accumulator)
        row = self.head_dim * (3 * self.itemsize + 2 * self._accumulator) + 2 * self._accumulator
        return self.passes * self._share * self.queries * self.heads * row

    @property
    def gathered(self) -> int:
        """Bytes of the gathered trunks, and of the gradient of one."""
        return self._trunk * (self.layers * self.itemsize + self._accumulator)


@cache
def choose_transport(traffic: Traffic, transport: str = "auto", memory_budget: int = MEMORY_BUDGET) -> str:
    """The transport to use; logged once per combination.

    auto: query_ring where it sends least (few queries on a long trunk), else gather where the gathered trunk
    fits the budget, else ring.

    Raises:
        ValueError: unknown transport, or a count below 1.
    """
    if transport not in ("auto", *TRANSPORTS):
        raise ValueError(f"transport is {transport!r}; it must be one of auto, {', '.join(TRANSPORTS)}")
    for name in ("size", "passes", "layers"):
        if getattr(traffic, name) < 1:
            raise ValueError(f"{name} is {getattr(traffic, name)}; it must be at least 1")
    if transport != "auto":
        return transport
    fits = traffic.gathered <= memory_budget
    others = traffic.sent("gather" if fits else "ring")
    chosen = "query_ring" if traffic.sent("query_ring") < others else "gather" if fits else "ring"
    _log.info(
        "attention transport %s: MB sent per rank: ring %.1f, gather %.1f, query_ring %.1f; a gathered trunk "
        "takes %.1f MB of a budget of %.1f (%s)",
        chosen,
        *(traffic.sent(name) / 1e6 for name in TRANSPORTS),
        traffic.gathered / 1e6,
        memory_budget / 1e6,
        traffic,
    )
    return chosen
