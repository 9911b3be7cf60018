"""Answers in texts, responses or references, and what the messages about many of them have in common."""

from __future__ import annotations

import re

from torchspec.errors import ConfigError


def compile_pattern(option: str, pattern: str) -> re.Pattern[str]:
    """Return `pattern`, the value of the key `option`, compiled; its dot matches line ends too.

    Raises:
        ConfigError: it is no regular expression, or has no group.
    """
    try:
        compiled = re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ConfigError(f"{option} is not a regular expression: {error}: {pattern}") from None
    if pattern and compiled.groups == 0:
        raise ConfigError(f"{option} needs a group (...) around the answer: {pattern}")
    return compiled


def last_match(pattern: re.Pattern[str], text: str) -> str | None:
    """Return what the first group matched last in `text`, stripped; None if that is nothing."""
    found = [match.group(1) for match in pattern.finditer(text)]
    return found[-1].strip() or None if found and found[-1] else None


NAMED = 4
"""Most lines, or problems, that a message names beside the first."""


def counted(errors: list[str], what: str) -> str:
    """Return the first error; where there are more, also their number and the places of the next ones."""
    first, *others = errors
    if not others:
        return first
    return f"{first}; {len(errors)} {what}, also {named([_place(error) for error in others])}"


def named(names: list[str]) -> str:
    """Return the first names as one text."""
    return ", ".join(names[:NAMED]) + (", ..." if len(names) > NAMED else "")


def _place(error: str) -> str:
    return re.split(r": (?!row |item )", error)[0]
