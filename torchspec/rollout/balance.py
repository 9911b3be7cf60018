"""Which engine answers which requests, and how long responses are expected to be."""

from __future__ import annotations

import bisect
import heapq
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from torchspec.records import Rollout
from torchspec.rollout.engine import Request

KEPT = 64
"""Last lengths remembered for each problem, and 16 times as many over all."""
OVERTIME = 0.15
"""A response that is longer than all known ones is expected to go on for this share of its length."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lengths:
    """Responses to one problem, in tokens. `mean` is over all `count`; the rest over the last KEPT."""

    count: int
    mean: float
    p50: float
    p90: float
    truncated: float
    """Share cut by max_new_tokens or the context, over all `count`."""
    last: list[int]


class LengthStats:
    """Lengths of finished responses by problem; belongs to a run's checkpoint.

    Args:
        default: expected length while nothing has finished.
    """

    def __init__(self, default: float) -> None:
        self.default = default
        self._last: dict[str, deque[int]] = {}
        self._totals: dict[str, list[int]] = {}
        """Problem -> responses, their tokens, how many were truncated."""
        self._pool: deque[int] = deque(maxlen=16 * KEPT)
        self._sorted: dict[str | None, tuple[list[int], list[int]]] = {}
        """Sorted lengths of a problem, or of the pool under None, and the sum of each and all longer ones."""

    def observe(self, rollouts: Iterable[Rollout]) -> None:
        for rollout in sorted(rollouts, key=lambda r: (r.problem_id, r.sample)):
            totals = self._totals.setdefault(rollout.problem_id, [0, 0, 0])
            totals[0] += 1
            totals[1] += len(rollout.tokens)
            totals[2] += rollout.finish == "length"
            self._last.setdefault(rollout.problem_id, deque(maxlen=KEPT)).append(len(rollout.tokens))
            self._pool.append(len(rollout.tokens))
        self._sorted.clear()

    def of(self, problem_id: str) -> Lengths | None:
        """What is known of a problem's responses; None: nothing."""
        if problem_id not in self._last:
            return None
        count, tokens, truncated = self._totals[problem_id]
        last = self._last[problem_id]
        p50, p90 = np.percentile(last, [50, 90])
        return Lengths(
            count=count,
            mean=tokens / count,
            p50=float(p50),
            p90=float(p90),
            truncated=truncated / count,
            last=list(last),
        )

    def expected(self, problem_id: str) -> tuple[float, float]:
        """Mean and 90th percentile of the last responses; an unknown problem takes those of all problems."""
        known = self._known(problem_id)[0] or self._known(None)[0]
        if not known:
            return self.default, self.default
        return float(np.mean(known)), float(np.percentile(known, 90))

    def remaining(self, problem_ids: Sequence[str], generated: Sequence[int] | np.ndarray) -> np.ndarray:
        """Tokens expected to come for responses of `generated` tokens so far; float64 [B].

        The mean over the problem's responses that were longer; if there is none, over all problems'; a
        response longer than any known one is taken to go on for OVERTIME of its length.
        """
        lengths = np.asarray(generated).tolist()
        return np.array([self._remaining(p, n) for p, n in zip(problem_ids, lengths)], np.float64)

    def _remaining(self, problem_id: str, generated: int) -> float:
        for known, sums in (self._known(problem_id), self._known(None)):
            first = bisect.bisect_right(known, generated)
            if first < len(known):
                return sums[first] / (len(known) - first) - generated
        return max(self.default - generated if not self._pool else 0.0, OVERTIME * generated, 1.0)

    def _known(self, problem_id: str | None) -> tuple[list[int], list[int]]:
        if problem_id not in self._sorted:
            known = sorted(self._pool if problem_id is None else self._last.get(problem_id, ()))
            self._sorted[problem_id] = known, list(accumulate(reversed(known)))[::-1]
        return self._sorted[problem_id]

    def state_dict(self) -> dict[str, Any]:
        return {
            "last": {p: list(last) for p, last in self._last.items()},
            "totals": {p: list(totals) for p, totals in self._totals.items()},
            "pool": list(self._pool),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._last = {p: deque(last, maxlen=KEPT) for p, last in state["last"].items()}
        self._totals = {p: list(totals) for p, totals in state["totals"].items()}
        self._pool = deque(state["pool"], maxlen=16 * KEPT)
        self._sorted.clear()


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
    over its mean. Samples stay together, because they share a prompt and draft from each other, unless the
    request's 90th percentile is in the top decile: those would keep one engine busy, and are dealt out.

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
