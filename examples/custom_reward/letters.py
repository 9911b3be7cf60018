"""A reward of the user's: the share of letters that are right, for words that are to be spelled backwards."""

import re

from torchspec.records import Problem

ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def right_letters(problem: Problem, response: str) -> float:
    """Return the share of places, of the longer of answer and reference, where both have the same letter."""
    found = ANSWER.search(response)
    reference = problem.answer or ""
    if found is None or not reference:
        return 0.0
    answer = found.group(1).strip()
    right = sum(a == b for a, b in zip(answer, reference, strict=False))
    return right / max(len(answer), len(reference))
