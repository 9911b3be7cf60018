"""Rewards of responses.

A response is untrusted text, and a user's function is foreign code. What parses a response (math-verify, the
scorers of reasoning-gym) and what a user has written run in worker processes under a time-out: neither
`9**9**9**9` nor an endless loop may stop the training.
"""

from __future__ import annotations

import logging
import math
import re
import reprlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torchspec.config.schema import Data, Reward
from torchspec.data.answers import compile_pattern, last_match, named
from torchspec.errors import ConfigError, RewardFailed
from torchspec.records import Problem, Rollout
from torchspec.rewards.judges import as_latex, without_currency
from torchspec.rewards.worker import Worker

log = logging.getLogger(__name__)

BUILT_IN = ("exact", "format", "math_verify", "reasoning_gym")
NEED_ANSWER = ("exact", "math_verify")


def build_scorer(reward: Reward, data: Data) -> Scorer:
    """Return the scorer of `reward`'s functions, for problems loaded from `data`.

    Users' functions are imported here, in their worker.

    Raises:
        ConfigError: unknown or unusable function, weights that do not match, or a bad answer_pattern.
    """
    if not reward.functions or len(set(reward.functions)) < len(reward.functions):
        raise ConfigError(f"reward.functions = {reward.functions} must name at least one function, each once")
    if reward.weights and len(reward.weights) != len(reward.functions):
        raise ConfigError(
            f"reward.weights has {len(reward.weights)} numbers for {len(reward.functions)} reward.functions; "
            f"give one each, or [] for all 1"
        )
    if "reasoning_gym" in reward.functions and data.source != "reasoning_gym":
        raise ConfigError(
            f'reward.functions: reasoning_gym scores only its own problems, but data.source = "{data.source}"'
            f"; use exact, math_verify or your own function"
        )
    pattern = compile_pattern("reward.answer_pattern", reward.answer_pattern)
    if "format" in reward.functions and not reward.answer_pattern:
        raise ConfigError('reward.functions: format looks for reward.answer_pattern, which is ""; set it')
    for name in reward.functions:
        if name not in BUILT_IN and not re.search(r".[.:].", name):
            raise ConfigError(
                f'reward.functions: "{name}" is not one of {", ".join(BUILT_IN)}, nor the dotted path of a '
                f"function (pkg.mod:fn)"
            )
    return Scorer(reward, data, pattern)


