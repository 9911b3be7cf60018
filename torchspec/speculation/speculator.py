"""Decide, for every running request and verify step, which drafter proposes how many tokens.

An engine calls, in this order each step: `advance` with what was sampled, `plan`, then the draft model if the
plan wants its tokens, then `complete`. Nothing here knows an engine; rollout/vllm/adapter.py is vLLM's side.

Losslessness rests on one rule: what decides whether a token of the draft *model* is proposed must not look at the
token itself, because the rejection test compares it with the distribution it was drawn from (docs/speculation.md).
So the plan is made before the model drafts; what follows its chain may depend on it.
"""

from __future__ import annotations

import copy
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from torchspec.config.schema import Config, longest_draft
from torchspec.errors import GuardStop
from torchspec.records import Rollout
from torchspec.speculation.acceptance import AcceptanceEstimator
from torchspec.speculation.budgets.base import Allowance, Step
from torchspec.speculation.budgets.registry import build_rule, rule_class
from torchspec.speculation.cost_table import CostTable
from torchspec.speculation.lengths import LengthStats
from torchspec.speculation.model_gate import ModelGate
from torchspec.speculation.plan import Choice, DraftPlan, Forecast
from torchspec.speculation.stats import SpeculationStats, StatsRecorder
from torchspec.speculation.suffix.drafts import Drafts
from torchspec.speculation.survival import MEDIUM

MODEL, SUFFIX = "model", "suffix"


@dataclass(slots=True)
class _Request:
    problem_id: str
    room: int
    """Tokens that come at most."""
    expected: float
    generated: int = 0
    chain: int = 0
    """Tokens of the draft model in the last draft."""
    tail: int = 0
    """Tokens of the suffix drafter behind them."""
    kind: int = MEDIUM
    predicted: float = 0.0
    """Acceptances of the draft model's tokens that the record of all requests predicted."""
    accepted: float = 0.0
    """Those that came."""


