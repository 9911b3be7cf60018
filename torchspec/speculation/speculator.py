"""Decides, for every running request and verify step, which drafter proposes how many tokens.

What an engine asks of it, in this order each step: `advance` with what was sampled, `plan`, then the draft
model's tokens if the plan wants any, then `complete`. Knows no engine; `vllm_hook.py` is vLLM's.

Losslessness rests on one rule: what decides whether a token of the draft *model* is proposed must not look at the
token itself, because the rejection test compares it with the distribution it was drawn from (docs/speculation.md).
So the plan is made before the model drafts; what follows its chain may depend on it.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from torchspec.config.schema import Config, longest_draft
from torchspec.errors import GuardStop
from torchspec.records import Rollout
from torchspec.speculation.budget import CLASSES, MEASURED, MEDIUM, Budget, CostTable, Step
from torchspec.speculation.lengths import LengthStats
from torchspec.speculation.plan import Plan
from torchspec.speculation.stats import Counts, Tally

if TYPE_CHECKING:  # importing the suffix drafter imports numba
    from torchspec.speculation.suffix.drafter import Drafts

log = logging.getLogger(__name__)

MODEL, SUFFIX = "model", "suffix"
PROBES = tuple(2**i for i in range(24))
"""Steps of an iteration, counted from 1, in which the draft model proposes all it may: its estimates follow it."""
REST = 8
"""Iterations that the draft model is left out for, after one in which it was not worth its time."""
PATIENCE = 32
"""Steps with about as many requests before it may be left out in those that follow with about as many."""
EVIDENCE = 64.0
"""Trials that a position's acceptance is worth at most when an iteration begins."""
TRUST = 4.0
"""Predicted acceptances of a request before its own record weighs as much as all requests'."""
LARGEST_PROBABILITY = 0.999


@dataclass(slots=True)
class _Request:
    problem_id: str
    room: int
    """Tokens that come at most."""
    expected: float
    generated: int = 0
    chain: int = 0
    """Of the last draft: tokens of the draft model, and tokens of the suffix drafter behind them."""
    tail: int = 0
    kind: int = MEDIUM
    predicted: float = 0.0
    accepted: float = 0.0
    """Acceptances of the draft model's tokens: what all requests' record predicted, and what came."""


