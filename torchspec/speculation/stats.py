"""What speculation did: counts by drafter and by class of request, and where the time went."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from torchspec.records import SpecStats
from torchspec.speculation.budgets.survival import CLASSES


@dataclass(kw_only=True, slots=True)
class SpeculationStats:
    """What speculation did since the last `drain_stats`; seconds are wall time, on CPU the thread's own.

    Example: two steps of the suffix drafter with 3 and 1 tokens, of which 2 and 0 were accepted:
        SpeculationStats(drafters={"suffix": SpecStats(steps=2, drafted=[2, 1, 1], accepted=[1, 1, 0])}, steps=2, ...)
    """

    drafters: dict[str, SpecStats]
    """By drafter; a draft of both counts for both, each with its own positions."""
    classes: dict[str, SpecStats]
    """By what the request was thought to be when it was drafted for: short, medium, long."""
    window_bytes: int = 0
    """Memory of the suffix drafter's history."""
    steps: int = 0
    host_seconds: float = 0.0
    """In plans and the suffix drafter."""
    model_seconds: float = 0.0
    """In the draft model."""
    plain_seconds: float = 0.0
    """By the cost table: the time of plain steps for as many tokens as came."""
    expected_seconds: float = 0.0
    """The same for as many tokens as were expected."""
    predicted_seconds: float = 0.0
    """Of the steps with their drafts, by the cost table."""
    seconds: float = 0.0
    """Of the steps with their drafts, as measured."""


@dataclass(slots=True)
class Counts:
    """SpecStats as arrays."""

    length: int
    steps: int = 0
    drafted: np.ndarray = field(init=False)
    accepted: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.drafted, self.accepted = np.zeros((2, self.length), np.int64)

    def add(self, first: int, last: int, accepted: int) -> None:
        """Count a draft whose positions from `first` to before `last` are of this kind.

        `accepted` is how many tokens of the whole draft were accepted.
        """
        if last > first:
            self.steps += 1
            self.drafted[first:last] += 1
            self.accepted[first : max(first, min(last, accepted))] += 1

    def stats(self) -> SpecStats:
        return SpecStats(steps=self.steps, drafted=self.drafted.tolist(), accepted=self.accepted.tolist())


class StatsRecorder:
    """Counts by drafter and by class; `drain` hands them over and begins again.

    Args:
        drafters: longest draft of each drafter, in tokens.
        longest: longest draft of a request.
    """

    def __init__(self, drafters: dict[str, int], longest: int) -> None:
        self._drafters, self._longest = drafters, longest
        self._begin()

    def _begin(self) -> None:
        self.by_drafter = {name: Counts(length) for name, length in self._drafters.items()}
        self.by_class = [Counts(self._longest) for _ in CLASSES]
        self.total = SpeculationStats(drafters={}, classes={})

    def drain(self, window_bytes: int) -> SpeculationStats:
        stats = self.total
        stats.drafters = {name: counts.stats() for name, counts in self.by_drafter.items()}
        stats.classes = {name: counts.stats() for name, counts in zip(CLASSES, self.by_class)}
        stats.window_bytes = window_bytes
        self._begin()
        return stats
