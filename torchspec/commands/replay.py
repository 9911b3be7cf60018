"""Recorded rollouts drive a drafter and a budget offline: what would they have accepted, and saved?

A recorded token was sampled from the policy, and a verifier that samples at each position and keeps the draft
while it agrees has exactly the law of one that accepts a draft token x with probability p(x) and else samples
from the rest. So following the record, and accepting the draft tokens that are equal to it, is an unbiased
replay at any temperature (docs/speculation.md). The stored log-probabilities give the ceiling: how often an
independent sample of the policy would repeat the recorded token.
"""

from __future__ import annotations

import argparse
import difflib
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from torchspec.config.schema import Budget as BudgetConfig
from torchspec.errors import ConfigError
from torchspec.records import Rollout, SpecStats
from torchspec.rollout.files import read_rollouts
from torchspec.speculation.budgets.base import BudgetRule, Step
from torchspec.speculation.budgets.registry import build_rule, rule_class
from torchspec.speculation.cost_table import CostTable
from torchspec.speculation.lengths import LengthStats

if TYPE_CHECKING:  # importing the suffix drafter imports numba
    from torchspec.speculation.suffix.drafter import Drafts

DRAFTERS = ("suffix",)
BASE_S, PER_TOKEN_S = 0.008, 0.0246e-3
"""A 7B model on one H100, read off the DAS paper's figure 8; used where no cost table is given."""


class Drafter(Protocol):
    """What a replay asks of a drafter; see `suffix.SuffixDrafter`."""

    def begin_iteration(self, iteration: int) -> None: ...

    def add_rollouts(self, iteration: int, rollouts: Sequence[Rollout]) -> None: ...

    def start(self, request_id: str, problem_id: str | None, prompt_tokens: Sequence[int]) -> None: ...

    def stop(self, request_id: str) -> None: ...

    def advance(self, request_ids: Sequence[str], tokens: Sequence[Sequence[int]]) -> None: ...

    def propose(
        self, request_ids: Sequence[str], limits: np.ndarray, floors: np.ndarray | None = None
    ) -> Drafts: ...


@dataclass(kw_only=True, slots=True)
class Report:
    """What a replay found. A round is one verify step of one request, with a draft or without."""

    spec: SpecStats
    rounds: int = 0
    tokens: int = 0
    """Tokens that verify steps emitted."""
    seconds: float = 0.0
    """Predicted time of all verify steps, and the same without speculation."""
    seconds_off: float = 0.0
    draft_seconds: float = 0.0
    """Measured time inside the drafter."""
    skipped: int = 0
    """Steps whose drafts the budget's off switch dropped."""
    ceilings: list[float] = field(default_factory=list)

    @property
    def accepted_per_round(self) -> float:
        return sum(self.spec.accepted) / max(self.rounds, 1)

    @property
    def drafted_per_round(self) -> float:
        return sum(self.spec.drafted) / max(self.rounds, 1)

    @property
    def speed_up(self) -> float:
        return self.seconds_off / self.seconds if self.seconds else 1.0


@dataclass(slots=True)
class _Running:
    id: str
    rollout: Rollout
    done: int
    expected: float


def replay(
    rollouts: Sequence[Rollout], drafter: Drafter, budget: BudgetRule, batch: int, *, off_switch: bool = True
) -> Report:
    """Decode recorded rollouts again, `batch` at a time, iteration (policy version) after iteration.

    As in an engine, a response's first token comes with its prompt and is never drafted.

    Args:
        off_switch: drop the drafts of a step whose estimated speed-up is below 1.
    """
    report = Report(spec=SpecStats(steps=0, drafted=[0] * budget.max_draft, accepted=[0] * budget.max_draft))
    longest = max(len(r.tokens) for r in rollouts)
    stats = LengthStats(default=longest)
    ordered = sorted((r for r in rollouts if r.tokens), key=lambda r: r.policy_version)
    for iteration, group in groupby(ordered, key=lambda r: r.policy_version):
        recorded = list(group)
        drafter.begin_iteration(iteration)
        _decode(recorded, drafter, budget, batch, longest, stats, report, off_switch)
        report.seconds_off += _seconds_off([len(r.tokens) - 1 for r in recorded], batch, budget.state.cost)
        begin = time.perf_counter()
        drafter.add_rollouts(iteration, recorded)
        report.draft_seconds += time.perf_counter() - begin
        stats.observe(recorded)
    report.ceilings = [float(np.exp(r.logprobs).mean()) for r in ordered]
    return report


