"""Metrics of rollouts, rewards and speculation."""

from __future__ import annotations

import itertools

from torchspec.metrics.meter import Meter
from torchspec.records import Rollout, SpecStats
from torchspec.speculation.stats import SpeculationStats


def add_tau(meter: Meter, name: str, stats: SpecStats) -> None:
    """Add the mean acceptance length over all verify steps, bonus token included, unless nothing was drafted."""
    if stats.steps:
        meter.mean(name, stats.steps + sum(stats.accepted), stats.steps)


def rollout_metrics(rollouts: list[Rollout], meter: Meter, num_draft_tokens: int) -> None:
    """Add lengths, rewards and acceptance of one step's rollouts.

    `rollout/accept_j`: share of the drafts at position j (0-based) that were accepted.
    """
    count = len(rollouts)
    lengths = [len(r.tokens) for r in rollouts]
    meter.total("rollout/tokens", sum(lengths))
    meter.total("rollout/trained_tokens", sum(lengths) + sum(len(r.prompt_tokens) for r in rollouts))
    meter.mean("rollout/length_mean", sum(lengths), count)
    meter.maximum("rollout/length_max", max(lengths))
    meter.mean("rollout/truncated", sum(r.finish == "length" for r in rollouts), count)
    scores = [r.reward or 0.0 for r in rollouts]
    meter.mean("reward/mean", sum(scores), count)
    meter.mean("reward/no_signal", sum(r.advantage == 0.0 for r in rollouts), count)
    for name in rollouts[0].reward_parts:
        meter.mean(f"reward/{name}", sum(r.reward_parts[name] for r in rollouts), count)
    if not num_draft_tokens:
        return
    stats = SpecStats.total((r.spec for r in rollouts if r.spec), num_draft_tokens)
    add_tau(meter, "rollout/tau", stats)
    for j, (accepted, drafted) in enumerate(zip(stats.accepted, stats.drafted)):
        meter.mean(f"rollout/accept_{j}", accepted, drafted)


def speculation_metrics(stats: SpeculationStats, meter: Meter) -> None:
    """Add what the drafters did in one step's rollouts, and the speed-up.

    `speculation/estimated`, `speculation/measured`: speed-up over plain decoding at the cost table's times,
    predicted while generating and measured; 0 without a measured budget.
    """
    for name, drafter in stats.drafters.items():
        meter.total(f"speculation/{name}_drafted", sum(drafter.drafted))
        meter.total(f"speculation/{name}_accepted", sum(drafter.accepted))
        add_tau(meter, f"speculation/{name}_tau", drafter)
        for j, (accepted, drafted) in enumerate(zip(drafter.accepted, drafter.drafted)):
            if len(stats.drafters) > 1:  # a single one's are rollout/accept_j
                meter.mean(f"speculation/{name}_accept_{j}", accepted, drafted)
    for name, length_class in stats.classes.items():
        meter.total(f"speculation/{name}_drafted", sum(length_class.drafted))
        add_tau(meter, f"speculation/{name}_tau", length_class)
    meter.mean("perf/draft_host_ms", 1e3 * stats.host_seconds, stats.steps)
    meter.mean("perf/draft_model_ms", 1e3 * stats.model_seconds, stats.steps)
    meter.maximum("speculation/window_mb", stats.window_bytes / 2**20)
    meter.mean("speculation/estimated", stats.expected_seconds, stats.predicted_seconds)
    meter.mean("speculation/measured", stats.plain_seconds, stats.seconds)


def simulated_tau(values: dict[str, float]) -> float:
    """Return the acceptance length that training predicts: 1 + the sum over passes of the product of overlaps.

    Example: {"draft/overlap_0": 0.8, "draft/overlap_1": 0.5} gives 1 + 0.8 + 0.8 * 0.5 = 2.2
    """
    tau = alive = 1.0
    for d in itertools.count():
        if (overlap := values.get(f"draft/overlap_{d}")) is None:
            return tau
        alive *= overlap
        tau += alive
    raise AssertionError("unreachable")


def derive_metrics(values: dict[str, float], train_draft: bool) -> None:
    """Add the metrics that follow from others of the step."""
    if train_draft:
        values["draft/tau_simulated"] = simulated_tau(values)
    trained = values["perf/train_policy_s"] + values["perf/train_draft_s"]
    generated = values["perf/rollout_s"] + values.get("perf/restart_s", 0.0)
    values["perf/rollout_tokens_per_s"] = values["rollout/tokens"] / generated
    values["perf/train_tokens_per_s"] = values.pop("rollout/trained_tokens") / trained
