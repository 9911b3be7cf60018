"""In which order the ranks of a pipeline run their stages, and what one rank may know of another.

All of it is integers: no process takes part. `docs/pipeline.md` has the argument in words.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple


class Action(NamedTuple):
    """The forward ("F") or the backward ("B", towards the inputs) of one microbatch on one stage."""

    kind: Literal["F", "B"]
    stage: int
    microbatch: int


Order = list[list[Action]]
"""What each pipeline rank runs, in order."""


def stage_ranks(schedule: str, ranks: int, stages: int) -> list[int]:
    """The pipeline rank of each stage: round and round, or for ZBV down and up again.

    Example: stage_ranks("ZBVZeroBubble", 2, 4) == [0, 1, 1, 0]; any other schedule gives [0, 1, 0, 1]
    """
    if schedule == "ZBVZeroBubble":
        return [*range(ranks), *reversed(range(ranks))]
    return [stage % ranks for stage in range(stages)]


def run_order(schedule: str, ranks: int, microbatches: int) -> Order:
    """The order of a schedule with one stage a rank, as torch.distributed.pipelining runs it.

    Written out here because the plan that torch keeps of its 1F1B is off by one on the last rank.
    """
    order = []
    for rank in range(ranks):
        lead = microbatches if schedule == "GPipe" else min(microbatches, ranks - rank)
        actions = [Action("F", rank, m) for m in range(lead)]
        for m in range(microbatches):
            actions.append(Action("B", rank, m))
            if lead + m < microbatches:
                actions.append(Action("F", rank, lead + m))
        order.append(actions)
    return order


def read_order(plan: Mapping[int, Sequence[Any]]) -> Order:
    """The order in a torch schedule's `pipeline_order`, without its idle slots and weight gradients."""
    kinds: dict[str, Literal["F", "B"]] = {"F": "F", "B": "B", "I": "B"}
    return [
        [
            Action(kinds[a.computation_type.value], a.stage_index, a.microbatch_index)
            for a in plan[rank]
            if a is not None and a.computation_type.value in kinds
        ]
        for rank in range(len(plan))
    ]


def happens_before(order: Order) -> dict[Action, list[int]]:
    """For every action: how many of its actions each rank is sure to have finished when this one starts.

    A rank knows of another only through what it has received: a forward needs the forward of the stage
    below, a backward that of the stage above, and of the last stage the forward.

    Raises:
        ValueError: the order waits for itself.
    """
    last = max(action.stage for actions in order for action in actions)
    start: dict[Action, list[int]] = {}
    finished: dict[Action, list[int]] = {}
    clocks = [[0] * len(order) for _ in order]
    position = [0] * len(order)
    advanced = True
    while advanced:
        advanced = False
        for rank, actions in enumerate(order):
            while position[rank] < len(actions):
                action = actions[position[rank]]
                needed = _needs(action, last)
                if needed is not None and needed not in finished:
                    break
                clock = clocks[rank]
                if needed is not None:
                    clock = [max(pair) for pair in zip(clock, finished[needed])]
                start[action] = clock
                position[rank] += 1
                advanced = True
                clocks[rank] = finished[action] = [
                    position[rank] if r == rank else n for r, n in enumerate(clock)
                ]
    if any(position[rank] < len(actions) for rank, actions in enumerate(order)):
        raise ValueError("the schedule's order waits for itself")
    return start


def _needs(action: Action, last: int) -> Action | None:
    kind, stage, m = action
    if kind == "F":
        return Action("F", stage - 1, m) if stage else None
    return Action("B", stage + 1, m) if stage < last else Action("F", last, m)


def take_positions(order: Order, rank: int, jobs: Sequence[int]) -> list[int]:
    """Positions in `order[rank]` after which the rank takes the taps of each of its microbatches `jobs`.

    That is its first backward of the microbatch: every stage's forward of it lies before, so no take can
    wait for anything that depends on this rank.
    """
    top = max(action.stage for action in order[rank])
    return [order[rank].index(Action("B", top, m)) for m in jobs]


def ring_depth(
    order: Order, known: Mapping[Action, list[int]], source: int, sink: int, jobs: Sequence[int]
) -> int:
    """Receives to post ahead, so that none is posted later than its message is sent.

    Also the number of messages after which the source can be sure that one was taken.

    Args:
        known: `happens_before(order)`.
        source: the stage whose taps are sent.
        sink: the rank that takes them.
        jobs: the microbatches whose taps it takes, ascending.

    Example: 1F1B, all microbatches taken on the last of P ranks: P - source, or all of them if fewer
    """
    taken_at = take_positions(order, sink, jobs)
    depth = 1
    for k, m in enumerate(jobs):
        finished = known[Action("F", source, m)][sink]
        taken = sum(position < finished for position in taken_at)
        depth = max(depth, k + 1 - taken)
    return depth
