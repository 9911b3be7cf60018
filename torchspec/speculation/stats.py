"""What speculation did: counts by drafter and by class of request, and where the time went."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from torchspec.records import SpecStats


@dataclass(kw_only=True, slots=True)
class Tally:
    """What speculation did since it was last asked; seconds are wall time, on CPU the thread's own.

    Example: two steps of the suffix drafter with 3 and 1 tokens, of which 2 and 0 were accepted:
        Tally(drafters={"suffix": SpecStats(steps=2, drafted=[2, 1, 1], accepted=[1, 1, 0])}, steps=2, ...)
    """

    drafters: dict[str, SpecStats]
    """By drafter; a draft of both counts for both, each with its own positions."""
    classes: dict[str, SpecStats]
    """By what the request was thought to be when it was drafted for: short, medium, long."""
    steps: int = 0
    host_seconds: float = 0.0
    """In plans and the suffix drafter."""
    model_seconds: float = 0.0
    """In the draft model."""
    plain_seconds: float = 0.0
    """By the cost table: the time of plain steps for as many tokens as came, and as were expected."""
    expected_seconds: float = 0.0
    predicted_seconds: float = 0.0
    """Of the steps with their drafts: by the cost table, and as measured."""
    seconds: float = 0.0
    window_bytes: int = 0
    """Of the suffix drafter's window."""


SpeculationStats = Tally


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
        """A draft's positions from `first` to before `last` are of this kind; `accepted` counts from 0."""
        if last > first:
            self.steps += 1
            self.drafted[first:last] += 1
            self.accepted[first : max(first, min(last, accepted))] += 1

    def stats(self) -> SpecStats:
        return SpecStats(steps=self.steps, drafted=self.drafted.tolist(), accepted=self.accepted.tolist())
