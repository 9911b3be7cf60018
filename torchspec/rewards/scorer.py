"""Rewards of responses, and the advantages of a group.

A response is untrusted text. It is never executed here, and whatever parses it (math-verify, the scorers of
reasoning-gym) does so in a worker process under a timeout: `9**9**9**9` must not stop the training.
"""

from __future__ import annotations

import ast
import importlib
import logging
import math
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from numbers import Real
from typing import Any

from torchspec.config.schema import RL, Data, Reward
from torchspec.data.problems import reasoning_gym_task
from torchspec.errors import ConfigError
from torchspec.records import Problem, Rollout

log = logging.getLogger(__name__)

NEED_ANSWER = ("exact", "math_verify")
WORKER_START_S = 120.0
"""Importing sympy and reasoning-gym takes seconds; more on a busy machine."""


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


# The worker process


class Worker:
    """A process of its own, started at the first question and replaced when it hangs or dies.

    A plain subprocess: `multiprocessing` would fork the trainer's state, or import its main module again.
    """

    def __init__(self, functions: list[str], task: str, task_args: dict[str, Any], timeout_s: float) -> None:
        self._setup = (functions, task, task_args, timeout_s)
        self._timeout_s = timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection

    def ask(self, *question: Any) -> tuple[float, tuple[str, str] | None]:
        """(score, None), or (0, (kind, detail)) where `question` made the worker fail."""
        if self._process is None or self._process.poll() is not None:
            self._start()
        try:
            self._pipe.send(question)
            if self._pipe.poll(self._timeout_s):
                return self._pipe.recv()
            failure = ("timeout", f"more than {self._timeout_s:g} s")
        except (EOFError, ConnectionError):
            failure = ("crash", "the worker died")
        self.close()
        return 0.0, failure

    def close(self) -> None:
        """End the process, and wait for it."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
            self._pipe.close()

    def _start(self) -> None:
        self._pipe, far_end = Pipe()
        fd = far_end.fileno()
        self._process = subprocess.Popen(
            [sys.executable, "-c", f"from torchspec.rewards.scorer import serve; serve({fd})"],
            stdin=subprocess.DEVNULL,
            pass_fds=[fd],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        )
        far_end.close()
        self._pipe.send(self._setup)
        try:
            ready = self._pipe.poll(WORKER_START_S) and self._pipe.recv()
        except (EOFError, ConnectionError):
            ready = False
        if not ready:
            self.close()
            raise RuntimeError("the reward worker did not start; its error is above")


def serve(fd: int) -> None:
    """The worker's loop: answer questions from the connection `fd` until the other end closes it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the trainer's; it closes the pipe
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own timeouts are off
    pipe = Connection(fd)
    names, task, task_args, timeout_s = pipe.recv()
    functions: dict[str, Callable[..., float]] = {}
    if "math_verify" in names:
        functions["math_verify"] = _math_judge()
    if "reasoning_gym" in names:
        functions["reasoning_gym"] = _reasoning_gym_judge(task, task_args)
    pipe.send(True)
    while True:
        try:
            name, *arguments = pipe.recv()
        except EOFError:
            return
        signal.alarm(math.ceil(timeout_s) + 1)  # ends this process if the trainer that should do so is gone
        try:
            reply = (functions[name](*arguments), None)
        except Exception as error:  # scorers raise whatever they like on text they did not expect
            reply = (0.0, ("error", repr(error)))
        signal.alarm(0)
        pipe.send(reply)


def _math_judge() -> Callable[[str, str], float]:
    from math_verify import parse, verify

    def judge(reference: str, answer: str) -> float:
        gold, given = (parse(text, parsing_timeout=0) for text in (reference, answer))
        return float(verify(gold, given, timeout_seconds=0))

    return judge


def _reasoning_gym_judge(task: str, task_args: dict[str, Any]) -> Callable[[dict[str, Any], str], float]:
    scorer = reasoning_gym_task(task, task_args, size=1)

    def judge(entry: dict[str, Any], answer: str) -> float:
        if answer != entry["answer"] and not harmless(task, answer):
            return 0.0
        return float(scorer.score_answer(answer, entry))

    return judge


# Scorers of reasoning-gym 0.1.25 that hand the response to `eval`, and to sympy's `parse_expr`, which does.
EVAL_TASKS = frozenset({"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"})
SYMPY_TASKS = frozenset(
    {
        "countdown",
        "intermediate_integration",
        "polynomial_multiplication",
        "puzzle24",
        "simple_integration",
    }
)
_FORMULA = re.compile(r"[A-Za-z0-9\s.+\-*/^()]*")
_FORMULA_NAMES = {"sin", "cos", "tan", "exp", "log", "ln", "sqrt", "asin", "acos", "atan", "pi"}


def harmless(task: str, answer: str) -> bool:
    """Whether the scorer of `task` can be given `answer` without executing it.

    For `eval`: a literal, or text that is no Python expression, which `eval` refuses. For sympy: digits,
    operators, one-letter names and elementary functions.
    """
    if task in EVAL_TASKS:
        try:
            ast.parse(answer.strip(), mode="eval")
        except (SyntaxError, ValueError):
            return True
        try:
            ast.literal_eval(answer.strip())
        except (ValueError, TypeError, SyntaxError):
            return False
    if task in SYMPY_TASKS:
        names = re.findall(r"[A-Za-z]\w*", answer)
        return _FORMULA.fullmatch(answer) is not None and all(
            len(name) == 1 or name in _FORMULA_NAMES for name in names
        )
    return True


# Advantages


def group_advantages(rollouts: Sequence[Rollout], rl: RL) -> None:
    """Fill `advantage` of scored `rollouts` from their groups, after the rule for cut responses.

    GRPO (arXiv 2402.03300, section 4.1): (r - mean) / (std + 1e-6) over the group, std of the population;
    without rl.normalise_std r - mean (Dr. GRPO, arXiv 2503.20783). Groups of one, and of equal rewards, get
    exactly 0. What rl.overlong does with a response whose `finish` is "length": "mask" takes it out of its
    group's statistics and of the policy loss; "penalise" subtracts rl.overlong_penalty from its reward (at
    every call); "keep" treats it as any other.
    """
    groups: dict[str, list[tuple[Rollout, float]]] = {}
    for r in rollouts:
        if r.reward is None:
            raise ValueError(f"rollout {r.sample} of {r.problem_id} has no reward")
        if r.finish == "length" and rl.overlong == "mask":
            r.train, r.advantage = False, 0.0
            continue
        if rl.overlong == "penalise":
            penalty = rl.overlong_penalty if r.finish == "length" else 0.0
            r.reward -= penalty
            r.reward_parts["overlong"] = 0.0 - penalty
        groups.setdefault(r.problem_id, []).append((r, r.reward))
    for group in groups.values():
        rewards = [reward for _, reward in group]
        mean = math.fsum(rewards) / len(rewards)
        std = math.sqrt(math.fsum((x - mean) ** 2 for x in rewards) / len(rewards))
        scale = 1.0 / (std + 1e-6) if rl.normalise_std else 1.0
        equal = min(rewards) == max(rewards)  # their mean may be off by a rounding error
        for r, reward in group:
            r.advantage = 0.0 if equal else (reward - mean) * scale
