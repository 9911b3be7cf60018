"""Writes metrics.jsonl and TensorBoard events, and reads metrics.jsonl."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any


class MetricWriter:
    """Writes one row a step to `metrics.jsonl` and TensorBoard; rank 0 only.

    Args:
        folder: the run's.
        done: steps whose rows stay; what an earlier session wrote of later ones is dropped, as the run makes
            them again.
    """

    def __init__(self, folder: Path, done: int = 0) -> None:
        from torch.utils.tensorboard import SummaryWriter

        path = folder / "metrics.jsonl"
        if path.exists():
            kept = [line for line in path.read_text(encoding="utf-8").splitlines() if _step_of(line) <= done]
            partial = path.with_name(".metrics.partial")
            partial.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
            partial.rename(path)
        self._rows = path.open("a", encoding="utf-8")
        self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=done + 1 if done else None)

    def write(self, step: int, values: dict[str, float]) -> None:
        row: dict[str, Any] = {"step": step, "time": round(time.time(), 3), **values}
        self._rows.write(json.dumps(row) + "\n")
        self._rows.flush()
        for name, value in values.items():
            self._board.add_scalar(name, value, step)
        self._board.flush()

    def close(self) -> None:
        self._rows.close()
        self._board.close()


def _step_of(line: str) -> float:
    """The step of a row; infinity for a row that was not written to its end."""
    try:
        return json.loads(line)["step"]
    except ValueError:
        return float("inf")


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The rows of a run's metrics.jsonl, oldest first."""
    with (folder / "metrics.jsonl").open(encoding="utf-8") as rows:
        return [json.loads(row) for row in rows]
