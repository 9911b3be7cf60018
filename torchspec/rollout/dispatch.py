"""Which engine answers which requests: the longest first, to the engine with the least to do."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from torchspec.rollout.engine import Request
from torchspec.speculation.lengths import LengthStats


@dataclass(frozen=True, slots=True)
class Share:
    """`samples` of the responses to requests[request], for one engine."""

    request: int
    samples: int


def dispatch(
    requests: Sequence[Request], engines: int, stats: LengthStats, tail_weight: float = 1.0
) -> list[list[Share]]:
    """Spread requests over engines so that they finish together: the longest first, to the least loaded.

    A request weighs the expected tokens of its samples, plus `tail_weight` times what its 90th percentile has
    over its mean. Samples stay together, because they share a prompt and draft from each other. Only requests whose
    90th percentile is in the top decile are split over the engines: they would keep one engine busy.

    Returns:
        One list of shares per engine, in the order of `requests`.
    """
    expected = [stats.expected(r.problem_id) for r in requests]
    tails = [p90 for _, p90 in expected]
    cut = float(np.percentile(tails, 90)) if tails else 0.0
    units: list[tuple[float, int, int]] = []
    for i, (request, (mean, p90)) in enumerate(zip(requests, expected)):
        split = engines > 1 and p90 >= cut and p90 > min(tails)
        samples = 1 if split else request.samples
        weight = samples * (mean + tail_weight * (p90 - mean) / request.samples)
        units += [(weight, i, samples)] * (request.samples // samples)
    loads = [(0.0, engine) for engine in range(engines)]
    taken = [Counter[int]() for _ in range(engines)]
    for weight, i, samples in sorted(units, key=lambda unit: (-unit[0], unit[1])):
        load, engine = heapq.heappop(loads)
        taken[engine][i] += samples
        heapq.heappush(loads, (load + weight, engine))
    return [[Share(i, count) for i, count in sorted(shares.items())] for shares in taken]
