"""The suffix drafter: what requests are likely to say next, from what was said about the same problem before.

A draft is looked for in three kinds of scopes (docs/speculation.md): the request's own text, its group's, and
the problem's earlier generations, a frozen automaton each. Nothing is trained. Importing this imports numba.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from typing import Any

import numpy as np

from torchspec.records import Rollout
from torchspec.speculation.suffix import automaton as automata
from torchspec.speculation.suffix import kernels as batch
from torchspec.speculation.suffix.drafts import Drafts

PROMPT_TAIL = 8
"""Prompt tokens that precede each indexed response, so that its first tokens can be drafted."""
CALIBRATION = ("predicted", "accepted", "factors")
RECENT = 64
"""Tokens of a running request that are replayed when its problem gains a generation."""


def problem_key(problem_id: str | None, prompt_tokens: Sequence[int]) -> str:
    """The id that histories are kept under; without an explicit one, a hash of the prompt."""
    if problem_id is not None:
        return problem_id
    return (
        "prompt:" + hashlib.blake2b(np.asarray(prompt_tokens, np.int64).tobytes(), digest_size=16).hexdigest()
    )


def compile_all() -> None:
    """Compile what a SuffixDrafter runs, or load it from the cache, so that no rollout waits for it."""
    drafter = SuffixDrafter(window=1, max_draft=1)
    drafter.start("", "", [0])
    drafter.propose([""], [1])
    drafter.extend([""], [[0]], [1])
    drafter.advance([""], [[0, 0]])
    drafter.stop("")
    automata.build(np.array([0, 1, 0], np.int32), np.array([0, 3], np.int64))


@dataclass(slots=True)
class _Requests:
    """What is kept for running requests, a row each; S scopes, K longest draft."""

    automata: np.ndarray
    """int32 [R, S]; -1: none."""
    states: np.ndarray
    """int32 [R, S]: a live scope's state of the whole text, a frozen one's of the longest match."""
    matches: np.ndarray
    """int32 [R, S]: length of that match."""
    recent: np.ndarray
    """int32 [R, RECENT]: the last tokens, newest last; -1 before the first."""
    drafts: np.ndarray
    """int32 [R, K]: the last draft, with its path probabilities, uncalibrated probabilities and cells."""
    probs: np.ndarray
    plain: np.ndarray
    cells: np.ndarray
    lengths: np.ndarray
    """int64 [R]: length of the last draft."""

    @classmethod
    def empty(cls, count: int, scopes: int, max_draft: int) -> _Requests:
        def integers(width: int) -> np.ndarray:
            return np.full((count, width), -1, np.int32)

        return cls(
            automata=integers(scopes),
            states=integers(scopes),
            matches=integers(scopes),
            recent=integers(RECENT),
            drafts=integers(max_draft),
            probs=np.zeros((count, max_draft), np.float32),
            plain=np.zeros((count, max_draft), np.float32),
            cells=integers(max_draft),
            lengths=np.zeros(count, np.int64),
        )


class SuffixDrafter:
    """Drafts for all running requests with a fixed number of compiled calls a step.

    Two drafters that are told the same in the same order propose the same, so tensor-parallel ranks agree.
    The order within a batch does not matter: requests are taken by id.

    Example:
        drafter = SuffixDrafter()
        drafter.begin_iteration(7)
        drafter.start("r0", "spell_backward/17", prompt_tokens)
        drafts = drafter.propose(["r0"], limits=[8])
        drafter.advance(["r0"], [[33, 12]])           # what was sampled
        drafter.stop("r0")
        drafter.add_rollouts(7, rollouts)             # they are history from now on

    Args:
        window: iterations a generation is kept for.
        max_bytes: of all generations; beyond it the oldest are dropped whole.
        recency: path probabilities are scaled by recency ** (number of newer generations).
        max_draft: longest draft.
        decay: factor on the calibration's counts at every iteration.
    """

    def __init__(
        self,
        *,
        window: int = 16,
        max_bytes: int = 4 << 30,
        recency: float = 0.98,
        max_draft: int = 32,
        decay: float = 0.8,
    ) -> None:
        if window < 1 or max_draft < 1:
            raise ValueError(f"window {window} and max_draft {max_draft} must be at least 1")
        self.window, self.max_bytes, self.max_draft, self.decay = window, max_bytes, max_draft, decay
        self.iteration = 0
        self._table = np.zeros((64, automata.TABLE_WIDTH), np.int64)
        self._arrays: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        """Keeps the memory alive that the table's addresses point to."""
        self._free_automata = list(range(63, -1, -1))
        self._history: dict[str, list[tuple[int, int]]] = {}
        """Problem -> (iteration, automaton), oldest first."""
        self._groups: dict[str, int] = {}
        self._rows: dict[str, int] = {}
        self._problems: dict[str, str] = {}
        self._scratch: _Requests | None = None
        """Where `extend` writes."""
        self._allocate_rows(64)
        self._weights = np.concatenate([np.ones(batch.PROBLEM), recency ** np.arange(window)])
        cells = int(np.prod(batch.CELLS))
        self._predicted, self._accepted, self._factors = np.zeros(cells), np.zeros(cells), np.ones(cells)

    @property
    def history_bytes(self) -> int:
        return sum(self._bytes(a) for generations in self._history.values() for _, a in generations)

    @property
    def live_bytes(self) -> int:
        return sum(nodes.nbytes + slots.nbytes for nodes, slots in self._arrays.values()) - self.history_bytes

    def generations(self, problem_id: str) -> list[int]:
        """Iterations whose rollouts of the problem are kept, oldest first."""
        return [iteration for iteration, _ in self._history.get(problem_id, ())]

    def begin_iteration(self, iteration: int) -> None:
        """Drop what has left the window; groups without running requests end here."""
        self.iteration = iteration
        running = set(self._problems.values())
        for problem in sorted(self._groups.keys() - running):
            self._release(self._groups.pop(problem))
        self._predicted *= self.decay
        self._accepted *= self.decay
        batch.factors_of(self._predicted, self._accepted, self._factors)
        self._evict()
        self._attach_running()

    def add_rollouts(self, iteration: int, rollouts: Iterable[Rollout]) -> None:
        """Make one generation per problem of an iteration's rollouts."""
        ordered = sorted(rollouts, key=lambda r: (problem_key(r.problem_id, r.prompt_tokens), r.sample))
        for problem, group in groupby(ordered, key=lambda r: problem_key(r.problem_id, r.prompt_tokens)):
            texts = [r.prompt_tokens[-PROMPT_TAIL:] + r.tokens for r in group]
            starts = np.cumsum([0, *map(len, texts)], dtype=np.int64)
            tokens = np.fromiter(chain.from_iterable(texts), np.int32, starts[-1])
            self._history.setdefault(problem, []).append(
                (iteration, self._register(*automata.build(tokens, starts)))
            )
            self._history[problem].sort(key=lambda generation: generation[0])
        self._evict()
        self._attach_running()

    def start(self, request_id: str, problem_id: str | None, prompt_tokens: Sequence[int]) -> None:
        """A request begins to generate. Raises ValueError if it is running already."""
        if request_id in self._rows:
            raise ValueError(f"request {request_id!r} is running already")
        if not self._free_rows:
            self._allocate_rows(2 * len(self._rows))
        row = self._rows[request_id] = self._free_rows.pop()
        problem = self._problems[request_id] = problem_key(problem_id, prompt_tokens)
        if problem not in self._groups:
            self._groups[problem] = self._new_live()
        of = self._requests
        of.automata[row] = -1
        of.automata[row, : batch.PROBLEM] = self._new_live(), self._groups[problem]
        of.states[row] = of.matches[row] = of.lengths[row] = 0
        of.recent[row] = -1
        prompt = np.asarray(prompt_tokens, np.int32)
        tail = prompt[-PROMPT_TAIL:]
        self._append(np.array([row]), batch.SELF, prompt, np.array([0, len(prompt)]))
        self._append(np.array([row]), batch.GROUP, tail, np.array([0, len(tail)]))
        of.recent[row, RECENT - len(tail) :] = tail
        self._attach(row, problem)

    def stop(self, request_id: str) -> None:
        """A request has finished or was aborted; its text stays with its group until the next iteration."""
        row = self._rows.pop(request_id)
        del self._problems[request_id]
        self._release(int(self._requests.automata[row, batch.SELF]))
        self._requests.automata[row] = -1
        self._free_rows.append(row)

    def advance(self, request_ids: Sequence[str], tokens: Sequence[Sequence[int]]) -> None:
        """Take in the tokens that each request has got since it was last advanced, none of them drafts."""
        order = sorted(range(len(request_ids)), key=request_ids.__getitem__)
        rows = np.array([self._rows[request_ids[i]] for i in order], np.int64)
        new = [tokens[i] for i in order]
        starts = np.zeros(len(new) + 1, np.int64)
        np.cumsum([len(t) for t in new], out=starts[1:])
        flat = np.fromiter(chain.from_iterable(new), np.int32, starts[-1])
        of = self._requests
        batch.calibrate(
            rows, flat, starts, of.drafts, of.plain, of.cells, of.lengths,
            self._predicted, self._accepted, self._factors,
        )  # fmt: skip
        self._append(rows, batch.SELF, flat, starts)
        self._append(rows, batch.GROUP, flat, starts)
        batch.follow_all(self._table, of.automata, of.states, of.matches, rows, flat, starts, of.recent)

    def propose(
        self,
        request_ids: Sequence[str],
        limits: Sequence[int] | np.ndarray,
        floors: Sequence[float] | np.ndarray | None = None,
    ) -> Drafts:
        """Continuations of running requests.

        Args:
            limits: most tokens for each request; 0 and less: none.
            floors: a token is proposed while its path probability is at least this; None: 0.
        """
        none = [()] * len(request_ids)
        return self._propose(self._requests, request_ids, none, limits, floors)

    def extend(
        self,
        request_ids: Sequence[str],
        given: Sequence[Sequence[int]],
        limits: Sequence[int] | np.ndarray,
        floors: Sequence[float] | np.ndarray | None = None,
    ) -> Drafts:
        """As `propose`, for what may follow the requests' texts and then `given`, another drafter's tokens.

        Path probabilities begin behind `given`. Nothing of it is kept: the next `advance` is compared with
        the last `propose`.
        """
        if self._scratch is None or len(self._scratch.lengths) != len(self._requests.lengths):
            self._scratch = _Requests.empty(len(self._requests.lengths), 0, self.max_draft)
        return self._propose(self._scratch, request_ids, given, limits, floors)

    def _propose(
        self,
        out: _Requests,
        request_ids: Sequence[str],
        given: Sequence[Sequence[int]],
        limits: Sequence[int] | np.ndarray,
        floors: Sequence[float] | np.ndarray | None,
    ) -> Drafts:
        rows = np.array([self._rows[r] for r in request_ids], np.int64)
        starts = np.zeros(len(rows) + 1, np.int64)
        np.cumsum([len(tokens) for tokens in given], out=starts[1:])
        flat = np.fromiter(chain.from_iterable(given), np.int32, starts[-1])
        limit = np.asarray(limits, np.int64)
        floor = np.zeros(len(rows)) if floors is None else np.asarray(floors, np.float64)
        of = self._requests
        batch.propose(
            self._table, of.automata, of.states, of.matches, self._weights, self._factors, rows, flat, starts,
            limit, floor, out.drafts, out.probs, out.plain, out.cells, out.lengths,
        )  # fmt: skip
        total = int(out.lengths[rows].sum())
        drafts = Drafts(
            np.empty(total, np.int32), np.empty(total, np.float32), np.zeros(len(rows) + 1, np.int64)
        )
        batch.pack(rows, out.drafts, out.probs, out.lengths, drafts.starts, drafts.tokens, drafts.probs)
        return drafts

    def state_dict(self) -> dict[str, Any]:
        """History and calibration, as plain values and arrays; running requests are not part of it."""
        return {
            "iteration": self.iteration,
            "generations": [
                {"problem": p, "iteration": i, "nodes": self._arrays[a][0], "slots": self._arrays[a][1]}
                for p, generations in sorted(self._history.items())
                for i, a in generations
            ],
            **self.calibration(),
        }

    def calibration(self) -> dict[str, np.ndarray]:
        return {name: getattr(self, f"_{name}").copy() for name in CALIBRATION}

    def load_calibration(self, state: dict[str, Any]) -> None:
        for name in CALIBRATION:
            getattr(self, f"_{name}")[:] = state[name]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replace history and calibration. Raises ValueError while requests are running."""
        if self._rows:
            raise ValueError("requests are running")
        for automaton in [a for generations in self._history.values() for _, a in generations]:
            self._release(automaton)
        self._history.clear()
        self.iteration = int(state["iteration"])
        for one in state["generations"]:
            nodes, slots = (np.ascontiguousarray(one[name], np.int32) for name in ("nodes", "slots"))
            self._history.setdefault(one["problem"], []).append(
                (int(one["iteration"]), self._register(nodes, slots))
            )
        self.load_calibration(state)
        self._evict()

    def _append(self, rows: np.ndarray, scope: int, tokens: np.ndarray, starts: np.ndarray) -> None:
        of, done = self._requests, np.zeros(len(rows), np.int64)
        while (
            full := batch.append(self._table, of.automata, of.states, rows, scope, tokens, starts, done)
        ) >= 0:
            self._grow(full)

    def _evict(self) -> None:
        """Drop generations that are out of the window, then the oldest until the rest fits."""
        generations = sorted((i, problem) for problem, g in self._history.items() for i, _ in g)
        size = self.history_bytes
        for iteration, problem in generations:
            if iteration > self.iteration - self.window and size <= self.max_bytes:
                return
            _, automaton = self._history[problem].pop(0)
            size -= self._bytes(automaton)
            self._release(automaton)
            if not self._history[problem]:
                del self._history[problem]

    def _attach_running(self) -> None:
        for request_id, row in self._rows.items():
            self._attach(row, self._problems[request_id])

    def _attach(self, row: int, problem: str) -> None:
        """Point a request's cursors at its problem's generations, newest first, and replay its last tokens."""
        newest = [automaton for _, automaton in self._history.get(problem, ())][::-1][: self.window]
        of = self._requests
        of.automata[row, batch.PROBLEM :] = -1
        of.automata[row, batch.PROBLEM : batch.PROBLEM + len(newest)] = newest
        of.states[row, batch.PROBLEM :] = of.matches[row, batch.PROBLEM :] = 0
        recent = of.recent[row]
        batch.follow(self._table, of.automata, of.states, of.matches, row, recent[recent >= 0])

    def _allocate_rows(self, count: int) -> None:
        """Room for `count` running requests; keeps what is there."""
        have, scopes = len(self._rows), batch.PROBLEM + self.window
        larger = _Requests.empty(count, scopes, self.max_draft)
        if have:
            for name in _Requests.__slots__:
                getattr(larger, name)[:have] = getattr(self._requests, name)
        self._requests = larger
        self._free_rows = list(range(count - 1, have - 1, -1))

    def _register(self, nodes: np.ndarray, slots: np.ndarray, states: int = 0, edges: int = 0) -> int:
        if not self._free_automata:
            have = len(self._table)
            self._table = np.concatenate([self._table, np.zeros_like(self._table)])
            self._free_automata = list(range(2 * have - 1, have - 1, -1))
        automaton = self._free_automata.pop()
        self._point(automaton, nodes, slots, states, edges)
        return automaton

    def _point(self, automaton: int, nodes: np.ndarray, slots: np.ndarray, states: int, edges: int) -> None:
        self._arrays[automaton] = nodes, slots
        self._table[automaton] = nodes.ctypes.data, *nodes.shape, slots.ctypes.data, len(slots), states, edges

    def _release(self, automaton: int) -> None:
        del self._arrays[automaton]
        self._free_automata.append(automaton)

    def _bytes(self, automaton: int) -> int:
        nodes, slots = self._arrays[automaton]
        return nodes.nbytes + slots.nbytes

    def _new_live(self) -> int:
        nodes = np.empty((64, automata.LIVE_WIDTH), np.int32)
        automata.new_live(nodes)
        return self._register(nodes, np.full((32, 3), -1, np.int32), states=1)

    def _grow(self, automaton: int) -> None:
        """Twice the room for a live automaton's states and edges."""
        nodes, slots = self._arrays[automaton]
        states, edges = self._table[automaton, automata.T_STATES :]
        larger = np.empty((2 * len(nodes), automata.LIVE_WIDTH), np.int32)
        larger[:states] = nodes[:states]
        self._point(automaton, larger, automata.rehash(larger, slots, states, 2 * len(slots)), states, edges)