class Scorer:
    """Score responses with a weighted sum of functions. Make it with `build_scorer`; `close` it at the end.

    - exact: 1 where the answer equals the reference, both stripped.
    - format: 1 where the pattern occurs once and only white space follows it.
    - math_verify: 1 where the answer equals the reference mathematically.
    - reasoning_gym: the task's own score of the answer, partial credit included (countdown: 0.01 for a wrong
      answer).
    - a dotted path `pkg.mod:fn`: `fn(problem: Problem, response: str) -> float`. The users' functions share one
      worker: what a module keeps between two calls is lost when one of them hangs or ends the process.

    The answer is what the pattern's first group matched last, stripped. A response without an answer, or cut
    by a length limit, scores 0 in all but the user's functions.

    A response whose judge hangs, dies or raises scores 0. A user's function that does so, or that returns no
    finite number, raises `RewardFailed`, but for the first `reward.max_failures` of a step on this rank: they
    score `reward.failure_score`. All are counted in `failures`.
    """

    def __init__(self, reward: Reward, data: Data, pattern: re.Pattern[str]) -> None:
        self.pattern = pattern
        self.failures: Counter[str] = Counter()
        """How often the workers failed, by kind: "timeout", "crash", "error", "value" (no finite number)."""
        judges = [name for name in reward.functions if name in ("math_verify", "reasoning_gym")]
        judges += ["math_reads"] if "math_verify" in judges else []
        self._read: dict[str, bool] = {}
        """Whether math-verify can read a reference."""
        self._skips_unreadable = data.unreadable == "skip"
        self._worker = Worker(judges, data.task, data.task_args, reward.timeout_s)
        users = [name for name in reward.functions if name not in BUILT_IN]
        self._users_worker = Worker(users, data.task, data.task_args, reward.timeout_s)
        if users:
            self._users_worker.start()
        self._failure_score, self._max_failures = reward.failure_score, reward.max_failures
        self._users_failures = 0
        """Failures of users' functions since `score_all` began."""
        self._built_in: dict[str, Callable[[Problem, str], float]] = {
            "exact": self._exact,
            "format": self._format,
            "math_verify": self._math_verify,
            "reasoning_gym": self._reasoning_gym,
        }
        weights = reward.weights or [1.0] * len(reward.functions)
        self._functions = list(zip(reward.functions, weights, strict=True))

    def check_answers(self, problems: Iterable[Problem]) -> list[Problem]:
        """Return the problems whose reference answers the functions can read; call it before the run.

        math_verify compares each reference with itself.

        Raises:
            ConfigError: problems without an answer that a function needs, or whose answer it cannot read, counted;
                or with data.unreadable = "skip" that none is left.
        """
        problems = list(problems)
        wrong = {p.id: reason for p in problems if (reason := self._unreadable(p))}
        if not wrong:
            return problems
        kept = [p for p in problems if p.id not in wrong]
        count = f"{len(wrong)} of {len(problems)} problems have no answer that can be read"
        text = f"problem {next(iter(wrong))}: {next(iter(wrong.values()))}"
        if len(wrong) > 1:
            text += f"; {count}, also {named(list(wrong)[1:])}"
        if self._skips_unreadable and kept:
            log.warning("%s; left out (data.unreadable)", text)
            return kept
        way_out = "that leaves none" if not kept else 'data.unreadable = "skip" leaves such problems out'
        raise ConfigError(f"{text}; {way_out}")

    def _unreadable(self, problem: Problem) -> str:
        """Return why a function cannot use the reference of `problem`; "" if all can."""
        needing = [name for name, _ in self._functions if name in NEED_ANSWER]
        answer = (problem.answer or "").strip()
        if needing and not answer:
            return (
                f"no answer, which reward function {needing[0]} needs; set data.answer_key to the field that "
                f"holds it; other fields here: {', '.join(problem.meta) or 'none'}"
            )
        if "exact" in needing and re.search(r"^#### ", answer, re.MULTILINE):
            return "its answer is a worked solution, which no answer equals; set data.answer_pattern = '####\\s*(.+)'"
        if "math_verify" not in needing or re.fullmatch(r"-?\d+", answer):
            return ""
        if answer not in self._read:
            self._read[answer] = self._worker.ask("math_reads", as_latex(answer))[0] == 1.0
        return "" if self._read[answer] else f"math_verify cannot read its answer {reprlib.repr(answer)}"

    def score(
        self, problem: Problem, response: str, truncated: bool = False, sample: int | None = None
    ) -> tuple[float, dict[str, float]]:
        """Return the reward of `response`, and each function's score before its weight.

        Args:
            truncated: the response was cut by a length limit.
            sample: its number in its group, for messages.

        Raises:
            RewardFailed: a user's function failed, and reward.max_failures are used up.
        """
        parts = {}
        for name, _ in self._functions:
            if judge := self._built_in.get(name):
                parts[name] = 0.0 if truncated else judge(problem, response)
            else:
                parts[name] = self._user(name, problem, response, sample)
        return math.fsum(weight * parts[name] for name, weight in self._functions), parts

    def score_all(self, problems: Mapping[str, Problem], rollouts: Iterable[Rollout]) -> None:
        """Fill `reward` and `reward_parts` of a step's `rollouts`; `problems` maps problem ids to problems.

        Raises:
            RewardFailed: users' functions failed for more than reward.max_failures of them.
        """
        self._users_failures = 0
        for r in rollouts:
            cut = r.finish == "length"
            r.reward, r.reward_parts = self.score(problems[r.problem_id], r.text, cut, r.sample)

    def close(self) -> None:
        """End the worker processes; a later score starts new ones."""
        self._worker.close()
        self._users_worker.close()

    def answer(self, response: str) -> str | None:
        """Return the answer in `response`; None where the pattern finds none."""
        if not self.pattern.pattern:
            return response.strip()
        return last_match(self.pattern, response)

    def _exact(self, problem: Problem, response: str) -> float:
        return float(self.answer(response) == _reference(problem).strip())

    def _format(self, problem: Problem, response: str) -> float:
        found = list(self.pattern.finditer(response))
        return float(len(found) == 1 and not response[found[0].end() :].strip())

    def _math_verify(self, problem: Problem, response: str) -> float:
        answer = self.answer(response)
        if not answer:
            return 0.0
        # With a pattern it is a bare expression; math-verify would read `2*x` as 2.
        answer = as_latex(answer) if self.pattern.pattern else without_currency(answer)
        return self._judge(problem, "math_verify", as_latex(_reference(problem)), answer)

    def _reasoning_gym(self, problem: Problem, response: str) -> float:
        answer = self.answer(response)
        return self._judge(problem, "reasoning_gym", problem.meta["entry"], answer) if answer else 0.0

    def _user(self, name: str, problem: Problem, response: str, sample: int | None) -> float:
        try:
            score, failure = self._users_worker.ask(name, problem, response)
        except ConfigError as error:  # a new worker could not import what the first one could
            score, failure = 0.0, ("crash", str(error))
        if failure is None:
            return score
        kind, detail = failure
        self.failures[kind] += 1
        self._users_failures += 1
        place = f"problem {problem.id}" + ("" if sample is None else f", sample {sample}")
        if kind == "value":
            text = f"{name} {detail} for {place}; it must return a finite number for every response"
        else:
            text = f"{name} failed for {place}: {kind}: {detail}"
        if self._users_failures > self._max_failures:
            many = f" (failure {self._users_failures} of this step)" if self._max_failures else ""
            raise RewardFailed(
                f"reward.functions: {text}{many}; allowed: reward.max_failures = {self._max_failures}"
            )
        log.warning("%s; it scores reward.failure_score = %g", text, self._failure_score)
        return self._failure_score

    def _judge(self, problem: Problem, function: str, *request: Any) -> float:
        score, failure = self._worker.ask(function, *request)
        if failure is None:
            return score
        kind, detail = failure
        self.failures[kind] += 1
        log.info("problem %s: %s %s, scored 0: %s", problem.id, function, kind, detail)
        return 0.0


def _reference(problem: Problem) -> str:
    if problem.answer is None:
        raise ValueError(f"problem {problem.id} has no answer; call check_answers first")
    return problem.answer
