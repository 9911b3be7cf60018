"""Which transport to use: the one that sends least among those whose memory fits."""

from __future__ import annotations

import logging
from functools import cache

from torchspec.attention.transports.base import Traffic
from torchspec.attention.transports.registry import TRANSPORTS

MEMORY_BUDGET = 4 << 30  # bytes a rank may spend on a gathered trunk and its gradient

_log = logging.getLogger(__name__)


@cache
def choose_transport(traffic: Traffic, transport: str = "auto", memory_budget: int = MEMORY_BUDGET) -> str:
    """Return the name of the transport to use. The choice is logged once per combination.

    auto: the transport that sends the fewest bytes, among those that gather at most `memory_budget` bytes.

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
    fitting = [t for t in TRANSPORTS.values() if t.gathered(traffic) <= memory_budget]
    chosen = min(fitting, key=lambda t: t.sent(traffic))
    costs = ", ".join(
        f"{t.name} {t.sent(traffic) / 1e6:.1f} ({t.gathered(traffic) / 1e6:.1f})" for t in TRANSPORTS.values()
    )
    _log.info(
        "attention transport %s: MB sent per rank (MB gathered, of a budget of %.1f): %s (%s)",
        chosen.name,
        memory_budget / 1e6,
        costs,
        traffic,
    )
    return chosen.name
