"""Schedules as integers: ring depths against a simulator of random interleavings."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

import pytest

from torchspec.distributed.pipeline.schedule import (
    Action,
    Order,
    happens_before,
    ring_depth,
    run_order,
    stage_ranks,
    take_positions,
)
from torchspec.distributed.pipeline.schedule_memory import schedule_order

SCHEDULES = ["1F1B", "GPipe", "Interleaved1F1B", "ZBVZeroBubble"]


def make_order(name: str, ranks: int, microbatches: int) -> tuple[Order, list[int]]:
    """The order of torch's own schedule object, and the rank of each stage."""
    stages = ranks if name in ("1F1B", "GPipe") else 2 * ranks
    return schedule_order(name, ranks, stages, microbatches), stage_ranks(name, ranks, stages)


def sinks_of(placement: str, ranks: int, where: list[int], microbatches: int) -> list[int]:
    return [where[-1] if placement == "last" else m % ranks for m in range(microbatches)]


def depth_from(order: Order, known: dict[Action, list[int]], sinks: list[int], source: int, sink: int) -> int:
    return ring_depth(order, known, source, sink, [m for m, rank in enumerate(sinks) if rank == sink])


def one_less(depth: Callable[[int, int], int], source: int, sink: int) -> int:
    return max(1, depth(source, sink) - 1)


class Simulator:
    """Ranks that run their actions in any order the waits allow, each with its rings of receives.

    A message is transferred once it is sent and its receive is posted; a take waits for that and posts the
    next receive. `late` counts messages that were sent before their receive was posted.
    """

    def __init__(
        self, order: Order, where: list[int], sinks: list[int], depth_of, sources: list[int]
    ) -> None:
        self.order, self.where, self.sinks, self.sources = order, where, sinks, sources
        self.last = len(where) - 1
        self.done: set[Action] = set()
        self.position = [0] * len(order)
        self.jobs = {r: [m for m, sink in enumerate(sinks) if sink == r] for r in range(len(order))}
        self.take_after = {
            (r, at): m
            for r, jobs in self.jobs.items()
            for at, m in zip(take_positions(order, r, jobs), jobs, strict=True)
        }
        self.taking: dict[int, int] = {}
        self.posted = {
            (s, r): depth_of(s, r)
            for s in sources
            for r in range(len(order))
            if where[s] != r and self.jobs[r]
        }
        self.sent = dict.fromkeys(self.posted, 0)
        self.late = 0

    def can_run(self, rank: int) -> bool:
        if rank in self.taking:
            job = self.jobs[rank].index(self.taking[rank])
            return all(self.sent[s, r] > job and self.posted[s, r] > job for s, r in self.posted if r == rank)
        if self.position[rank] == len(self.order[rank]):
            return False
        kind, stage, m = self.order[rank][self.position[rank]]
        if kind == "F":
            return stage == 0 or Action("F", stage - 1, m) in self.done
        return (Action("B", stage + 1, m) if stage < self.last else Action("F", stage, m)) in self.done

    def run(self, rank: int) -> None:
        if rank in self.taking:
            self.finish(rank)
            del self.taking[rank]
            for route in self.posted:
                if route[1] == rank:
                    self.posted[route] += 1
            return
        action = self.order[rank][self.position[rank]]
        route = (action.stage, self.sinks[action.microbatch])
        if action.kind == "F" and route in self.posted:
            self.sent[route] += 1
            self.late += self.posted[route] < self.sent[route]
        if (rank, self.position[rank]) in self.take_after:
            self.taking[rank] = self.take_after[rank, self.position[rank]]  # before the gradient goes on
        else:
            self.finish(rank)

    def finish(self, rank: int) -> None:
        self.done.add(self.order[rank][self.position[rank]])
        self.position[rank] += 1

    def play(self, draw: random.Random) -> bool:
        """Run to the end; False where no rank can go on before that."""
        favourite = draw.randrange(len(self.order))  # one rank runs ahead, so that extremes are met
        while True:
            able = [r for r in range(len(self.order)) if self.can_run(r)]
            if not able:
                return all(p == len(a) for p, a in zip(self.position, self.order)) and not self.taking
            self.run(favourite if favourite in able and draw.random() < 0.8 else draw.choice(able))


@pytest.mark.parametrize("placement", ["last", "spread"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_no_deadlock_at_any_depth_and_no_late_receive_at_the_computed_one(name, placement) -> None:
    draw = random.Random(0)
    tight, deep = False, False
    for ranks in (2, 3, 4):
        for microbatches in (1, 2, 3, 4, 6, 8):
            if microbatches < ranks and name == "1F1B":
                continue
            if name == "Interleaved1F1B" and microbatches % max(1, microbatches // ranks):
                continue
            order, where = make_order(name, ranks, microbatches)
            sinks = sinks_of(placement, ranks, where, microbatches)
            sources = list(range(len(where)))
            computed = partial(depth_from, order, happens_before(order), sinks)

            for depth_of in (computed, lambda s, r: 1, lambda s, r: draw.randint(1, 4)):
                for _ in range(6):
                    game = Simulator(order, where, sinks, depth_of, sources)
                    assert game.play(draw), "deadlock"
                    assert not (depth_of is computed and game.late)
            for _ in range(6):
                shorter = partial(one_less, computed)
                game = Simulator(order, where, sinks, shorter, sources)
                assert game.play(draw)
                tight = tight or game.late > 0
                deep = deep or any(computed(s, r) > 1 for s, r in game.posted)
    assert tight == deep  # one receive fewer is too few somewhere


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_1f1b_needs_the_distance_to_the_last_stage(ranks) -> None:
    microbatches = 3 * ranks
    order = run_order("1F1B", ranks, microbatches)
    known = happens_before(order)
    jobs = list(range(microbatches))
    assert [ring_depth(order, known, s, ranks - 1, jobs) for s in range(ranks - 1)] == [
        ranks - s for s in range(ranks - 1)
    ]
    gpipe = run_order("GPipe", ranks, microbatches)
    assert ring_depth(gpipe, happens_before(gpipe), 0, ranks - 1, jobs) == microbatches


def test_order_of_1f1b() -> None:
    texts = ["".join(f"{a.kind}{a.microbatch}" for a in actions) for actions in run_order("1F1B", 2, 3)]
    assert texts == ["F0F1B0F2B1B2", "F0B0F1B1F2B2"]


def test_a_circular_order_is_refused() -> None:
    with pytest.raises(ValueError, match="waits for itself"):
        happens_before([[Action("B", 0, 0), Action("F", 0, 0)]])
