"""Who owns which tokens of a pack, and which query rows meet which keys: integers on the host.

A pack is split over the C ranks of a context-parallel group into runs of consecutive positions. A rank
keeps its rows in pack order, so inside a document its local order is the order of positions and a plain
causal kernel is right on its own shard.

Every document is cut into 2C chunks, and rank r holds chunks r and 2C-1-r of each (zigzag): equal causal work
per rank, per document and per ring step. Chunks may be uneven or empty. The rows left over by the division go to
the ranks with the fewest rows so far, so ranks differ by at most one row.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np

_UNBOUNDED = 1 << 62

Range = tuple[int, int]


class Task(NamedTuple):
    """Query rows [q0, q1) against keys [k0, k1), both indices into local buffers, aligned bottom-right.

    With m = k1 - k0 keys and n = q1 - q0 rows, row i sees key j iff j <= i + m - n where `causal`, and
    j >= i + m - n - left where `left` is given. Every row sees at least one key. The last key of a causal
    task's row is the row's own: over all of a query's tasks there is exactly one causal one, unless the
    query is a block or sees no trunk at all. Causal tasks come first.
    """

    q0: int
    q1: int
    k0: int
    k1: int
    causal: bool
    left: int | None = None


class Run(NamedTuple):
    """Local rows from `row` on hold the consecutive positions [start, stop) of one document."""

    document: int
    row: int
    start: int
    stop: int


class _Query(NamedTuple):
    """Query rows from `row` on stand at positions [start, stop) and see keys before `limit`."""

    document: int
    row: int
    start: int
    stop: int
    limit: int


@dataclass(frozen=True, eq=False)
class Plan:
    """One rank's view of a pack. Made by `build_plan`, which caches; two calls give the same object.

    Attributes:
        cu_seqlens: ends of the documents, from 0 to L.
        size, rank: of the context-parallel group.
        window: a query sees at most this many positions back, itself included; None: all.
        runs: for every rank its runs, in pack order.
    """

    cu_seqlens: tuple[int, ...]
    size: int
    rank: int
    window: int | None
    runs: tuple[tuple[Run, ...], ...]

    @property
    def tokens(self) -> int:
        """L, the length of the pack."""
        return self.cu_seqlens[-1]

    @cached_property
    def rows(self) -> tuple[int, ...]:
        """Rows per rank; they sum to L."""
        return tuple(runs[-1].row + runs[-1].stop - runs[-1].start if runs else 0 for runs in self.runs)

    @cached_property
    def index(self) -> np.ndarray:
        """int64 [T]: the pack position of every local row."""
        return self._index(self.rank)

    @cached_property
    def places(self) -> tuple[np.ndarray, np.ndarray]:
        """int64 [L] each: the owner of every pack position, and its row there."""
        owner, row = np.empty(self.tokens, np.int64), np.empty(self.tokens, np.int64)
        for rank in range(self.size):
            index = self._index(rank)
            owner[index], row[index] = rank, np.arange(len(index))
        return owner, row

    def halo(self, passes: int) -> np.ndarray:
        """int64: the positions within `passes` after a local row, in its document, that other ranks own."""
        if passes < 1:
            raise ValueError(f"passes is {passes}; it must be at least 1")
        found = []
        mine = self.runs[self.rank]
        for i, run in enumerate(mine):
            end = self.cu_seqlens[run.document + 1]
            if i + 1 < len(mine) and mine[i + 1].document == run.document:
                end = mine[i + 1].start  # what lies beyond is the next run's halo
            found.append(np.arange(run.stop, min(run.stop + passes, end)))
        return np.concatenate([np.empty(0, np.int64), *found])

    def shift(self, distance: int, passes: int) -> np.ndarray:
        """int64 [T]: for every local row, where the row `distance` later in its document is.

        An index into the local rows followed by those of `halo(passes)`; -1 past the document's end.
        """
        if not 0 <= distance <= passes:
            raise ValueError(f"distance is {distance}; it must be from 0 to passes = {passes}")
        available = np.concatenate([self.index, self.halo(passes)])
        order = np.argsort(available)
        ends = np.array(self.cu_seqlens, np.int64)
        end = ends[np.searchsorted(ends, self.index, side="right")] if len(self.index) else self.index
        target = self.index + distance
        inside = target < end
        where = np.searchsorted(available, target, sorter=order)
        return np.where(inside, order[np.where(inside, where, 0)] if len(order) else where, -1)

    def tasks(
        self, source: int | None, entries: int = 0, rows: tuple[Range, ...] | None = None
    ) -> tuple[Task, ...]:
        """What this rank's rows do with the trunk keys of rank `source`, or with the whole trunk (None).

        Args:
            source: the keys are that rank's shard; None: the trunk of all ranks, in pack order.
            entries: branch entries in this pass. A row then stands that much later than its anchor, so a
                window reaches that much less of the trunk.
            rows: ascending ranges of local rows, the only queries, packed one after another; None: all.
        """
        return _row_tasks(self, source, entries, rows)

    def block_tasks(self, source: int | None, anchors: tuple[int, ...], slots: int) -> tuple[Task, ...]:
        """What this rank's blocks do with the trunk keys of `source`: slots see all before their anchor.

        Args:
            anchors: ascending pack positions of all ranks' anchors; a rank has the blocks whose anchor row
                it owns, `slots` query rows each, in this order. Slot j stands at anchor + j.
        """
        return _block_tasks(self, source, anchors, slots)

    def own_anchors(self, anchors: Sequence[int]) -> list[int]:
        """Those of the pack positions `anchors` whose row this rank owns."""
        wrong = [p for p in anchors if not 0 <= p < self.tokens]
        if wrong:
            raise ValueError(f"anchors has {wrong[0]}; positions of this pack are 0 to {self.tokens - 1}")
        return [p for p in anchors if self.places[0][p] == self.rank]

    def visible(self, anchor: int) -> int:
        """How many trunk keys lie before `anchor` in its document."""
        return anchor - self.cu_seqlens[bisect_right(self.cu_seqlens, anchor) - 1]

    def _index(self, rank: int) -> np.ndarray:
        parts = [np.arange(run.start, run.stop) for run in self.runs[rank]]
        return np.concatenate([np.empty(0, np.int64), *parts])

    def _keys(self, source: int | None) -> tuple[Run, ...]:
        if source is not None:
            return self.runs[source]
        return tuple(Run(i, a, a, b) for i, (a, b) in enumerate(pairwise(self.cu_seqlens)) if b > a)


@lru_cache(maxsize=64)
def build_plan(cu_seqlens: tuple[int, ...], size: int, rank: int, window: int | None = None) -> Plan:
    """Return the plan of one rank for one pack.

    Args:
        cu_seqlens: [documents + 1], from 0 to L, never falling.

    Raises:
        ValueError: an argument outside what is allowed, which the message says.
    """
    if not cu_seqlens or cu_seqlens[0] != 0 or any(a > b for a, b in pairwise(cu_seqlens)):
        raise ValueError(f"cu_seqlens is {list(cu_seqlens)}; it must start at 0 and never fall")
    if size < 1 or not 0 <= rank < size:
        raise ValueError(
            f"rank is {rank} of size {size}; size must be at least 1, and rank from 0 to size - 1"
        )
    if window is not None and window < 1:
        raise ValueError(f"window is {window}; it must be at least 1, or None for no window")
    runs: list[list[Run]] = [[] for _ in range(size)]
    for owner, document, start, stop in _zigzag(cu_seqlens, size):
        mine = runs[owner]
        last = mine[-1] if mine else Run(-1, 0, 0, 0)
        if last.document == document and last.stop == start:
            mine[-1] = last._replace(stop=stop)
        else:
            mine.append(Run(document, last.row + last.stop - last.start, start, stop))
    return Plan(cu_seqlens, size, rank, window, tuple(map(tuple, runs)))


def _zigzag(cu_seqlens: tuple[int, ...], size: int) -> Iterator[tuple[int, int, int, int]]:
    """(owner, document, start, stop) in pack order."""
    totals = [0] * size
    for document, (start, end) in enumerate(pairwise(cu_seqlens)):
        base, left_over = divmod(end - start, 2 * size)
        lengths = [base] * (2 * size)
        neediest = sorted(range(size), key=totals.__getitem__)
        for i in range(left_over):
            rank = neediest[i % size]
            lengths[rank if i < size else 2 * size - 1 - rank] += 1
        for chunk, length in enumerate(lengths):
            owner = min(chunk, 2 * size - 1 - chunk)
            totals[owner] += length
            if length:
                yield owner, document, start, start + length
            start += length


@lru_cache(maxsize=1024)
def _row_tasks(
    plan: Plan, source: int | None, entries: int, rows: tuple[Range, ...] | None
) -> tuple[Task, ...]:
    window = _UNBOUNDED if plan.window is None else plan.window - entries
    if window < 1:
        return ()
    mine = plan.runs[plan.rank]
    if rows is None:
        queries = [_Query(run.document, run.row, run.start, run.stop, run.stop) for run in mine]
    else:
        _check_rows(rows, plan.rows[plan.rank])
        queries = list(_selected(mine, rows))
    return _merge(_relate(queries, plan._keys(source), window))


@lru_cache(maxsize=256)
def _block_tasks(plan: Plan, source: int | None, anchors: tuple[int, ...], slots: int) -> tuple[Task, ...]:
    if slots < 1:
        raise ValueError(f"slots is {slots}; a block has at least 1")
    if any(a > b for a, b in pairwise(anchors)):
        raise ValueError("anchors is not ascending; sort the pack positions")
    queries = [
        _Query(bisect_right(plan.cu_seqlens, p) - 1, i * slots, p, p + slots, p)
        for i, p in enumerate(plan.own_anchors(anchors))
    ]
    return _merge(_relate(queries, plan._keys(source), plan.window or _UNBOUNDED))


def _check_rows(rows: tuple[Range, ...], total: int) -> None:
    flat = [x for pair in rows for x in pair]
    if flat and (flat[0] < 0 or flat[-1] > total or flat != sorted(flat)):
        raise ValueError(f"rows is {list(rows)}; it must be ascending ranges of the {total} local rows")


def _selected(runs: Sequence[Run], rows: Sequence[Range]) -> Iterator[_Query]:
    """The parts of `runs` that `rows` cover, packed."""
    packed = 0
    starts = [run.row for run in runs]
    for first, last in rows:
        at = first
        while at < last:
            run = runs[bisect_right(starts, at) - 1]
            start = run.start + at - run.row
            length = min(last - at, run.stop - start)
            yield _Query(run.document, packed, start, start + length, start + length)
            packed += length
            at += length


def _relate(queries: Iterable[_Query], keys: Iterable[Run], window: int) -> Iterator[Task]:
    by_document: dict[int, list[Run]] = {}
    for run in keys:
        by_document.setdefault(run.document, []).append(run)
    for query in queries:
        for run in by_document.get(query.document, ()):
            yield from _pair(query, run, window)


def _pair(query: _Query, run: Run, window: int) -> Iterator[Task]:
    """A query at position p sees the key at position g iff g <= p, g < limit and p - g < window."""
    start, stop = run.start, min(run.stop, query.limit)
    if start >= stop:
        return
    to_row, to_key = query.row - query.start, run.row - start
    low, high = max(query.start, start), min(query.stop, stop)  # rows whose own key is in this run
    if low < high:
        first = max(start, low - window + 1)
        left = window - 1 if high - first > window else None
        yield Task(low + to_row, high + to_row, first + to_key, high + to_key, True, left)
    low, high = max(query.start, stop), min(query.stop, stop + window - 1)  # rows after the whole run
    if low < high:
        first = max(start, low - window + 1)
        left = stop - high + window - 1 if high - first > window else None
        yield Task(low + to_row, high + to_row, first + to_key, stop + to_key, False, left)


def _merge(tasks: Iterable[Task]) -> tuple[Task, ...]:
    """Fewer, larger tasks: first keys that follow each other, then rows that follow each other. Causal first."""
    merged: list[Task] = []
    for join in (_join_keys, _join_rows):
        merged = []
        for task in tasks:
            joined = join(merged[-1], task) if merged else None
            merged[-1:] = [joined] if joined else [*merged[-1:], task]
        tasks = merged
    return tuple(sorted(merged, key=lambda task: not task.causal))


def _join_keys(a: Task, b: Task) -> Task | None:
    same_rows = (a.q0, a.q1) == (b.q0, b.q1) and a.k1 == b.k0
    if same_rows and not a.causal and a.left is None and b.left is None:
        return b._replace(k0=a.k0)
    return None


def _join_rows(a: Task, b: Task) -> Task | None:
    if a.q1 != b.q0 or a.k0 != b.k0 or a.causal != b.causal or not a.left is b.left is None:
        return None
    step = b.q1 - b.q0 if a.causal else 0
    return a._replace(q1=b.q1, k1=b.k1) if b.k1 - a.k1 == step else None
