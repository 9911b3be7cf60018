"""Rewards of responses.

A response is untrusted text. It is never executed here, and whatever parses it (math-verify, the scorers of
reasoning-gym) does so in a worker process under a timeout: `9**9**9**9` must not stop the training.
"""

from __future__ import annotations

import importlib
import logging
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from numbers import Real
from typing import Any

from torchspec.config.schema import Data, Reward
from torchspec.errors import ConfigError
from torchspec.records import Problem, Rollout
from torchspec.rewards.worker import Worker

log = logging.getLogger(__name__)

NEED_ANSWER = ("exact", "math_verify")


def build_scorer(reward: Reward, data: Data) -> Scorer:
    """The scorer of `reward`'s functions, for problems loaded from `data`.

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
    try:
        pattern = re.compile(reward.answer_pattern, re.DOTALL)
    except re.error as error:
        raise ConfigError(
            f"reward.answer_pattern is not a regular expression: {error}: {reward.answer_pattern}"
        ) from None
    if reward.answer_pattern and pattern.groups == 0:
        raise ConfigError(
            f"reward.answer_pattern needs a group (...) around the answer: {reward.answer_pattern}"
        )
    if "format" in reward.functions and not reward.answer_pattern:
        raise ConfigError('reward.functions: format looks for reward.answer_pattern, which is ""; set it')
    return Scorer(reward, data, pattern)


class Scorer:
    """Scores responses with a weighted sum of functions; make it with `build_scorer`, `close` it at the end.

    - exact: 1 where the answer equals the reference, both stripped.
    - format: 1 where the pattern occurs once and only white space follows it.
    - math_verify: 1 where the answer equals the reference mathematically.
    - reasoning_gym: the task's own score of the answer, partial credit included (countdown: 0.01 for a wrong
      answer).
    - a dotted path `pkg.mod:fn`: `fn(problem: Problem, response: str) -> float`, called in this process.

    The answer is what the pattern's first group matched last, stripped. A response without an answer, or cut
    by a length limit, scores 0 in all but the user's functions. A response whose worker hangs, dies or
    raises scores 0 there and is counted in `failures`.
    """

    def __init__(self, reward: Reward, data: Data, pattern: re.Pattern[str]) -> None:
        self.pattern = pattern
        self.failures: Counter[str] = Counter()
        """How often the worker failed, by kind: "timeout", "crash", "error"."""
        judges = [name for name in reward.functions if name in ("math_verify", "reasoning_gym")]
        self._worker = Worker(judges, data.task, data.task_args, reward.timeout_s)
        self._built_in: dict[str, Callable[[Problem, str], float]] = {
            "exact": self._exact,
            "format": self._format,
            "math_verify": self._math_verify,
            "reasoning_gym": self._reasoning_gym,
        }
        weights = reward.weights or [1.0] * len(reward.functions)
        self._functions = [
            (name, weight, self._built_in.get(name) or _user_function(name, self._built_in))
            for name, weight in zip(reward.functions, weights, strict=True)
        ]

    def check_answers(self, problems: Iterable[Problem]) -> None:
        """Refuse problems without the reference answer a function needs; call it before the run.

        Raises:
            ConfigError: the first such problem.
        """
        needing = [name for name, _, _ in self._functions if name in NEED_ANSWER]
        for problem in problems:
            if needing and not (problem.answer or "").strip():
                raise ConfigError(
                    f"problem {problem.id}: no answer, which reward function {needing[0]} needs; set "
                    f"data.answer_key to the field that holds it; "
                    f"other fields here: {', '.join(problem.meta) or 'none'}"
                )

    def score(
        self, problem: Problem, response: str, truncated: bool = False
    ) -> tuple[float, dict[str, float]]:
        """The reward of `response`, and each function's score before its weight.

        Raises:
            ConfigError: a user's function returned something other than a finite number.
        """
        parts = {}
        for name, _, function in self._functions:
            parts[name] = 0.0 if truncated and name in self._built_in else function(problem, response)
        return math.fsum(weight * parts[name] for name, weight, _ in self._functions), parts

    def score_all(self, problems: Mapping[str, Problem], rollouts: Iterable[Rollout]) -> None:
        """Fill `reward` and `reward_parts` of `rollouts`; `problems` maps problem ids to problems."""
        for r in rollouts:
            r.reward, r.reward_parts = self.score(problems[r.problem_id], r.text, r.finish == "length")

    def close(self) -> None:
        """End the worker process; a later score starts a new one."""
        self._worker.close()

    def answer(self, response: str) -> str | None:
        """The answer in `response`; None where the pattern finds none."""
        if not self.pattern.pattern:
            return response.strip()
        found = [match.group(1) for match in self.pattern.finditer(response)]
        return found[-1].strip() if found and found[-1] else None

    def _exact(self, problem: Problem, response: str) -> float:
        return float(self.answer(response) == _reference(problem).strip())

    def _format(self, problem: Problem, response: str) -> float:
        found = list(self.pattern.finditer(response))
        return float(len(found) == 1 and not response[found[0].end() :].strip())

    def _math_verify(self, problem: Problem, response: str) -> float:
        answer = self.answer(response)
        if not answer:
            return 0.0
        if self.pattern.pattern:  # a bare expression; math-verify would read `2*x` as 2
            answer = _as_latex(answer)
        return self._judge(problem, "math_verify", _as_latex(_reference(problem)), answer)

    def _reasoning_gym(self, problem: Problem, response: str) -> float:
        answer = self.answer(response)
        return self._judge(problem, "reasoning_gym", problem.meta["entry"], answer) if answer else 0.0

    def _judge(self, problem: Problem, function: str, *request: Any) -> float:
        score, failure = self._worker.ask(function, *request)
        if failure is None:
            return score
        kind, detail = failure
        self.failures[kind] += 1
        log.info("problem %s: %s %s, scored 0: %s", problem.id, function, kind, detail)
        return 0.0


def _user_function(path: str, built_in: Iterable[str]) -> Callable[[Problem, str], float]:
    module_name, _, name = path.replace(":", ".").rpartition(".")
    if not module_name:
        raise ConfigError(
            f'reward.functions: "{path}" is not one of {", ".join(built_in)}, nor the dotted path of a '
            f"function (pkg.mod:fn)"
        )
    try:
        function = getattr(importlib.import_module(module_name), name, None)
    except ImportError as error:
        raise ConfigError(
            f'reward.functions: cannot import "{path}": {error}; its folder must be on PYTHONPATH'
        ) from error
    if not callable(function):
        raise ConfigError(f'reward.functions: "{path}": {module_name} has no function {name}')

    def checked(problem: Problem, response: str) -> float:
        score = function(problem, response)
        if not isinstance(score, Real) or not math.isfinite(score):
            raise ConfigError(
                f"reward.functions: {path} returned {score!r} for problem {problem.id}; it must return a finite "
                f"number for every response"
            )
        return float(score)

    return checked


def _reference(problem: Problem) -> str:
    if problem.answer is None:
        raise ValueError(f"problem {problem.id} has no answer; call check_answers first")
    return problem.answer


def _as_latex(expression: str) -> str:
    return expression if "$" in expression else f"${expression}$"
