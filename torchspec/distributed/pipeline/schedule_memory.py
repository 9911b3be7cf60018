"""What a pipeline rank holds while it runs its order, in microbatches and taps: integers only, as `order`."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

from torch.distributed.pipelining.schedules import get_schedule_class

from torchspec.distributed.pipeline.schedule import (
    Order,
    happens_before,
    read_order,
    ring_depth,
    run_order,
    take_positions,
)


class Snapshot(NamedTuple):
    """While a rank computes something.

    Attributes:
        doing: a forward, a backward, or the draft's training on one microbatch.
        stage: of the forward or backward; the draft's is -1.
        in_flight: microbatches whose activations are held, by stage; that of `doing` among them.
        taps: tensors held for the draft, its own microbatch's among them, but not what activations hold anyway.
        last: the policy's last backward is over.
    """

    doing: Literal["F", "B", "draft"]
    stage: int
    in_flight: dict[int, int]
    taps: int
    last: bool = False


def schedule_order(schedule: str, ranks: int, stages: int, microbatches: int) -> Order:
    """The order of a schedule without its process group, as torch's own object plans it where that counts."""
    if stages == ranks:
        return run_order(schedule, ranks, microbatches)
    kind: Any = get_schedule_class(schedule)
    made_up = SimpleNamespace(num_stages=stages, group_size=ranks, group_rank=0, submod=None, is_last=False)
    plan = kind([made_up] * (stages // ranks), microbatches, loss_fn=lambda *_: None)
    return read_order(plan.pipeline_order)


def moments(
    order: Order, rank: int, where: Sequence[int], sources: Mapping[int, int], draft_ranks: Sequence[int]
) -> Iterator[Snapshot]:
    """All moments of one rank, in order.

    Args:
        where: pipeline rank of each stage.
        sources: how many taps each stage makes; empty: no draft is trained.
        draft_ranks: pipeline rank that trains the draft on each microbatch.
    """
    known = happens_before(order)
    jobs = [m for m, sink in enumerate(draft_ranks) if sink == rank] if sources else []
    taken_after = set(take_positions(order, rank, jobs))
    own = [stage for stage in sources if where[stage] == rank]
    foreign = {
        stage: ring_depth(order, known, stage, rank, jobs) for stage in sources if where[stage] != rank
    }
    outboxes = {
        (stage, sink): deque[int](
            maxlen=ring_depth(order, known, stage, sink, [m for m, s in enumerate(draft_ranks) if s == sink])
        )
        for stage in own
        for sink in {*draft_ranks} - {rank}
    }
    flying: set[tuple[int, int]] = set()
    local: set[tuple[int, int]] = set()
    waiting: deque[int] = deque()
    taken = 0

    def moment(doing: Literal["F", "B", "draft"], stage: int, last: bool = False) -> Snapshot:
        sent = {(stage, m) for (stage, _), box in outboxes.items() for m in box}
        taps = sum(sources[stage] for stage, _ in (sent | local) - flying)
        for source, depth in foreign.items():
            taps += sources[source] * (min(depth, len(jobs) - taken) + len(waiting))
        return Snapshot(doing, stage, Counter(stage for stage, _ in flying), taps, last)

    def train(most_waiting: int, last: bool = False) -> Iterator[Snapshot]:
        while len(waiting) > most_waiting:
            yield moment("draft", -1, last)
            m = waiting.popleft()
            local.difference_update([(stage, m) for stage in own])

    for position, (kind, stage, m) in enumerate(order[rank]):
        if kind == "F":
            yield from train(most_waiting=len(order))
            flying.add((stage, m))
            if stage in own:
                if draft_ranks[m] == rank:
                    local.add((stage, m))
                else:
                    outboxes[stage, draft_ranks[m]].append(m)
        yield moment(kind, stage)
        if kind == "B":
            flying.remove((stage, m))
            if position in taken_after:
                waiting.append(m)
                taken += 1
    yield from train(most_waiting=0, last=True)
