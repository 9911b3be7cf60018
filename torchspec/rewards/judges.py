"""Judges: score an answer against its reference with math-verify or a scorer of reasoning-gym."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from typing import Any

from torchspec.data.sources import reasoning_gym_task


def math_judge() -> Callable[[str, str], float]:
    """Return the judge of two LaTeX texts: 1 where the answer equals the reference, else 0."""
    from math_verify import parse, verify

    def judge(reference: str, answer: str) -> float:
        gold, given = (parse(text, parsing_timeout=0) for text in (reference, answer))
        return float(verify(gold, given, timeout_seconds=0))

    return judge


def math_reader() -> Callable[[str], float]:
    """Return the judge of a reference alone: 1 where it equals itself, and is mathematics or plain words."""
    from math_verify import parse, verify

    def judge(reference: str) -> float:
        gold = parse(reference, parsing_timeout=0)
        words = re.sub(r"\\(?:text|mbox|mathrm|textbf)\{([^{}]*)\}|\$", r"\1", reference)
        read = any(not isinstance(part, str) for part in gold) or _WORDS.fullmatch(words)
        return float(bool(read) and verify(gold, gold, timeout_seconds=0))

    return judge


_WORDS = re.compile(r"(?=.*\w)[\w\s.,;:'()/-]+")
_WHOLE = (  # delimiters around a whole expression
    re.compile(r"\$\$(.*)\$\$", re.DOTALL),
    re.compile(r"\$([^$]*)\$"),
    re.compile(r"\\\[(.*)\\\]", re.DOTALL),
    re.compile(r"\\\((.*)\\\)", re.DOTALL),
)
_THOUSANDS = re.compile(r"(?<=\d)(?:,\\!|\\!,|\{,\}|\\[,;:! ]|~)(?=\d{3}(?!\d))")


def without_currency(text: str) -> str:
    r"""Return `text` without the signs `\$` and `{\$}` of an amount in dollars, which math-verify does not read."""
    return text.replace(r"{\$}", "").replace(r"\$", "")


def as_latex(expression: str) -> str:
    r"""Return a bare expression between dollar signs, as math-verify reads it.

    Remove the delimiters it has, the signs of dollars, and what separates thousands: `\[\$32,\!348\]` becomes
    `$32348$`. Text around formulas, `it is $5$ or so`, stays as it is.
    """
    text = without_currency(expression.strip())
    before = None
    while text != before:
        before = text
        for pattern in _WHOLE:
            if found := pattern.fullmatch(text):
                text = found.group(1).strip()
    text = _THOUSANDS.sub("", text)
    if text.count("$") == 1:  # no delimiter, but a sign of dollars
        text = text.replace("$", "")
    return text if "$" in text else f"${text}$"


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
