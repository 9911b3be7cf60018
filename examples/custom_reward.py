r"""A reward function of your own: closeness to a number, and a small bonus for a short response.

PYTHONPATH=examples python train.py CONFIG.toml \
    --reward.functions '["custom_reward:closeness", "custom_reward:brevity"]'
"""

from __future__ import annotations

import re

from torchspec.records import Problem


def closeness(problem: Problem, response: str) -> float:
    """Return 1 for the reference itself, less the farther away the response's last number is; 0 without one."""
    numbers = re.findall(r"-?\d+(?:\.\d+)?", response)
    if not numbers or problem.answer is None:
        return 0.0
    return 1.0 / (1.0 + abs(float(numbers[-1]) - float(problem.answer)))


def brevity(problem: Problem, response: str) -> float:
    """Return up to 0.1. `problem.meta` holds the other fields of the row, here an optional length limit."""
    limit = problem.meta.get("limit", 400)
    return 0.1 * max(0.0, 1.0 - len(response) / limit)
