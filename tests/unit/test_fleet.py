"""All ranks' engines as one, and the cost table's measurement; without engines or processes."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from torchspec.errors import EngineDied, GuardStop, Stopped
from torchspec.records import Rollout
from torchspec.rollout.engine import Request, Sampling
from torchspec.rollout.fleet import Fleet
from torchspec.speculation.calibration import measure
from torchspec.speculation.lengths import LengthStats


class Echo:
    """Answers every request with its rank."""

    def __init__(self, rank: int) -> None:
        self.rank, self.asked, self.learned = rank, [], []

    def generate(self, requests, sampling):
        self.asked += requests
        return [
            Rollout(
                problem_id=r.problem_id,
                sample=sample,
                prompt_tokens=r.prompt_tokens,
                tokens=[self.rank] * int(r.problem_id[1:]),
                logprobs=[],
                finish="stop",
                policy_version=0,
                draft_version=0,
            )
            for r in requests
            for sample in range(r.samples)
        ]

    def learn(self, iteration, rollouts):
        self.learned.append((iteration, len(rollouts)))


def test_every_sample_is_made_once_and_all_ranks_see_all() -> None:
    requests = [Request(problem_id=f"p{n}", prompt_tokens=[n], samples=4) for n in (3, 50, 5, 2, 80, 9, 4, 7)]
    fleets = []
    for rank in range(3):
        mesh = SimpleNamespace(rank=rank, world_size=3)
        fleets.append(Fleet(mesh, Echo(rank), LengthStats(default=10), 1.0))  # pyrefly: ignore[bad-argument-type]
    for iteration in range(2):
        made = [fleet.generate(requests, Sampling(max_new_tokens=9)) for fleet in fleets]
        together = [pair for mine in made for pair in mine]
        views = []
        for fleet in fleets:
            fleet.mesh.gather_world = lambda mine, together=together: list(together)
            views.append(fleet.exchange([]))
            fleet.learn(iteration, views[-1])
        assert views[0] == views[1] == views[2]
        assert [(r.problem_id, r.sample) for r in views[0]] == [
            (q.problem_id, s) for q in requests for s in range(4)
        ]
        assert all(fleet.engine.learned[-1] == (iteration, 32) for fleet in fleets)
    tokens = [sum(len(r.tokens) for _, r in mine) for mine in made]
    assert max(tokens) <= 1.15 * sum(tokens) / 3


def test_the_longest_are_begun_first() -> None:
    lengths = LengthStats(default=10)
    fleet = Fleet(SimpleNamespace(rank=0, world_size=1), Echo(0), lengths, 1.0)  # pyrefly: ignore[bad-argument-type]
    requests = [Request(problem_id=f"p{n}", prompt_tokens=[n]) for n in (3, 50, 5, 80)]
    lengths.observe([r for _, r in fleet.generate(requests, Sampling(max_new_tokens=9))])
    fleet.engine.asked.clear()
    fleet.generate(requests, Sampling(max_new_tokens=9))
    assert [r.problem_id for r in fleet.engine.asked] == ["p80", "p50", "p5", "p3"]


def test_a_cost_table_is_what_the_engine_takes() -> None:
    def run(schedule, batch):
        assert min(schedule) == batch
        noise = [1.0, 0.0, 0.3, 2.0, 0.1]  # other load: only ever adds
        steps = [
            (n, 0.01 + 0.001 * n + 0.1 * noise[(i + i // len(set(schedule))) % 5])
            for i, n in enumerate(schedule)
        ]
        drafting = [(4 * (i % 2), 0.002 + 0.003 * (i % 2)) for i in range(4)]
        return SimpleNamespace(steps=[] if batch == 16 else steps, drafting=drafting)

    table = measure(run, 16, 8)
    assert table.batches == [1, 4]  # sixteen did not fit
    assert table.tokens == [1, 2, 4, 8, 9, 16, 32, 36]
    assert table(4, 4) == pytest.approx(0.014)
    assert table(36, 1) == pytest.approx(0.046)  # beyond what one request can draft
    assert table(2, 4) == pytest.approx(0.014)  # fewer tokens than requests
    assert table.drafting(4, 1) == pytest.approx(0.005)
    assert table.drafting(0, 4) == pytest.approx(0.002)
    with pytest.raises(RuntimeError, match="none of the batches"):
        measure(lambda schedule, batch: SimpleNamespace(steps=[], drafting=[]), 4, 8)


class Mortal(Echo):
    """Dies in its n-th attempts to answer, n in `dies`."""

    def __init__(self, dies: list[int]) -> None:
        super().__init__(0)
        self.dies, self.attempts, self.restarts, self.weights = dies, 0, 0, "new"

    def generate(self, requests, sampling):
        self.asking = requests, sampling
        return self.resume()

    def resume(self):
        self.attempts += 1
        if self.attempts in self.dies:
            raise EngineDied("of old age")
        assert self.weights == "new"
        return super().generate(*self.asking)

    def restart(self):
        self.restarts, self.weights = self.restarts + 1, "old"


REQUESTS = [Request(problem_id=f"p{n}", prompt_tokens=[n], samples=2) for n in (3, 5)]


def calm(check=lambda: None):
    return SimpleNamespace(check=check, abandonable=nullcontext)


def run_steps(engine: Mortal, steps: int, others: list[float] | None = None, interrupt=None) -> list[int]:
    """Restarts of this rank by step; `others` is what the other ranks say, by question."""
    worst = iter(others or [0.0] * 99)
    mesh = SimpleNamespace(rank=0, world_size=1, max_over_world=lambda x: x.clamp(min=next(worst)))
    fleet = Fleet(mesh, engine, LengthStats(default=10), 1.0)  # pyrefly: ignore[bad-argument-type]
    restarts = []
    for step in range(1, steps + 1):
        made, restarted = fleet.generate(REQUESTS, Sampling(max_new_tokens=9)), 0
        if fleet.any_died(step):
            made, restarted = fleet.recover(
                step, lambda: setattr(engine, "weights", "new"), interrupt or calm()
            )  # pyrefly: ignore[bad-argument-type]
        assert sorted((i, r.sample) for i, r in made) == [(0, 0), (0, 1), (1, 0), (1, 1)]
        restarts.append(restarted)
    return restarts


@pytest.mark.parametrize(
    ("dies", "outcome"),
    [
        ([], [0, 0, 0, 0]),
        ([1], [1, 0, 0, 0]),  # a restart is an attempt as well: the second
        ([1, 4], [1, 0, 1, 0]),  # a whole step lies between
        ([1, 2], "step 1: this rank's rollout engine died again"),
        ([2, 4], "step 3: this rank's rollout engine died again"),
    ],
)
def test_an_engine_is_restarted_once_until_a_whole_step_is_done(dies, outcome, caplog) -> None:
    engine = Mortal(dies)
    if isinstance(outcome, list):
        assert run_steps(engine, 4) == outcome
        assert engine.restarts == sum(outcome)
    else:
        with pytest.raises(GuardStop, match=outcome):
            run_steps(engine, 4)
        assert engine.restarts == 1
    assert len(caplog.records) == len(dies)
    assert all("rank 0's rollout engine died, " in text and "of old age" in text for text in caplog.messages)


def test_ranks_with_living_engines_take_part_and_stop_with_the_others() -> None:
    engine = Mortal([])
    assert run_steps(engine, 2, others=[1.0, 0.0, 0.0]) == [0, 0]
    assert (engine.attempts, engine.restarts) == (3, 0)
    with pytest.raises(GuardStop, match="step 1: another rank's rollout engine died again"):
        run_steps(Mortal([]), 2, others=[1.0, 2.0])


def test_a_signal_while_an_engine_is_built_stops_before_it_generates() -> None:
    def check() -> None:
        raise Stopped

    engine = Mortal([1])
    with pytest.raises(Stopped):
        run_steps(engine, 1, interrupt=calm(check))
    assert (engine.attempts, engine.restarts) == (1, 1)
