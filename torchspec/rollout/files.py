"""Recorded rollouts: one JSON object a line, the fields of `records.Rollout`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path

from torchspec.records import Rollout


def write_rollouts(path: Path, rollouts: Iterable[Rollout]) -> None:
    """Write `rollouts` to `path`; the file appears when it is complete."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("w", encoding="utf-8") as out:
        for rollout in rollouts:
            out.write(json.dumps(dataclasses.asdict(rollout), ensure_ascii=False) + "\n")
    partial.replace(path)
