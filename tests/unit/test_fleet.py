"""All ranks' engines as one, and the cost table's measurement; without engines or processes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from torchspec.records import Rollout
from torchspec.rollout.balance import LengthStats
from torchspec.rollout.calibration import measure
from torchspec.rollout.engine import Request, Sampling
from torchspec.rollout.fleet import Fleet


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
