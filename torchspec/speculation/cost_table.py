"""The measured time of a verify step by its tokens and requests; seconds everywhere."""

from __future__ import annotations

import dataclasses
import json
from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from torchspec.config.schema import Budget as BudgetConfig
from torchspec.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class CostTable:
    """Measured time of a forward pass over `tokens` tokens of `batch` requests.

    Linear between the points and beyond the largest token count; a batch outside the grid takes its edge.

    Example: 8 ms and 25 us a token at any batch size:
        CostTable(tokens=[0, 4096], batches=[1], seconds=[[0.008, 0.1104]])     # seconds[batch][tokens]
    """

    tokens: list[int]
    batches: list[int]
    seconds: list[list[float]]
    draft: list[list[float]] = dataclasses.field(default_factory=list)
    """By batch: the draft model's pass over what was verified, and what each token it proposes adds; []: free."""

    @classmethod
    def linear(cls, base: float, per_token: float) -> CostTable:
        return cls(tokens=[0, 4096], batches=[1], seconds=[[base, base + 4096 * per_token]])

    def __post_init__(self) -> None:
        increasing = all(
            len(axis) > 0 and all(a < b for a, b in pairwise(axis)) for axis in (self.tokens, self.batches)
        )
        rectangular = [len(row) for row in self.seconds] == [len(self.tokens)] * len(self.batches)
        drafts = not self.draft or [len(row) for row in self.draft] == [2] * len(self.batches)
        if not increasing or not rectangular or len(self.tokens) < 2 or not drafts:
            raise ValueError(
                "a cost table has increasing tokens (2 or more) and batches, a time for each, and two times of the "
                "draft for each batch, or none"
            )

    def __call__(self, tokens: float, batch: float) -> float:
        return self._interpolate(tokens, batch)[0]

    def marginal(self, tokens: float, batch: float) -> float:
        """Seconds that the next token adds; never negative, however noisy the measurement."""
        return max(self._interpolate(tokens, batch)[1], 0.0)

    def drafting(self, tokens: int, batch: float) -> float:
        """Seconds in which the draft model proposes `tokens` tokens for each request."""
        if not self.draft:
            return 0.0
        first, each = (float(np.interp(batch, self.batches, column)) for column in zip(*self.draft))
        return first + tokens * each

    def _interpolate(self, tokens: float, batch: float) -> tuple[float, float]:
        i = min(max(bisect_right(self.tokens, tokens) - 1, 0), len(self.tokens) - 2)
        low, high = self._at(batch, i), self._at(batch, i + 1)
        slope = (high - low) / (self.tokens[i + 1] - self.tokens[i])
        return low + slope * (tokens - self.tokens[i]), slope

    def _at(self, batch: float, column: int) -> float:
        """Ten times a step: plain Python is quicker than numpy here."""
        j = bisect_right(self.batches, batch)
        if j in (0, len(self.batches)):
            return self.seconds[max(j - 1, 0)][column]
        share = (batch - self.batches[j - 1]) / (self.batches[j] - self.batches[j - 1])
        return self.seconds[j - 1][column] * (1 - share) + self.seconds[j][column] * share

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(dataclasses.asdict(self)) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> CostTable:
        """Raises ConfigError if the file is not a cost table."""
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:  # a file of the user's
            raise ConfigError(f"{path}: not a cost table ({error})") from error


def given_costs(budget: BudgetConfig) -> CostTable | None:
    """The table that budget.cost_table names. Raises ConfigError if the file is not one."""
    return CostTable.load(Path(budget.cost_table)) if budget.cost_table else None
