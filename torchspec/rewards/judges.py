"""Judges: score an answer against its reference with math-verify or a scorer of reasoning-gym."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from typing import Any

from torchspec.data.sources import reasoning_gym_task


def math_judge() -> Callable[[str, str], float]:
    from math_verify import parse, verify

    def judge(reference: str, answer: str) -> float:
        gold, given = (parse(text, parsing_timeout=0) for text in (reference, answer))
        return float(verify(gold, given, timeout_seconds=0))

    return judge


def reasoning_gym_judge(task: str, task_args: dict[str, Any]) -> Callable[[dict[str, Any], str], float]:
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
