"""Dispatch by predicted length on recorded long-tailed lengths, and the statistics it is predicted from."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from torchspec.records import Rollout
from torchspec.rollout.dispatch import Share, dispatch
from torchspec.rollout.engine import Request
from torchspec.speculation.lengths import KEPT, LengthStats

PROBLEMS, SAMPLES = 128, 16
"""A step of the DAS paper's mathematics run."""


def rollout(problem: str, length: int, sample: int = 0, finish: str = "stop") -> Rollout:
    return Rollout(
        problem_id=problem,
        sample=sample,
        prompt_tokens=[1],
        tokens=[3] * length,
        logprobs=[],
        finish=finish,
        policy_version=0,
        draft_version=0,
    )


def drawn(iterations: int, rng: np.random.Generator) -> np.ndarray:
    """Long-tailed lengths [iterations, problems, samples]: problems differ, and so do samples of a problem."""
    centre = rng.normal(7.5, 0.7, (1, PROBLEMS, 1))
    lengths = rng.lognormal(centre, 0.6, (iterations, PROBLEMS, SAMPLES))
    return np.clip(lengths, 64, 16384).astype(int)


def recorded(iterations: int, rng: np.random.Generator) -> np.ndarray:
    """The same of recorded lengths: each problem stands for one of the record, its samples are drawn from that
    one's responses.

    The record is [24 problems, 32 responses] of SmolLM2-135M-Instruct on `benchmarks/smollm2.toml` at temperature
    0.8: 4 runs of `rollout.py generate` with run.seed 1 to 4, 8 samples, at most 768 new tokens. Median 101, nine
    in ten up to 230, 5 of the 768 cut off.
    """
    record = np.array(json.loads((Path(__file__).parents[1] / "data" / "lengths.json").read_text()))
    rows = rng.integers(len(record), size=(1, PROBLEMS, 1))
    return record[rows, rng.integers(record.shape[1], size=(iterations, PROBLEMS, SAMPLES))]


def longest_first(weights: list[int], engines: int) -> float:
    """The LPT schedule's makespan, each response on its own and its length known."""
    loads = np.zeros(engines)
    for weight in sorted(weights, reverse=True):
        loads[loads.argmin()] += weight
    return float(loads.max())


def over_known_lengths(lengths: np.ndarray, engines: int) -> float:
    """Makespan of the last iteration as dispatched after seeing the others, over that of `longest_first`."""
    stats = LengthStats(default=256)
    for iteration in lengths[:-1]:
        stats.observe(rollout(f"p{p}", n, s) for p, row in enumerate(iteration) for s, n in enumerate(row))
    requests = [Request(problem_id=f"p{p}", prompt_tokens=[1], samples=SAMPLES) for p in range(PROBLEMS)]
    shares = dispatch(requests, engines, stats)
    todo = {p: list(row) for p, row in enumerate(lengths[-1])}
    loads = [sum(todo[s.request].pop() for s in engine for _ in range(s.samples)) for engine in shares]
    assert not any(todo.values())
    return max(loads) / longest_first(lengths[-1].ravel().tolist(), engines)


@pytest.mark.parametrize("engines", [2, 4, 8])
@pytest.mark.parametrize("source", [drawn, recorded])
def test_the_makespan_is_near_that_of_known_lengths(source, engines):
    """Of ten steps the mean; one step's responses can by chance be longer than any history tells."""
    ratios = [over_known_lengths(source(5, np.random.default_rng(seed)), engines) for seed in range(10)]
    assert np.mean(ratios) <= 1.1
    assert max(ratios) <= 1.15


def test_siblings_stay_together_unless_they_are_in_the_top_decile():
    stats = LengthStats(default=100)
    for p in range(20):
        stats.observe(rollout(f"p{p}", 100 + p if p < 19 else 3000, s) for s in range(SAMPLES))
    requests = [Request(problem_id=f"p{p}", prompt_tokens=[1], samples=SAMPLES) for p in range(20)]
    shares = dispatch(requests, 4, stats)
    engines_of = Counter(share.request for engine in shares for share in engine)
    assert all(engines_of[p] == 1 for p in range(18))
    assert engines_of[19] == 4
    assert sum(share.samples for engine in shares for share in engine) == 20 * SAMPLES
    assert shares == dispatch(requests, 4, stats)


def test_dispatch_without_history_deals_evenly():
    requests = [Request(problem_id=f"p{p}", prompt_tokens=[1], samples=4) for p in range(6)]
    shares = dispatch(requests, 3, LengthStats(default=100))
    assert [sum(s.samples for s in engine) for engine in shares] == [8, 8, 8]
    assert dispatch(requests, 1, LengthStats(default=100)) == [[Share(p, 4) for p in range(6)]]
    assert dispatch([], 2, LengthStats(default=100)) == [[], []]


def test_statistics_of_a_problem():
    stats = LengthStats(default=50)
    assert stats.of("p") is None
    assert stats.expected("p") == (50, 50)
    stats.observe([rollout("p", n, n, "length" if n == 10 else "stop") for n in range(1, 11)])
    known = stats.of("p")
    assert known is not None
    assert (known.count, known.mean, known.p50, known.truncated) == (10, 5.5, 5.5, 0.1)
    assert known.p90 == pytest.approx(9.1)
    assert known.last == list(range(1, 11))
    assert stats.expected("unknown") == stats.expected("p") == (5.5, pytest.approx(9.1))
    stats.observe([rollout("p", 7, s) for s in range(KEPT)])
    known = stats.of("p")
    assert known is not None
    assert known.last == [7] * KEPT
    assert known.count == 10 + KEPT


def test_remaining_looks_at_who_lasted_longer():
    stats = LengthStats(default=50)
    assert stats.remaining(["p", "p", "p"], [0, 20, 200]).tolist() == [50, 30, 30]
    stats.observe([rollout("p", n, n) for n in (10, 20, 90)] + [rollout("q", 400)])
    found = stats.remaining(["p", "p", "p", "p", "new"], [0, 20, 100, 1000, 90])
    assert found.tolist() == [40, 70, 300, 150, 310]


def test_statistics_survive_a_checkpoint():
    stats = LengthStats(default=50)
    stats.observe([rollout("p", n, n) for n in range(1, 100)])
    copy = LengthStats(default=50)
    copy.load_state_dict(json.loads(json.dumps(stats.state_dict())))
    for one in (stats, copy):
        one.observe([rollout("q", 5), rollout("p", 500)])
    assert copy.of("p") == stats.of("p")
    assert copy.state_dict() == stats.state_dict()
    assert copy.remaining(["p", "q"], [30, 9]).tolist() == stats.remaining(["p", "q"], [30, 9]).tolist()
