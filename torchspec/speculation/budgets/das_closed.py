"""The closed form of DAS (arXiv 2511.13841, section 4.2.2): the draft tokens that make the makespan shortest."""

from __future__ import annotations

import numpy as np

from torchspec.speculation.budgets.base import BudgetRule, Step


class DasClosed(BudgetRule):
    """Allow what the closed form proposes for each pass; its efficiency follows the acceptance so far."""

    needs_costs = True

    def limits(self, step: Step) -> np.ndarray:
        batch = len(step.remaining)
        if not batch:
            return np.zeros(0, int)
        capacity = self.settings.capacity
        efficiency = np.full(batch, max(self.state.acceptance, 0.01) / capacity)
        per_token = self.state.per_token(batch)
        base = self.state.cost(batch, batch) - per_token * batch
        proposed, rounds = closed_form(
            np.maximum(step.remaining, 1.0), efficiency, np.full(batch, capacity), base, per_token
        )
        return np.rint(proposed / rounds).astype(int)


def closed_form(
    lengths: np.ndarray, efficiency: np.ndarray, capacity: np.ndarray, base: float, per_token: float
) -> tuple[np.ndarray, float]:
    """Draft tokens of each request, and forward passes, that make the makespan shortest (DAS, section 4.2.2).

    With l tokens to come, efficiency a and capacity k, proposing p tokens saves k l (1 - exp(-a p / l)) passes.
    Solving l (1 - k + k exp(-a p / l)) = N gives p = -(l / a) ln(1 - (1 - N / l) / k): the paper's equation 7
    has k (1 - N / l) there, which misses the constraint unless k = 1. N balances base against the tokens'
    cost, net of those that would have been processed anyway; found by bisection above max l (1 - k).

    Returns:
        p, float [B], and N.
    """
    longest = float(lengths.max())
    lowest = float((lengths * (1 - capacity)).max())

    def excess(rounds: float) -> float:
        active = lengths > rounds
        slope = efficiency[active] * (capacity[active] - 1 + rounds / lengths[active])
        return per_token * float((1 / slope - 1).sum()) - base

    low, high = lowest, longest
    if excess(np.nextafter(longest, 0)) >= 0:  # not even the longest request is worth one draft token
        return np.zeros(len(lengths)), longest
    for _ in range(100):
        middle = 0.5 * (low + high)
        if not low < middle < high:
            break
        low, high = (middle, high) if excess(middle) > 0 else (low, middle)
    return closed_budgets(lengths, efficiency, capacity, high), high


def closed_budgets(
    lengths: np.ndarray, efficiency: np.ndarray, capacity: np.ndarray, rounds: float
) -> np.ndarray:
    """Draft tokens [B] with which every request needs `rounds` passes; 0 for those that need no more anyway."""
    left = 1 - (1 - np.minimum(rounds / lengths, 1.0)) / capacity
    return np.where(lengths > rounds, -(lengths / efficiency) * np.log(np.maximum(left, 1e-300)), 0.0)
