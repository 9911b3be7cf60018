"""The rule "price": verify the tokens that are expected to save more time than they cost."""

from __future__ import annotations

import numpy as np

from torchspec.speculation.budgets.base import BudgetRule, Step, even_weights


class Price(BudgetRule):
    """Allow tokens whose path probability pays for their verification.

    `focus` 0 prices all requests alike (throughput), 1 only those that will end last (makespan). While requests
    wait for a place, all count alike.
    """

    needs_costs = True

    def weights(self, step: Step) -> np.ndarray:
        focus = 0.0 if step.waiting else self.settings.focus
        even = even_weights(len(step.generated))
        return (1 - focus) * even + focus * criticality(step.remaining)

    def floors(self, weights: np.ndarray) -> np.ndarray:
        return price_floors(self.state.prices(weights), self.state.per_token(len(weights)))


def criticality(remaining: np.ndarray) -> np.ndarray:
    """Each request's chance to end last, as a soft maximum of the tokens left; sums to 1."""
    if not len(remaining):
        return np.zeros(0)
    longest = float(remaining.max())
    weights = np.exp((remaining - longest) / (0.3 * max(longest, 1.0)))
    return weights / weights.sum()


def price_floors(prices: np.ndarray, per_token: float) -> np.ndarray:
    """Least path probability worth verifying: price * p >= per_token * (1 - p).

    `prices` [B] are the seconds that one accepted token of the request saves beyond its own, `per_token` those
    that a verified token costs.
    """
    return per_token / np.maximum(prices + per_token, 1e-300) if per_token > 0 else np.zeros(len(prices))
