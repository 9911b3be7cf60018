"""A cost table from a short run of the engine itself: attention, sampling and scheduling are in it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from torchspec.speculation.cost_table import CostTable

REPEATS = 5
MOST_TOKENS = 512
"""Beyond this, and beyond what requests can draft, the table goes on as a straight line."""


class Measured(Protocol):
    """What a run of forced drafts took, in seconds."""

    steps: list[tuple[int, float]]
    """(tokens verified, seconds)"""
    drafting: list[tuple[int, float]]
    """(tokens proposed by the draft model, seconds)"""


def measure(run: Callable[[list[int], int], Measured], max_requests: int, longest_draft: int) -> CostTable:
    """Time verify steps on a grid of tokens and requests.

    Args:
        run: `run(schedule, batch)` lets `batch` requests verify schedule[i] tokens in step i.
        max_requests: most requests at a time.
        longest_draft: most draft tokens of a request.

    Raises:
        RuntimeError: the engine ran none of the batches.
    """
    batches, rows, drafts, grid = [], [], [], set[int]()
    for batch in _doubling(1, max_requests, 4):
        sizes = _doubling(batch, max(batch + 1, min(batch * (1 + longest_draft), MOST_TOKENS)), 2)
        found = run(sizes * REPEATS, batch)
        points = _fastest(found.steps)
        if len(points) < 2:  # so many requests do not fit into the KV cache, or model.max_len is short
            continue
        batches.append(batch)
        rows.append(points)
        grid |= points.keys()
        if found.drafting:
            first, *more = sorted(_typical(found.drafting).items())
            each = (more[-1][1] - first[1]) / more[-1][0] if more else 0.0
            drafts.append([first[1], max(each, 0.0)])
    if not batches:
        raise RuntimeError("calibration: vLLM ran none of the batches; raise rollout.kv_cache_gb")
    tokens = sorted(grid)
    seconds = [_on_grid(points, tokens) for points in rows]
    return CostTable(
        tokens=tokens, batches=batches, seconds=seconds, draft=drafts if len(drafts) == len(batches) else []
    )


def _doubling(first: int, last: int, factor: int) -> list[int]:
    values = [first]
    while values[-1] * factor < last:
        values.append(values[-1] * factor)
    return values + [last] * (last > values[-1])


def _fastest(samples: Sequence[tuple[int, float]]) -> dict[int, float]:
    """Seconds by size: the least, because other load on the machine only ever adds time."""
    return {size: min(s for n, s in samples if n == size) for size in sorted({n for n, _ in samples})}


def _typical(samples: Sequence[tuple[int, float]]) -> dict[int, float]:
    """Median seconds by tokens proposed: the passes also read what was verified, which varies."""
    return {
        size: statistics.median(s for n, s in samples if n == size)
        for size in sorted({n for n, _ in samples})
    }


def _on_grid(points: dict[int, float], tokens: list[int]) -> list[float]:
    """Straight between the points and behind the last; never falling, however noisy the measurement."""
    known = np.array(list(points))
    times = np.maximum.accumulate(np.array(list(points.values())))
    slope = (times[-1] - times[0]) / (known[-1] - known[0])
    inside = np.interp(tokens, known, times)
    return (inside + slope * np.maximum(np.array(tokens) - known[-1], 0)).tolist()
