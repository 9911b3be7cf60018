"""Classes of response length: which class a running request will most likely end in."""

from __future__ import annotations

import numpy as np

CLASSES = ("short", "medium", "long")
SHORT, MEDIUM, LONG = range(3)


class Survival:
    """P(class | length so far, class at the start), counted over finished requests (DAS, section 4.2.3).

    Only requests that got as far are counted, so a request is upgraded as it outlives the shorter ones.
    """

    BUCKET = 128
    DECAY = 0.999

    def __init__(self, short_below: int, long_from: int) -> None:
        self.bounds = np.array([short_below, long_from])
        self.counts = np.zeros((3, 1, 3))
        """By class at the start, bucket of the length so far, final class."""

    def class_of(self, length: np.ndarray | float) -> np.ndarray:
        """SHORT, MEDIUM or LONG; MEDIUM where the length is nan."""
        length = np.asarray(length, np.float64)
        return np.where(np.isnan(length), MEDIUM, np.searchsorted(self.bounds, length, side="right"))

    def observe(self, expected: float, length: int) -> None:
        buckets = length // self.BUCKET + 1
        missing = buckets - self.counts.shape[1]
        if missing > 0:
            self.counts = np.pad(self.counts, ((0, 0), (0, missing), (0, 0)))
        start = int(self.class_of(expected))
        self.counts[start] *= self.DECAY
        self.counts[start, :buckets, int(self.class_of(length))] += 1.0

    def classes(self, expected: np.ndarray, generated: np.ndarray) -> np.ndarray:
        """The likeliest class of each request, the longer on a tie; never below what its length proves."""
        start = self.class_of(expected)
        bucket = np.minimum(generated // self.BUCKET, self.counts.shape[1] - 1)
        counts = np.where(
            (generated // self.BUCKET < self.counts.shape[1])[:, None], self.counts[start, bucket], 0.0
        )
        likely = LONG - np.argmax(counts[:, ::-1], axis=1)
        likely = np.where(counts.sum(axis=1) > 0, likely, start)
        return np.maximum(likely, self.class_of(generated))
