"""How many draft tokens a request may propose this step.

A verify step costs t(tokens, batch) seconds, measured. The policies and their formulas: docs/speculation.md.
Lengths are in tokens, times in seconds; B requests are running.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from torchspec.config.schema import Budget as BudgetConfig
from torchspec.errors import ConfigError

POLICIES = ("off", "fixed", "unlimited", "das", "das_closed", "price")
CLASSES = ("short", "medium", "long")
SHORT, MEDIUM, LONG = range(3)
MEASURED = ("das", "das_closed", "price")
"""Policies that need the engine's times, and drop drafts that would cost more than they save."""


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


class Budget:
    """A policy; `allow` gives each step's allowance.

    Args:
        policy: one of POLICIES.
        cost: the engine's measured times.
        max_draft: what the engine verifies at most for one request.
        fixed_tokens: of "fixed".
        class_tokens: draft tokens of short, medium and long requests, of "das".
        short_below, long_from: lengths that bound the classes, of "das".
        capacity: k of "das_closed", the share of a response that drafts can ever cover.
        focus: of "price": 0 prices all requests alike (throughput), 1 only by who ends last (makespan).

    Raises:
        ConfigError: unknown policy.
    """

    PRIOR = np.array([64.0, 32.0])
    """Drafted and accepted tokens that stand for what is not known."""

    def __init__(
        self,
        policy: str,
        cost: CostTable,
        *,
        max_draft: int = 32,
        fixed_tokens: int = 4,
        class_tokens: tuple[int, int, int] = (0, 8, 24),
        short_below: int = 256,
        long_from: int = 1024,
        capacity: float = 0.8,
        focus: float = 0.75,
    ) -> None:
        if policy not in POLICIES:
            near = difflib.get_close_matches(policy, POLICIES, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"budget policy {policy!r} is unknown{hint} (one of: {', '.join(POLICIES)})")
        self.policy, self.cost, self.max_draft, self.focus = policy, cost, max_draft, focus
        self.fixed_tokens, self.class_tokens = fixed_tokens, np.array(class_tokens)
        self.survival = Survival(short_below, long_from)
        self.capacity = capacity
        self._drafted = 0
        """Of the last step."""
        self._totals = self.PRIOR.copy()
        """Drafted and accepted tokens, decayed towards PRIOR, so that a policy that stopped tries again."""
        self._seconds = np.full((32, 2), 10 * cost(1, 1))
        """By the cost table, decayed: of plain steps for as many tokens as came, and of the steps that were; by
        the bit length of the batch, because a speed-up is one of a batch size."""

    def allow(self, step: Step) -> Allowance:
        batch = len(step.generated)
        even = np.full(batch, 1.0 / max(batch, 1))
        limits, floors, weights = np.full(batch, self.max_draft), np.zeros(batch), even
        if self.policy == "off":
            limits = np.zeros(batch, int)
        elif self.policy == "fixed":
            limits = np.full(batch, self.fixed_tokens)
        elif self.policy == "das":
            limits = self.class_tokens[self.survival.classes(step.expected, step.generated)]
        elif self.policy == "das_closed":
            limits = self._closed_limits(step.remaining)
        elif self.policy == "price":
            focus = 0.0 if step.waiting else self.focus
            weights = (1 - focus) * even + focus * criticality(step.remaining)
            floors = price_floors(self.prices(weights), self.per_token(batch))
        limits = np.clip(np.minimum(limits, step.room - 1), 0, self.max_draft)
        return Allowance(limits=limits, floors=floors, weights=weights)

    def prices(self, weights: np.ndarray) -> np.ndarray:
        """Seconds that an accepted draft token of each request saves, float [B], its own time deducted.

        What it saves is a token made the usual way, and the usual way has drafts too: a plain step's share, over
        the speed-up so far of batches about as large.
        """
        batch = len(weights)
        plain, drafted = self._seconds[batch.bit_length()].tolist()
        speed_up = max(plain / drafted, 1.0)
        return np.maximum(self.cost(batch, batch) * weights / speed_up - self.per_token(batch), 0.0)

    def per_token(self, batch: int) -> float:
        """Seconds that one more token costs, where the last step ended on the cost table."""
        return self.cost.marginal(batch + self._drafted, batch)

    def gain(
        self, weights: np.ndarray, expected: np.ndarray, drafted: int, draft_seconds: float = 0.0
    ) -> float:
        """Estimated speed-up of a step with drafts over one without; below 1, verify none of them.

        Args:
            weights: float [B], the allowance's.
            expected: float [B], expected acceptances of each request's draft: the sum of its path probabilities.
            drafted: draft tokens of the step.
            draft_seconds: what proposing took where the engine had to wait for it.
        """
        batch = len(expected)
        without = self.cost(batch, batch)
        saved = 1.0 + float(weights @ expected)
        return saved * without / (self.cost(batch + drafted, batch) + draft_seconds)

    def observe(
        self, drafted: int, accepted: int, batch: int = 0, plain_seconds: float = 0.0, seconds: float = 0.0
    ) -> None:
        """Count a verify step's draft tokens; "das_closed" derives its efficiency from them.

        Args:
            batch: the step's requests.
            plain_seconds: by the cost table, the time of plain steps for as many tokens as came; "price" derives
                the speed-up from it, and from the `seconds` of this step, by the same table.
        """
        self._drafted = drafted
        self._totals = 0.99 * self._totals + 0.01 * self.PRIOR + (drafted, accepted)
        if seconds:
            row = batch.bit_length()
            self._seconds[row] = 0.99 * self._seconds[row] + (plain_seconds, seconds)

    def finished(self, expected: float, length: int) -> None:
        """A request ended with `length` tokens; "das" learns from it."""
        self.survival.observe(expected, length)

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

    def _closed_limits(self, remaining: np.ndarray) -> np.ndarray:
        batch = len(remaining)
        if not batch:
            return np.zeros(0, int)
        rate = float(self._totals[1] / self._totals[0])
        efficiency = np.full(batch, max(rate, 0.01) / self.capacity)
        per_token = self.per_token(batch)
        base = self.cost(batch, batch) - per_token * batch
        proposed, rounds = closed_form(
            np.maximum(remaining, 1.0), efficiency, np.full(batch, self.capacity), base, per_token
        )
        return np.rint(proposed / rounds).astype(int)


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
