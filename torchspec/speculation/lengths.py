"""How long responses are expected to be."""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from torchspec.records import Rollout

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
        """Return what is known of a problem's responses; None: nothing."""
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
        """Return mean and 90th percentile of the last responses, for an unknown problem those of all problems."""
        known = self._known(problem_id)[0] or self._known(None)[0]
        if not known:
            return self.default, self.default
        return float(np.mean(known)), float(np.percentile(known, 90))

    def remaining(self, problem_ids: Sequence[str], generated: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return the tokens expected to come for responses of `generated` tokens so far, float64 [B].

        It is the mean over the problem's responses that were longer, or if there is none over all problems'.
        A response longer than any known one is expected to go on for OVERTIME of its length.
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
