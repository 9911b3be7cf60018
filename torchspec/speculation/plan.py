"""What one verify step will propose: decided before the draft model draws a token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:  # importing the suffix drafter imports numba
    from torchspec.speculation.suffix.drafter import Drafts


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """What will be proposed for `ids`, ordered as they are; B requests.

    `passes` is how many tokens the draft model must propose for the batch; None: it need not run at all.
    """

    ids: list[str]
    passes: int | None
    chains: np.ndarray
    """int [B]: tokens to take from the draft model."""
    drafts: Drafts | None
    """The suffix drafter's, used where `chains` is 0."""
    rest: np.ndarray
    """int [B]: tokens that may follow a chain."""
    floors: np.ndarray
    """float [B]: least path probability of the tokens that follow a chain."""
    used: bool
    """False: no draft is worth its time in this step."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Passes of the draft model, and which requests take its tokens."""

    passes: int
    used: bool
    """Whether drafts are worth their time at all."""
    chains: np.ndarray
    """int [B]: tokens of the draft model."""
    expected: np.ndarray
    """float [B]: expected acceptances."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """What the step that was planned last should cost and bring, in seconds by the cost table."""

    ids: frozenset[str] = frozenset()
    plain: float = 0.0
    """A step without drafts."""
    expected: float = 0.0
    """Plain steps for as many tokens as are expected."""
    predicted: float = 0.0
    """The step with its drafts."""
