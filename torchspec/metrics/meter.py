"""Collects a step's numbers and reduces them over ranks.

Names are `group/what`: policy, draft, rollout, reward, eval, perf, speculation. A mean over tokens or responses
is one sum divided by one count, after both were added over ranks; nothing is averaged twice.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch import Tensor

from torchspec.distributed.mesh import Mesh

Number = float | Tensor


class Meter:
    """Collects one step's numbers on every rank and reduces them in one call.

    A rank may leave names out: stages of a pipeline know different things. Tensors are only looked at in
    `reduce`, so recording never waits for a GPU.

    Example: two ranks record `mean("reward/mean", 3.0, 4)` and `mean("reward/mean", 1.0, 4)`:
        meter.reduce(mesh)["reward/mean"] == 0.5
    """

    def __init__(self) -> None:
        self._means: dict[str, list[tuple[Number, Number]]] = defaultdict(list)
        self._totals: dict[str, list[Number]] = defaultdict(list)
        self._maxima: dict[str, list[Number]] = defaultdict(list)

    def mean(self, name: str, total: Number, count: Number) -> None:
        """Add to a mean's numerator and denominator; a mean of nothing is reported as 0."""
        self._means[name].append((total, count))

    def total(self, name: str, value: Number) -> None:
        """Add to a sum over ranks."""
        self._totals[name].append(value)

    def maximum(self, name: str, value: Number) -> None:
        """Raise a maximum over ranks."""
        self._maxima[name].append(value)

    @contextmanager
    def phase(self, name: str) -> Generator[None]:
        """Time a phase in seconds; the slowest rank's time counts, because the others wait for it."""
        started = time.perf_counter()
        yield
        self.maximum(f"perf/{name}_s", time.perf_counter() - started)

    def reduce(self, mesh: Mesh) -> dict[str, float]:
        """Return every metric by name, equal on all ranks. Collective."""
        means, totals, maxima = (mesh.union(kind) for kind in (self._means, self._totals, self._maxima))
        sums = [_column_sums(self._means.get(name, [(0.0, 0.0)])) for name in means]
        sums += [[sum(map(float, self._totals.get(name, [0.0]))), 1.0] for name in totals]
        tops = [max(map(float, self._maxima.get(name, [float("-inf")]))) for name in maxima]
        summed = mesh.sum_over_world(torch.tensor(sums, dtype=torch.float64).reshape(-1, 2)).tolist()
        values = dict(zip(maxima, mesh.max_over_world(torch.tensor(tops, dtype=torch.float64)).tolist()))
        for name, (total, count) in zip(means, summed):
            values[name] = total / count if count else 0.0
        for name, (total, _) in zip(totals, summed[len(means) :]):
            values[name] = total
        return values


def _column_sums(pairs: list[tuple[Number, Number]]) -> list[float]:
    return [sum(map(float, column)) for column in zip(*pairs)]