def _decode(
    recorded: list[Rollout],
    drafter: Drafter,
    budget: BudgetRule,
    batch: int,
    longest: int,
    stats: LengthStats,
    report: Report,
    off_switch: bool,
) -> None:
    waiting = list(enumerate(recorded))[::-1]
    running: list[_Running] = []
    while waiting or running:
        while waiting and len(running) < batch:
            number, rollout = waiting.pop()
            known = stats.of(rollout.problem_id)
            one = _Running(f"{number:08}", rollout, 1, known.p50 if known else float("nan"))
            drafter.start(one.id, rollout.problem_id, rollout.prompt_tokens)
            drafter.advance([one.id], [rollout.tokens[:1]])
            running.append(one)
        if active := [r for r in running if r.done < len(r.rollout.tokens)]:
            _verify(active, drafter, budget, longest, stats, report, off_switch, len(waiting))
        for one in [r for r in running if r.done == len(r.rollout.tokens)]:
            drafter.stop(one.id)
            budget.state.survival.observe(one.expected, one.done)
            running.remove(one)


def _verify(
    active: list[_Running],
    drafter: Drafter,
    budget: BudgetRule,
    longest: int,
    stats: LengthStats,
    report: Report,
    off_switch: bool,
    waiting: int,
) -> None:
    """One verify step of all running requests, while `waiting` others have no place."""
    ids = [r.id for r in active]
    generated = np.array([r.done for r in active])
    step = Step(
        generated=generated,
        room=longest - generated,
        remaining=stats.remaining([r.rollout.problem_id for r in active], generated),
        expected=np.array([r.expected for r in active]),
        waiting=waiting,
    )
    allowance = budget.allow(step)
    begin = time.perf_counter()
    drafts = drafter.propose(ids, allowance.limits, allowance.floors)
    report.draft_seconds += time.perf_counter() - begin
    sums = np.concatenate([[0.0], np.cumsum(drafts.probs, dtype=np.float64)])
    expected = sums[drafts.starts[1:]] - sums[drafts.starts[:-1]]
    proposals = drafts.lists()
    if (
        off_switch
        and drafts.tokens.size
        and budget.state.gain(allowance.weights, expected, drafts.tokens.size) < 1
    ):
        proposals = [[] for _ in active]
        report.skipped += 1
    emitted, accepted = [], 0
    for one, draft in zip(active, proposals):
        left = one.rollout.tokens[one.done :]
        hits = 0
        while hits < min(len(draft), len(left)) and draft[hits] == left[hits]:
            hits += 1
        for j in range(len(draft)):
            report.spec.drafted[j] += 1
            report.spec.accepted[j] += j < hits
        report.spec.steps += bool(draft)
        accepted += hits
        emitted.append(left[: hits + 1])
        one.done += len(emitted[-1])
    drafted = sum(map(len, proposals))
    batch, tokens = len(active), sum(map(len, emitted))
    seconds = budget.state.cost(batch + drafted, batch)
    budget.state.observe(drafted, accepted, batch, budget.state.cost(batch, batch) * tokens / batch, seconds)
    report.rounds += batch
    report.tokens += tokens
    report.seconds += seconds
    begin = time.perf_counter()
    drafter.advance(ids, emitted)
    report.draft_seconds += time.perf_counter() - begin


def _seconds_off(lengths: list[int], batch: int, cost: CostTable) -> float:
    """Time of the same schedule, one token a request and step."""
    waiting, running, seconds = lengths[::-1], [], 0.0
    while waiting or running:
        while waiting and len(running) < batch:
            running.append(waiting.pop())
        running = [n for n in running if n > 0]
        if not running:
            continue
        steps = min(running)  # nobody joins or leaves before
        seconds += steps * cost(len(running), len(running))
        running = [n - steps for n in running if n > steps]
    return seconds


