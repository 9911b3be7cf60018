"""Ragged proposals of a drafter."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np


@dataclass(frozen=True, slots=True)
class Drafts:
    """Ragged proposals of one step.

    `tokens[starts[i] : starts[i + 1]]` are request i's; `probs` their path probabilities: the estimated
    chance that a token and all before it are accepted.

    Example, two requests, the second without a draft:
        Drafts(tokens=[5, 9], probs=[0.9, 0.7], starts=[0, 2, 2])
    """

    tokens: np.ndarray
    probs: np.ndarray
    starts: np.ndarray

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.starts)

    def lists(self) -> list[list[int]]:
        """Return one list of tokens per request, as engines take them."""
        flat, ends = self.tokens.tolist(), self.starts.tolist()
        return [flat[a:b] for a, b in pairwise(ends)]