class Speculator:
    """One engine's drafters, budget and what they have learned; see the module.

    Everything it decides follows from what it is told and from the cost table, never from a clock: ranks that are
    told the same decide the same.

    Args:
        config: rollout.drafter, rollout.num_draft_tokens, [suffix] and [budget].
        lengths: predicts how long a response will be; the caller lets it observe.
        cost: the engine's times; needed by the policies in budget.MEASURED, others take tokens to be free.
        window: iterations the suffix drafter remembers.
    """

    def __init__(
        self, config: Config, lengths: LengthStats, cost: CostTable | None = None, window: int = 16
    ) -> None:
        settings, suffix = config.budget, config.suffix
        self.drafter = config.rollout.drafter
        self.longest = longest_draft(config)
        self.model_tokens = 0 if self.drafter == SUFFIX else config.rollout.num_draft_tokens
        self.lengths = lengths
        self.suffix = None
        if self.drafter != MODEL:
            from torchspec.speculation.suffix.drafter import SuffixDrafter, compile_all

            compile_all()
            self.suffix = SuffixDrafter(
                window=suffix.window or window,
                max_bytes=suffix.max_bytes,
                recency=suffix.recency,
                max_draft=suffix.max_draft,
            )
        self.measured = settings.rule in MEASURED
        if self.measured and cost is None:
            raise ValueError(f"budget.rule = {settings.rule} needs a cost table")
        short, medium, long = settings.class_tokens
        self.budget = Budget(
            settings.rule,
            cost if self.measured and cost else CostTable.linear(1.0, 0.0),
            max_draft=self.longest,
            fixed_tokens=settings.fixed_tokens,
            class_tokens=(short, medium, long),
            short_below=settings.short_below,
            long_from=settings.long_from,
            capacity=settings.capacity,
            focus=settings.focus,
        )
        self._requests: dict[str, _Request] = {}
        self._tried = np.ones(self.model_tokens)
        self._accepted = np.full(self.model_tokens, 0.5)
        self._probes = PROBES
        self._step = 0
        self._waiting = 0
        self._worth = 0.0
        """Of the draft model in this iteration: log of the estimated gains with it over those without, summed."""
        self._spell = 0, 0, 0.0
        """Requests, step and worth at its beginning: steps in a row with about as many requests."""
        self._rest = 0
        """Iterations to go without it."""
        self._runs = False
        self._last: tuple[set[str], float, float, float] | None = None
        self._start_tally()

    def learn(self, iteration: int, rollouts: Sequence[Rollout]) -> None:
        """An iteration has ended: its rollouts, of all engines, are history from the next one on."""
        if self.suffix:
            self.suffix.add_rollouts(iteration, rollouts)
            self.suffix.begin_iteration(iteration + 1)
        scale = np.minimum(1.0, EVIDENCE / self._tried)
        self._tried *= scale
        self._accepted *= scale
        self._step = 0
        self._rest = max(self._rest - 1, 0)
        if self._worth < 0:
            log.warning("the draft model costs more time than it saves; it rests for %d iterations", REST)
            self._rest = REST
        self._worth, self._spell = 0.0, (0, 0, 0.0)

    @property
    def _with_model(self) -> bool:
        _, began, worth = self._spell
        paused = self._step >= began + PATIENCE and self._worth < worth
        return self.model_tokens > 0 and not self._rest and not paused and self.budget.policy != "off"

    @property
    def window_bytes(self) -> int:
        return self.suffix.history_bytes if self.suffix else 0

    def set_queue_depth(self, count: int) -> None:
        """So many requests will begin: while some of them wait, throughput counts, not who ends last."""
        self._waiting = count
        self._last = None  # of a step that is long over, or of an engine that has died

    def begin(self, request_id: str, problem_id: str, prompt_tokens: Sequence[int], room: int) -> None:
        """A request starts; at most `room` tokens will come."""
        self._waiting = max(self._waiting - 1, 0)
        known = self.lengths.of(problem_id)
        self._requests[request_id] = _Request(problem_id, room, known.p50 if known else float("nan"))
        if self.suffix:
            self.suffix.start(request_id, problem_id, prompt_tokens)

    def end(self, request_id: str, finished: bool = True) -> None:
        """A request is done, or was lost: then its length says nothing."""
        request = self._requests.pop(request_id)
        if finished:
            self.budget.finished(request.expected, request.generated)
        if self.suffix:
            self.suffix.stop(request_id)

    def room(self, request_id: str) -> int:
        """Tokens that may still come."""
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
        """A step has been sampled.

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
        self._tally.steps += 1
        planned, plain, expected, predicted = self._last or (set(), 0.0, 0.0, 0.0)
        if self.measured and request_ids and planned == set(request_ids):  # nobody joined
            plain *= 1.0 + sum(accepted) / len(request_ids)
            self._tally.plain_seconds += plain
            self._tally.expected_seconds += expected
            self._tally.predicted_seconds += predicted
            self._tally.seconds += seconds
        else:
            plain = predicted = 0.0
        self.budget.observe(sum(verified), sum(accepted), len(request_ids), plain, predicted)
        if self.suffix:
            self.suffix.advance(request_ids, tokens)

    def plan(self, request_ids: Sequence[str]) -> Plan:
        """Who drafts how much for these requests, the ones that go on."""
        self._step += 1
        emptied = not self._waiting and 2 * len(request_ids) <= self._spell[0]
        if emptied or len(request_ids) >= 2 * self._spell[0]:
            self._spell = len(request_ids), self._step - 1, self._worth
        self._runs = self._with_model  # for the whole plan, which changes what it is worth
        ids = list(request_ids)
        requests = [self._requests[i] for i in ids]
        generated = np.array([r.generated for r in requests], np.int64)
        expected = np.array([r.expected for r in requests], np.float64)
        step = Step(
            generated=generated,
            room=np.array([r.room for r in requests], np.int64) - generated,
            remaining=self.lengths.remaining([r.problem_id for r in requests], generated),
            expected=expected,
            waiting=self._waiting,
        )
        for request, kind in zip(requests, self.budget.survival.classes(expected, generated).tolist()):
            request.kind = kind
        allowance = self.budget.allow(step)
        drafts, saved = None, np.zeros(len(ids))
        if self.suffix:
            drafts = self.suffix.propose(ids, allowance.limits, allowance.floors)
            sums = np.concatenate([[0.0], np.cumsum(drafts.probs, dtype=np.float64)])
            saved = sums[drafts.starts[1:]] - sums[drafts.starts[:-1]]
        paths, need = self._model_paths(requests, allowance.limits, allowance.floors)
        if self._step in self._probes and need.any():
            passes, used, expected_saved = int(need.max()), True, paths.sum(axis=1)
            chains = need
        else:
            passes, used, chains, expected_saved = self._choose(allowance.weights, drafts, saved, paths, need)
        lengths = np.zeros(len(ids), int) if drafts is None else drafts.lengths
        total = int(np.where(chains > 0, chains, lengths).sum()) if used else 0
        self._expect(ids, total, passes, float(expected_saved.mean()) if used and ids else 0.0)
        ends = np.concatenate([np.ones((len(ids), 1)), paths], axis=1)[np.arange(len(ids)), chains]
        return Plan(
            ids=ids,
            passes=passes if self._runs else None,
            chains=chains,
            drafts=drafts,
            rest=allowance.limits - chains,
            floors=np.minimum(allowance.floors / np.maximum(ends, 1e-9), 1.0),
            used=used,
        )

    def complete(self, plan: Plan, chains: Sequence[Sequence[int]] | None) -> list[list[int]]:
        """The drafts, by request; `chains` are the tokens the draft model proposed, plan.passes for each."""
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

    def spend(self, host: float, model: float) -> None:
        """Count wall time that drafting took."""
        self._tally.host_seconds += host
        self._tally.model_seconds += model

    def take_tally(self) -> Tally:
        """What was done since the last call."""
        tally = self._tally
        tally.drafters = {name: counts.stats() for name, counts in self._by_drafter.items()}
        tally.classes = {name: counts.stats() for name, counts in zip(CLASSES, self._by_class)}
        self._start_tally()
        return tally

    def state_dict(self) -> dict[str, Any]:
        """What was measured and learned, as plain values and arrays; the lengths are their owner's."""
        return self._learned() | ({"suffix": self.suffix.state_dict()} if self.suffix else {})

    def _learned(self) -> dict[str, Any]:
        return {
            "budget": self.budget.state_dict(),
            "tried": self._tried.copy(),
            "accepted": self._accepted.copy(),
            "steps": [self._step, self._rest],
            "worth": self._worth,
            "spell": self._spell,
        }

    @contextmanager
    def frozen_stats(self) -> Generator[None]:
        """What is drafted within teaches nothing: evaluations, a frozen draft. No request may run at either end."""
        state = copy.deepcopy(self._learned())
        calibration = self.suffix.calibration() if self.suffix else None
        yield
        self._learn_back(state)
        if self.suffix and calibration:
            self.suffix.load_calibration(calibration)
        self.take_tally()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._learn_back(state)
        if self.suffix:
            self.suffix.load_state_dict(state["suffix"])

    def _learn_back(self, state: dict[str, Any]) -> None:
        self.budget.load_state_dict(state["budget"])
        self._tried[:], self._accepted[:] = state["tried"], state["accepted"]
        self._step, self._rest = map(int, state["steps"])
        self._worth, self._spell = float(state["worth"]), tuple(state["spell"])

    def _start_tally(self) -> None:
        self._by_drafter = {MODEL: Counts(self.model_tokens)} if self.model_tokens else {}
        if self.suffix:
            self._by_drafter[SUFFIX] = Counts(self.longest)
        self._by_class = [Counts(self.longest) for _ in CLASSES]
        self._tally = Tally(drafters={}, classes={})

    def _count(self, request: _Request, tested: int, hits: int) -> None:
        if tested > request.chain + request.tail:
            proposed = request.chain + request.tail
            raise GuardStop(f"{tested} draft tokens were verified, proposed were {proposed}: not lossless")
        chain = min(request.chain, tested)
        self._by_class[request.kind].add(0, tested, hits)
        if self.suffix:
            self._by_drafter[SUFFIX].add(chain, tested, hits)
        if chain:
            self._by_drafter[MODEL].add(0, chain, hits)
            tried, agreed = min(hits + 1, chain), min(hits, chain)
            request.predicted += float((self._accepted[:tried] / self._tried[:tried]).sum())
            request.accepted += agreed
            self._tried[:tried] += 1
            self._accepted[:agreed] += 1

    def _model_paths(
        self, requests: list[_Request], limits: np.ndarray, floors: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Path probabilities of the draft model's tokens, float [B, K], and how many of them are allowed, [B].

        By position, from what was accepted of all requests and of this one before: not from the tokens, which
        are not drawn yet.
        """
        own = np.array([(r.accepted + TRUST) / (r.predicted + TRUST) for r in requests])
        each = np.minimum(own[:, None] * (self._accepted / self._tried), LARGEST_PROBABILITY)
        paths = np.cumprod(each, axis=1)
        if self._step in self._probes:
            floors = np.zeros_like(floors)
        allowed = (paths >= floors[:, None]).sum(axis=1) * self._runs
        return paths, np.minimum(allowed, np.maximum(limits, 0))

    def _choose(
        self,
        weights: np.ndarray,
        drafts: Drafts | None,
        saved: np.ndarray,
        paths: np.ndarray,
        need: np.ndarray,
    ) -> tuple[int, bool, np.ndarray, np.ndarray]:
        """The model's passes with the largest estimated gain; per request the drafter that saves more.

        Returns:
            passes, whether drafts are worth it at all, tokens [B] of the model, expected acceptances [B].
        """
        batch, none = len(need), np.zeros(len(need), np.int64)
        if not batch:
            return 0, False, none, np.zeros(0)
        price, per_token = self.budget.prices(weights), self.budget.per_token(batch)
        lengths = none if drafts is None else drafts.lengths
        suffix_score = price * saved - per_token * (lengths - saved)
        reach = np.concatenate([np.zeros((batch, 1)), np.cumsum(paths, axis=1)], axis=1)
        sunk = self._drafting(0, batch)  # the first pass keeps the model's KV cache complete, wanted or not
        gain, best = self.budget.gain(weights, none, 0, sunk), (0, False, none, np.zeros(batch))
        without_model = 1.0
        for passes in range(int(need.max(initial=0)) + 1):
            chains = np.minimum(need, passes)
            model_saved = reach[np.arange(batch), chains]
            score = price * model_saved - per_token * (chains - model_saved)
            by_model = (chains > 0) & ((lengths == 0) | (score > suffix_score))
            chains = np.where(by_model, chains, 0)
            expected = np.where(by_model, model_saved, saved)
            drafted = int(np.where(by_model, chains, lengths).sum())
            if passes == 0:
                without_model = max(without_model, self.budget.gain(weights, expected, drafted))
            estimate = self.budget.gain(weights, expected, drafted, self._drafting(passes, batch))
            if drafted and estimate > gain:
                gain, best = estimate, (passes, True, chains, expected)
        self._worth += float(np.log(gain / without_model))
        return best

    def _drafting(self, passes: int, batch: int) -> float:
        return self.budget.cost.drafting(passes, batch) if self._runs else 0.0

    def _expect(self, ids: list[str], drafted: int, passes: int, saved: float) -> None:
        """Note what this step should cost and bring, for the estimated speed-up."""
        batch, cost = max(len(ids), 1), self.budget.cost
        plain = cost(batch, batch)
        seconds = cost(batch + drafted, batch) + self._drafting(passes, batch)
        self._last = set(ids), plain, plain * (1.0 + saved), seconds
