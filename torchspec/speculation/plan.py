"""What one verify step will propose: decided before the draft model draws a token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:  # importing the suffix drafter imports numba
    from torchspec.speculation.suffix.drafter import Drafts


@dataclass(frozen=True, slots=True)
class Plan:
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
    """int [B]: tokens that may follow a chain; `floors` float [B]: their least path probability."""
    floors: np.ndarray
    used: bool
    """False: nothing is worth its time in this step."""