HEADER = (
    f"{'budget':<12}{'batch':>6}{'accepted/round':>16}{'tau':>7}{'drafted/round':>15}{'acceptance':>12}"
    f"{'speed-up':>10}{'draft us/token':>16}{'off':>6}"
)


def row(rule: str, batch: int, report: Report) -> str:
    drafted = sum(report.spec.drafted)
    return (
        f"{rule:<12}{batch:>6}{report.accepted_per_round:>16.3f}{report.spec.tau:>7.2f}"
        f"{report.drafted_per_round:>15.2f}{sum(report.spec.accepted) / max(drafted, 1):>12.1%}"
        f"{report.speed_up:>9.2f}x{report.draft_seconds / max(report.tokens, 1) * 1e6:>16.1f}{report.skipped:>6}"
    )


def replay_command(argv: list[str]) -> None:
    """rollout.py replay FILE.jsonl ... [--budget price,das] [--batch 1,8,32]: prints the table.

    Raises:
        ConfigError: a file, drafter, budget or number that cannot be used.
    """
    parser = argparse.ArgumentParser(prog="rollout.py replay", allow_abbrev=False)
    parser.add_argument("files", nargs="+", type=Path, help="JSONL of `rollout.py generate` or of a run")
    parser.add_argument("--drafter", default="suffix", help="suffix")
    parser.add_argument("--budget", default="off,fixed,das,price", help="rules, comma-separated")
    parser.add_argument("--batch", default="1,8,32,128", help="requests at a time, comma-separated")
    parser.add_argument("--cost", type=Path, help="cost table (JSON); default: a 7B model on one H100")
    parser.add_argument("--max-draft", type=int, default=24)
    parser.add_argument("--fixed-tokens", type=int, default=4)
    parser.add_argument("--window", type=int, default=16, help="iterations a generation is kept for")
    parser.add_argument("--max-bytes", type=int, default=4 << 30)
    parser.add_argument(
        "--no-off-switch", action="store_true", help="verify drafts even at an estimated loss"
    )
    options = parser.parse_args(argv)
    if options.drafter not in DRAFTERS:
        near = difflib.get_close_matches(options.drafter, DRAFTERS, n=1)
        hint = f"did you mean {near[0]!r}" if near else f"one of: {', '.join(DRAFTERS)}"
        raise ConfigError(f"--drafter {options.drafter!r} cannot be replayed; {hint}")
    if options.max_draft < 1 or options.window < 1:
        raise ConfigError("--max-draft and --window must be at least 1")
    try:
        batches = [int(b) for b in options.batch.split(",")]
    except ValueError:
        batches = [0]
    if min(batches) < 1:
        raise ConfigError(f"--batch {options.batch}: positive numbers, comma-separated")
    cost = CostTable.load(options.cost) if options.cost else CostTable.linear(BASE_S, PER_TOKEN_S)
    rules = options.budget.split(",")
    for name in rules:
        rule_class(name, "--budget")  # unknown ones are refused before anything is read
    rollouts: list[Rollout] = []
    bad: list[str] = []
    for path in options.files:
        good, problems = read_rollouts(path)
        rollouts += good
        bad += problems
    for problem in bad[:20]:
        print(f"skipped {problem}", file=sys.stderr)
    if bad:
        print(f"skipped {len(bad)} bad lines of {len(bad) + len(rollouts)}", file=sys.stderr)
    if not any(r.tokens for r in rollouts):
        raise ConfigError("the rollouts have no tokens")

    from torchspec.speculation.suffix.drafter import SuffixDrafter

    print(HEADER)
    report = None
    for name in rules:
        settings = BudgetConfig(rule=name, fixed_tokens=options.fixed_tokens)
        for batch in batches:
            drafter = SuffixDrafter(
                window=options.window, max_bytes=options.max_bytes, max_draft=options.max_draft
            )
            budget = build_rule(settings, cost, options.max_draft)
            report = replay(rollouts, drafter, budget, batch, off_switch=not options.no_off_switch)
            print(row(name, batch, report), flush=True)
    assert report
    print(
        f"{len(rollouts)} rollouts, {sum(len(r.tokens) for r in rollouts)} tokens; ceiling of a draft that is a "
        f"sample of the policy: {np.mean(report.ceilings):.1%} of tokens | cost: {options.cost or 'built-in'}"
    )
