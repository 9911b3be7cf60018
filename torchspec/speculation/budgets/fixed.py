"""Rules that look at nothing: no drafts, a fixed number of tokens, all tokens."""

from __future__ import annotations

import numpy as np

from torchspec.speculation.budgets.base import BudgetRule, Step


class Off(BudgetRule):
    """Allow no draft."""

    drafts = False

    def limits(self, step: Step) -> np.ndarray:
        return np.zeros(len(step.generated), int)


class Fixed(BudgetRule):
    """Allow `fixed_tokens` for every request."""

    def limits(self, step: Step) -> np.ndarray:
        return np.full(len(step.generated), self.settings.fixed_tokens)


class Unlimited(BudgetRule):
    """Allow all that the drafter has."""
