"""The contract of a budget rule: how many draft tokens each request may propose in a step.

Lengths are in tokens, times in seconds; B requests are running. The rules and their formulas: docs/speculation.md.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from torchspec.config.schema import Budget as BudgetConfig
from torchspec.speculation.budgets.survival import Survival
from torchspec.speculation.cost_table import CostTable


@dataclass(kw_only=True, slots=True)
class Step:
    """The running requests before a verify step."""

    generated: np.ndarray
    """int [B]: tokens so far."""
    room: np.ndarray
    """int [B]: tokens that may still come, by max_new_tokens and by the model's length."""
    remaining: np.ndarray
    """float [B]: tokens predicted to come (balance.LengthStats.remaining)."""
    expected: np.ndarray
    """float [B]: the problem's median length when the request began; nan: its problem is unknown."""
    waiting: int = 0
    """Requests that will take the places of those that end."""


@dataclass(kw_only=True, slots=True)
class Allowance:
    """What requests may propose: tokens up to limits[i] whose path probability is at least floors[i].

    `weights` sum to 1: how much of a step's time one token of the request is worth.
    """

    limits: np.ndarray
    floors: np.ndarray
    weights: np.ndarray


class BudgetState:
    """What a speculator measures for every rule: times, acceptance, and classes of response length.

    Args:
        cost: the engine's measured times.
        survival: counts of finished requests by class.
    """

    PRIOR = np.array([64.0, 32.0])
    """Drafted and accepted tokens that stand for what is not known."""

    def __init__(self, cost: CostTable, survival: Survival) -> None:
        self.cost, self.survival = cost, survival
        self._drafted = 0
        """Draft tokens of the last step."""
        self._totals = self.PRIOR.copy()
        """Drafted and accepted tokens, decayed towards PRIOR, so that a rule that stopped tries again."""
        self._seconds = np.full((32, 2), 10 * cost(1, 1))
        """Decayed sums by the cost table: the time of plain steps for as many tokens, and the time of the steps.

        The row is the bit length of the batch, because a speed-up belongs to a batch size.
        """

    @property
    def acceptance(self) -> float:
        """Share of the draft tokens that were accepted lately."""
        return float(self._totals[1] / self._totals[0])

    def per_token(self, batch: int) -> float:
        """Return the seconds that one more token costs, at the place of the cost table where the last step was."""
        return self.cost.marginal(batch + self._drafted, batch)

    def prices(self, weights: np.ndarray) -> np.ndarray:
        """Return the seconds, float [B], that an accepted draft token of each request saves less its own time.

        The token would otherwise come from a step with drafts. So a plain step's share is divided by the speed-up
        that batches about as large had so far.
        """
        batch = len(weights)
        plain, drafted = self._seconds[batch.bit_length()].tolist()
        speed_up = max(plain / drafted, 1.0)
        return np.maximum(self.cost(batch, batch) * weights / speed_up - self.per_token(batch), 0.0)

    def gain(
        self, weights: np.ndarray, expected: np.ndarray, drafted: int, draft_seconds: float = 0.0
    ) -> float:
        """Return the estimated speed-up of a step with drafts over a plain step; below 1, verify no draft.

        Args:
            weights: float [B], the allowance's.
            expected: float [B], expected acceptances of each request's draft: the sum of its path probabilities.
            drafted: draft tokens of the step.
            draft_seconds: time for which the engine waits for the drafts.
        """
        batch = len(expected)
        without = self.cost(batch, batch)
        saved = 1.0 + float(weights @ expected)
        return saved * without / (self.cost(batch + drafted, batch) + draft_seconds)

    def observe(
        self, drafted: int, accepted: int, batch: int = 0, plain_seconds: float = 0.0, seconds: float = 0.0
    ) -> None:
        """Count a verify step's draft tokens and, where `seconds` is not 0, its speed-up.

        Args:
            batch: the step's requests.
            plain_seconds: time of plain steps for as many tokens, by the cost table.
            seconds: time of this step, by the cost table.
        """
        self._drafted = drafted
        self._totals = 0.99 * self._totals + 0.01 * self.PRIOR + (drafted, accepted)
        if seconds:
            row = batch.bit_length()
            self._seconds[row] = 0.99 * self._seconds[row] + (plain_seconds, seconds)

    def state_dict(self) -> dict[str, Any]:
        return {
            "cost": dataclasses.asdict(self.cost),
            "survival": self.survival.counts.copy(),
            "drafted": self._drafted,
            "totals": self._totals.copy(),
            "seconds": self._seconds.copy(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.cost = CostTable(**state["cost"])  # a new measurement would decide otherwise
        self.survival.counts = np.array(state["survival"], np.float64)
        self._drafted, self._totals = int(state["drafted"]), np.array(state["totals"], np.float64)
        self._seconds = np.array(state["seconds"], np.float64)


class BudgetRule:
    """Base of all rules: without overrides every request may propose all that the drafter has.

    A new rule overrides `limits`, `weights` or `floors`, and gets a line in budgets/registry.py.

    Args:
        settings: the section [budget].
        state: what was measured; read it, do not change it.
        max_draft: most tokens that the engine verifies for one request.
    """

    needs_costs: ClassVar[bool] = False
    """Whether the rule needs the engine's measured times. Drafts that cost more than they save are then dropped."""
    drafts: ClassVar[bool] = True
    """False: the rule never allows a token, so that the draft model need not run."""

    def __init__(self, settings: BudgetConfig, state: BudgetState, max_draft: int) -> None:
        self.settings, self.state, self.max_draft = settings, state, max_draft

    def allow(self, step: Step) -> Allowance:
        """Return each request's allowance, within its room and the engine's limit."""
        weights = self.weights(step)
        limits = np.clip(np.minimum(self.limits(step), step.room - 1), 0, self.max_draft)
        return Allowance(limits=limits, floors=self.floors(weights), weights=weights)

    def limits(self, step: Step) -> np.ndarray:
        """Return the most draft tokens of each request, int [B]."""
        return np.full(len(step.generated), self.max_draft)

    def weights(self, step: Step) -> np.ndarray:
        """Return the share of the step's time that one token of each request is worth, float [B]; sums to 1."""
        return even_weights(len(step.generated))

    def floors(self, weights: np.ndarray) -> np.ndarray:
        """Return the least path probability that is worth verifying, float [B]."""
        return np.zeros(len(weights))


def even_weights(batch: int) -> np.ndarray:
    return np.full(batch, 1.0 / max(batch, 1))
