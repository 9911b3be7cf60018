"""Metrics: sums divided once, lines a person can read, plots with the curves the data have."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from matplotlib.image import imread

from torchspec.metrics import plots, stopwatch
from torchspec.metrics.console import console_line
from torchspec.metrics.meter import Meter
from torchspec.metrics.rollout_metrics import add_tau, rollout_metrics, simulated_tau
from torchspec.metrics.stopwatch import Stopwatch
from torchspec.metrics.writer import MetricWriter, read_metrics
from torchspec.records import Rollout, SpecStats


class TwoEqualRanks:
    """Stands in for a mesh on which another rank recorded the same."""

    def union(self, names: Iterable[str]) -> list[str]:
        return sorted(names)

    def sum_over_world(self, value: torch.Tensor) -> torch.Tensor:
        return 2 * value

    def max_over_world(self, value: torch.Tensor) -> torch.Tensor:
        return value


def test_means_totals_and_maxima_over_ranks() -> None:
    meter = Meter()
    meter.mean("mean", 3.0, 4)
    meter.mean("mean", torch.tensor(1.0), torch.tensor(4))
    meter.mean("of nothing", 0.0, 0)
    meter.total("total", 2.5)
    meter.total("total", 2.5)
    meter.maximum("maximum", -3)
    meter.maximum("maximum", -5)
    values = meter.reduce(TwoEqualRanks())
    assert values == {"mean": 0.5, "of nothing": 0.0, "total": 10.0, "maximum": -3.0}


def test_a_part_within_another_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([0.0, 1.0, 4.0, 10.0, 20.0, 21.0])
    monkeypatch.setattr(stopwatch.time, "perf_counter", lambda: next(ticks))
    watch = Stopwatch(torch.device("cpu"))
    with watch.time("policy"), watch.time("draft", within="policy"):
        pass
    with watch.time("draft"):
        pass
    assert watch.read() == {"policy": 10.0 - 3.0, "draft": 3.0 + 1.0}
    assert watch.read() == {}


class LastStageKnowsMore(TwoEqualRanks):
    def union(self, names: Iterable[str]) -> list[str]:
        return [*names, "policy/loss"] if names else []


def test_a_rank_takes_part_in_sums_it_has_not_recorded() -> None:
    meter = Meter()
    meter.total("rollout/tokens", 3.0)
    assert meter.reduce(LastStageKnowsMore())["rollout/tokens"] == 6.0


def rollout(spec: SpecStats | None, length: int = 3, **fields) -> Rollout:
    return Rollout(
        problem_id="p",
        sample=0,
        prompt_tokens=[1, 2],
        tokens=[5] * length,
        logprobs=[-1.0] * length,
        finish=fields.pop("finish", "stop"),
        policy_version=0,
        draft_version=0,
        spec=spec,
        **fields,
    )


def test_tau_counts_the_bonus_token_and_positions_what_was_drafted_there() -> None:
    rollouts = [
        rollout(SpecStats(steps=3, drafted=[3, 3], accepted=[2, 1]), reward=1.0, reward_parts={"exact": 1.0}),
        rollout(SpecStats(steps=1, drafted=[1, 0], accepted=[1, 0]), reward=0.0, reward_parts={"exact": 0.0}),
        rollout(None, length=7, reward=0.5, reward_parts={"exact": 0.5}, finish="length", advantage=0.3),
    ]
    meter = Meter()
    rollout_metrics(rollouts, meter, num_draft_tokens=2)
    values = meter.reduce(TwoEqualRanks())
    assert values["rollout/tau"] == pytest.approx((4 + 4) / 4)
    assert values["rollout/accept_0"] == pytest.approx(3 / 4)
    assert values["rollout/accept_1"] == pytest.approx(1 / 3)
    assert values["rollout/tokens"] == 2 * 13
    assert values["rollout/length_max"] == 7
    assert values["rollout/truncated"] == pytest.approx(1 / 3)
    assert values["reward/mean"] == values["reward/exact"] == pytest.approx(0.5)
    assert values["reward/no_signal"] == pytest.approx(2 / 3)


def test_tau_without_drafts_is_not_reported_as_acceptance() -> None:
    meter = Meter()
    rollout_metrics([rollout(None, reward=1.0)], meter, num_draft_tokens=0)
    assert "rollout/tau" not in meter.reduce(TwoEqualRanks())
    meter = Meter()
    add_tau(meter, "tau", SpecStats(steps=0, drafted=[], accepted=[]))
    assert meter.reduce(TwoEqualRanks()) == {}
    assert SpecStats(steps=0, drafted=[], accepted=[]).tau == 1.0


def test_simulated_tau() -> None:
    assert simulated_tau({"draft/overlap_0": 0.8, "draft/overlap_1": 0.5}) == pytest.approx(2.2)
    assert simulated_tau({}) == 1.0


STEP = {
    "reward/mean": 0.4123,
    "policy/loss": -0.0042,
    "draft/loss": 0.83,
    "rollout/tau": 2.914,
    "perf/rollout_tokens_per_s": 5120.0,
    "perf/train_tokens_per_s": 980.0,
    "perf/wait_s": 0.26,
    "perf/memory_gb": 1.24,
}


def test_the_console_line() -> None:
    assert console_line(7, 120, STEP, 3725) == (
        "step   7/120 | reward 0.412 | policy -0.004 | draft 0.830 | tau 2.91 | rollout 5.1k tok/s | "
        "train 980 tok/s | wait 0.3s | mem 1.2GB | eta 1h02"
    )
    alone = {k: v for k, v in STEP.items() if k not in ("draft/loss", "rollout/tau")}
    assert "tau" not in console_line(1, 2, alone, 59)
    assert console_line(1, 2, alone, 59).endswith("eta 0m59")


def test_rows_events_and_plots(tmp_path) -> None:
    writer = MetricWriter(tmp_path)
    writer.write(0, {"eval/reward": 0.1, "eval/tau": 1.5, "eval/tau_frozen": 1.5})
    for step in range(1, 5):
        writer.write(step, {**STEP, "rollout/accept_0": 0.5, "rollout/accept_1": 0.25, "perf/rollout_s": 1.0})
    writer.close()
    rows = read_metrics(tmp_path)
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert all(json.dumps(row) for row in rows)
    assert list((tmp_path / "tensorboard").iterdir())
    files = plots.draw_plots(tmp_path)
    assert {f.name for f in files} == {"reward.png", "tau.png", "acceptance.png", "time.png"}
    for file in files:
        assert imread(file)[..., :3].std() > 0.01  # something was drawn


def test_a_plot_without_data_is_not_written(tmp_path) -> None:
    writer = MetricWriter(tmp_path)
    writer.write(1, {"reward/mean": 0.5})
    writer.close()
    assert [Path(f).name for f in plots.draw_plots(tmp_path)] == ["reward.png"]
