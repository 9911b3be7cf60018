"""Recorded rollouts: one JSON object a line, the fields of `records.Rollout`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torchspec.errors import ConfigError
from torchspec.records import Rollout, SpecStats


def write_rollouts(path: Path, rollouts: Iterable[Rollout]) -> None:
    """Write `rollouts` to `path`; the file appears when it is complete."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("w", encoding="utf-8") as out:
        for rollout in rollouts:
            out.write(json.dumps(dataclasses.asdict(rollout), ensure_ascii=False) + "\n")
    partial.replace(path)


def read_rollouts(path: Path) -> tuple[list[Rollout], list[str]]:
    """Return the rollouts that `write_rollouts` wrote, and a message with file and line for each bad line.

    A bad line is skipped: tell the user of the messages.

    Raises:
        ConfigError: the file cannot be read, or has no good line.
    """
    rollouts, problems = [], []
    try:
        with path.open(encoding="utf-8", errors="replace") as lines:
            for number, line in enumerate(lines, 1):
                try:
                    rollouts.append(_parse(json.loads(line)))
                except ValueError as error:  # a file of the user's: say which line, and use the others
                    problems.append(f"{path}:{number}: {error}")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    if not rollouts:
        first = f"; the first: {problems[0]}" if problems else ""
        raise ConfigError(f"{path}: no rollout in {len(problems)} lines{first}")
    return rollouts, problems


def _parse(row: Any) -> Rollout:
    if not isinstance(row, dict):
        raise ValueError("not a JSON object")
    names = {f.name for f in dataclasses.fields(Rollout)}
    needed = {
        f.name
        for f in dataclasses.fields(Rollout)
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    }
    if unknown := row.keys() - names:
        raise ValueError(f"unknown field {min(unknown)!r}")
    if missing := needed - row.keys():
        raise ValueError(f"field {min(missing)!r} is missing")
    for name in ("prompt_tokens", "tokens"):
        if not isinstance(row[name], list) or not all(type(t) is int and 0 <= t < 2**31 for t in row[name]):
            raise ValueError(f"{name} is not a list of token ids")
    logprobs = row["logprobs"]
    if not isinstance(logprobs, list) or not all(type(p) in (int, float) for p in logprobs):
        raise ValueError("logprobs is not a list of numbers")
    if len(logprobs) != len(row["tokens"]):
        raise ValueError(f"{len(logprobs)} logprobs for {len(row['tokens'])} tokens")
    if not isinstance(row["problem_id"], str):
        raise ValueError("problem_id is not a string")
    for name in ("sample", "policy_version", "draft_version"):
        if type(row[name]) is not int:
            raise ValueError(f"{name} is not an integer")
    if row["finish"] not in ("stop", "length"):
        raise ValueError("finish is neither 'stop' nor 'length'")
    spec = row.get("spec")
    try:
        fields: dict[str, Any] = {**row, "spec": SpecStats(**spec) if spec else None}
        return Rollout(**fields)
    except TypeError as error:
        raise ValueError(f"spec: {error}") from error