class Speculator:
    """Hold one engine's drafters, budget and what they have learned; see the module.

    Everything it decides follows from what it is told and from the cost table, never from a clock: ranks that are
    told the same decide the same.

    Args:
        config: rollout.drafter, rollout.num_draft_tokens, [suffix] and [budget].
        lengths: predicts how long a response will be; the caller lets it observe.
        cost: the engine's times; needed by rules with `needs_costs`; the other rules take tokens to be free.
        window: iterations the suffix drafter remembers.
    """

    def __init__(
        self, config: Config, lengths: LengthStats, cost: CostTable | None = None, window: int = 16
    ) -> None:
        suffix = config.suffix
        self.longest = longest_draft(config)
        """Most draft tokens of a request."""
        self.model_tokens = 0 if config.rollout.drafter == SUFFIX else config.rollout.num_draft_tokens
        self.lengths = lengths
        self.suffix = None
        rule = rule_class(config.budget.rule)
        if rule.needs_costs and cost is None:
            raise ValueError(f"budget.rule = {config.budget.rule} needs a cost table")
        if config.rollout.drafter != MODEL:
            from torchspec.speculation.suffix.drafter import SuffixDrafter, compile_all

            compile_all()
            self.suffix = SuffixDrafter(
                window=suffix.window or window,
                max_bytes=suffix.max_bytes,
                recency=suffix.recency,
                max_draft=suffix.max_draft,
            )
        costs = cost if rule.needs_costs and cost else CostTable.linear(1.0, 0.0)
        self.budget = build_rule(config.budget, costs, self.longest)
        self.acceptance = AcceptanceEstimator(self.model_tokens)
        self.gate = ModelGate(self.model_tokens > 0 and rule.drafts)
        drafters = {MODEL: self.model_tokens, SUFFIX: self.longest if self.suffix else 0}
        self._recorder = StatsRecorder({name: n for name, n in drafters.items() if n}, self.longest)
        self._requests: dict[str, _Request] = {}
        self._waiting = 0
        self._runs = False
        """Whether the draft model runs in the step that is planned."""
        self._forecast = Forecast()

    def learn(self, iteration: int, rollouts: Sequence[Rollout]) -> None:
        """Take the rollouts of an iteration that ended, of all engines, as history for the next ones."""
        if self.suffix:
            self.suffix.add_rollouts(iteration, rollouts)
            self.suffix.begin_iteration(iteration + 1)
        self.acceptance.forget()
        self.gate.end_iteration()

    def set_queue_depth(self, count: int) -> None:
        """Expect `count` requests: while some of them wait, throughput counts, not who ends last."""
        self._waiting = count
        # The last forecast is of a step that is long over, or of an engine that has died.
        self._forecast = Forecast()

    def begin(self, request_id: str, problem_id: str, prompt_tokens: Sequence[int], room: int) -> None:
        """Start a request; at most `room` tokens will come."""
        self._waiting = max(self._waiting - 1, 0)
        known = self.lengths.of(problem_id)
        self._requests[request_id] = _Request(problem_id, room, known.p50 if known else float("nan"))
        if self.suffix:
            self.suffix.start(request_id, problem_id, prompt_tokens)

    def end(self, request_id: str, finished: bool = True) -> None:
        """Drop a request. Its length is recorded unless it was lost before it was finished."""
        request = self._requests.pop(request_id)
        if finished:
            self.budget.state.survival.observe(request.expected, request.generated)
        if self.suffix:
            self.suffix.stop(request_id)

    def room(self, request_id: str) -> int:
        """Return how many tokens may still come."""
        request = self._requests[request_id]
        return request.room - request.generated

    def advance(
        self,
        request_ids: Sequence[str],
        tokens: Sequence[Sequence[int]],
        verified: Sequence[int],
        accepted: Sequence[int],
        seconds: float,
    ) -> None:
        """Take what a step has sampled.

        Args:
            tokens: what each request got, cut behind its end.
            verified: how many tokens of its draft were tested, and how many of them `accepted`.
            seconds: the step's time, drafting included.
        """
        for request_id, new, tested, hits in sorted(zip(request_ids, tokens, verified, accepted)):
            request = self._requests[request_id]
            request.generated += len(new)
            if tested:
                self._count(request, tested, hits)
            request.chain = request.tail = 0
        stats, forecast, plain, predicted = self._recorder.total, self._forecast, 0.0, 0.0
        stats.steps += 1
        if self.budget.needs_costs and request_ids and forecast.ids == set(request_ids):  # nobody joined
            plain = forecast.plain * (1.0 + sum(accepted) / len(request_ids))
            predicted = forecast.predicted
            stats.plain_seconds += plain
            stats.expected_seconds += forecast.expected
            stats.predicted_seconds += predicted
            stats.seconds += seconds
        self.budget.state.observe(sum(verified), sum(accepted), len(request_ids), plain, predicted)
        if self.suffix:
            self.suffix.advance(request_ids, tokens)

    def plan(self, request_ids: Sequence[str]) -> DraftPlan:
        """Decide who drafts how much for these requests, the ones that go on."""
        self.gate.begin_step(len(request_ids), self._waiting)
        self._runs = self.gate.is_open  # for the whole plan, which changes what the model is worth
        ids = list(request_ids)
        requests = [self._requests[i] for i in ids]
        allowance = self.budget.allow(self._step_of(requests))
        drafts, saved = None, np.zeros(len(ids))
        if self.suffix:
            drafts = self.suffix.propose(ids, allowance.limits, allowance.floors)
            sums = np.concatenate([[0.0], np.cumsum(drafts.probs, dtype=np.float64)])
            saved = sums[drafts.starts[1:]] - sums[drafts.starts[:-1]]
        paths, need = self._model_paths(requests, allowance)
        if self.gate.is_probe and need.any():
            choice = Choice(int(need.max()), True, need, paths.sum(axis=1))
        else:
            choice = self._choose(allowance.weights, drafts, saved, paths, need)
        lengths = np.zeros(len(ids), int) if drafts is None else drafts.lengths
        chains = choice.chains
        total = int(np.where(chains > 0, chains, lengths).sum()) if choice.used else 0
        mean_saved = float(choice.expected.mean()) if choice.used and ids else 0.0
        self._forecast = self._forecast_of(ids, total, choice.passes, mean_saved)
        ends = np.concatenate([np.ones((len(ids), 1)), paths], axis=1)[np.arange(len(ids)), chains]
        return DraftPlan(
            ids=ids,
            passes=choice.passes if self._runs else None,
            chains=chains,
            drafts=drafts,
            rest=allowance.limits - chains,
            floors=np.minimum(allowance.floors / np.maximum(ends, 1e-9), 1.0),
            used=choice.used,
        )

    def _step_of(self, requests: list[_Request]) -> Step:
        """Return what the budget rule sees of the requests; note the class of each."""
        generated = np.array([r.generated for r in requests], np.int64)
        expected = np.array([r.expected for r in requests], np.float64)
        kinds = self.budget.state.survival.classes(expected, generated)
        for request, kind in zip(requests, kinds.tolist()):
            request.kind = kind
        return Step(
            generated=generated,
            room=np.array([r.room for r in requests], np.int64) - generated,
            remaining=self.lengths.remaining([r.problem_id for r in requests], generated),
            expected=expected,
            waiting=self._waiting,
        )

    def complete(self, plan: DraftPlan, chains: Sequence[Sequence[int]] | None) -> list[list[int]]:
        """Return the drafts, by request; `chains` are the draft model's tokens, plan.passes for each request."""
        if not plan.used:
            return [[] for _ in plan.ids]
        out = plan.drafts.lists() if plan.drafts else [[] for _ in plan.ids]
        chained = np.flatnonzero(plan.chains).tolist()
        for i in chained:
            assert chains is not None
            out[i] = list(chains[i][: plan.chains[i]])
            self._requests[plan.ids[i]].chain = len(out[i])
        if self.suffix and chained:
            more = self.suffix.extend(
                [plan.ids[i] for i in chained],
                [out[i] for i in chained],
                plan.rest[chained],
                plan.floors[chained],
            )
            for i, tail in zip(chained, more.lists()):
                out[i] += tail
        for request_id, draft in zip(plan.ids, out):
            request = self._requests[request_id]
            request.tail = len(draft) - request.chain
        return out

    def record_time(self, host: float, model: float) -> None:
        """Count the seconds that drafting took, on the host and in the draft model."""
        self._recorder.total.host_seconds += host
        self._recorder.total.model_seconds += model

    def drain_stats(self) -> SpeculationStats:
        """Return what was done since the last call."""
        return self._recorder.drain(self.suffix.history_bytes if self.suffix else 0)

    def state_dict(self) -> dict[str, Any]:
        """Return what was measured and learned, as plain values and arrays; the lengths are their owner's."""
        return self._learned() | ({"suffix": self.suffix.state_dict()} if self.suffix else {})

    def _learned(self) -> dict[str, Any]:
        budget = {"budget": self.budget.state.state_dict()}
        return budget | self.acceptance.state_dict() | self.gate.state_dict()

    @contextmanager
    def frozen_stats(self) -> Generator[None]:
        """Learn nothing from what is drafted within, as in an evaluation. No request may run at either end."""
        state = copy.deepcopy(self._learned())
        calibration = self.suffix.calibration() if self.suffix else None
        yield
        self._load_learned(state)
        if self.suffix and calibration:
            self.suffix.load_calibration(calibration)
        self.drain_stats()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._load_learned(state)
        if self.suffix:
            self.suffix.load_state_dict(state["suffix"])

    def _load_learned(self, state: dict[str, Any]) -> None:
        self.budget.state.load_state_dict(state["budget"])
        self.acceptance.load_state_dict(state)
        self.gate.load_state_dict(state)

    def _count(self, request: _Request, tested: int, hits: int) -> None:
        if tested > request.chain + request.tail:
            proposed = request.chain + request.tail
            raise GuardStop(f"{tested} draft tokens were verified, proposed were {proposed}: not lossless")
        chain = min(request.chain, tested)
        self._recorder.by_class[request.kind].add(0, tested, hits)
        if self.suffix:
            self._recorder.by_drafter[SUFFIX].add(chain, tested, hits)
        if chain:
            self._recorder.by_drafter[MODEL].add(0, chain, hits)
            predicted, agreed = self.acceptance.observe(chain, hits)
            request.predicted += predicted
            request.accepted += agreed

    def _model_paths(self, requests: list[_Request], allowance: Allowance) -> tuple[np.ndarray, np.ndarray]:
        """Return path probabilities of the draft model's tokens, [B, K], and how many of them are allowed, [B]."""
        paths = self.acceptance.paths(
            np.array([r.predicted for r in requests]), np.array([r.accepted for r in requests])
        )
        floors = np.zeros_like(allowance.floors) if self.gate.is_probe else allowance.floors
        allowed = (paths >= floors[:, None]).sum(axis=1) * self._runs
        return paths, np.minimum(allowed, np.maximum(allowance.limits, 0))

    def _choose(
        self,
        weights: np.ndarray,
        drafts: Drafts | None,
        saved: np.ndarray,
        paths: np.ndarray,
        need: np.ndarray,
    ) -> Choice:
        """Choose the model's passes with the largest estimated gain, and per request the drafter that saves more."""
        batch, none = len(need), np.zeros(len(need), np.int64)
        if not batch:
            return Choice(0, False, none, np.zeros(0))
        state = self.budget.state
        price, per_token = state.prices(weights), state.per_token(batch)
        lengths = none if drafts is None else drafts.lengths
        suffix_score = price * saved - per_token * (lengths - saved)
        expected_hits = np.concatenate([np.zeros((batch, 1)), np.cumsum(paths, axis=1)], axis=1)
        sunk = self._drafting(0, batch)  # the first pass keeps the model's KV cache complete, wanted or not
        gain, best = state.gain(weights, none, 0, sunk), Choice(0, False, none, np.zeros(batch))
        without_model = 1.0
        for passes in range(int(need.max(initial=0)) + 1):
            chains = np.minimum(need, passes)
            model_saved = expected_hits[np.arange(batch), chains]
            score = price * model_saved - per_token * (chains - model_saved)
            by_model = (chains > 0) & ((lengths == 0) | (score > suffix_score))
            chains = np.where(by_model, chains, 0)
            expected = np.where(by_model, model_saved, saved)
            drafted = int(np.where(by_model, chains, lengths).sum())
            if passes == 0:
                without_model = max(without_model, state.gain(weights, expected, drafted))
            estimate = state.gain(weights, expected, drafted, self._drafting(passes, batch))
            if drafted and estimate > gain:
                gain, best = estimate, Choice(passes, True, chains, expected)
        self.gate.worth += float(np.log(gain / without_model))
        return best

    def _drafting(self, passes: int, batch: int) -> float:
        return self.budget.state.cost.drafting(passes, batch) if self._runs else 0.0

    def _forecast_of(self, ids: list[str], drafted: int, passes: int, saved: float) -> Forecast:
        batch, cost = max(len(ids), 1), self.budget.state.cost
        plain = cost(batch, batch)
        seconds = cost(batch + drafted, batch) + self._drafting(passes, batch)
        return Forecast(frozenset(ids), plain, plain * (1.0 + saved), seconds)
