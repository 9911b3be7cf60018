"""PNG plots of a run, drawn from its metrics.jsonl."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torchspec.metrics.writer import read_metrics

PHASES = ("rollout", "reward", "train_policy", "train_draft", "refit", "eval")


def draw_plots(folder: Path) -> list[Path]:
    """Draw what the run's metrics have into `folder/plots`; returns the files.

    Reward, tau (live and frozen draft on the same policy and problems), acceptance by position, time per
    phase. A curve without data is left out, a plot without curves is not written.
    """
    rows = read_metrics(folder)
    target = folder / "plots"
    target.mkdir(exist_ok=True)
    plots = {
        "reward.png": ("reward", {"training": "reward/mean", "held-out": "eval/reward"}),
        "tau.png": (
            "tau: tokens per verify step",
            {
                "training rollouts, co-trained draft": "rollout/tau",
                "held-out, co-trained draft": "eval/tau",
                "held-out, draft frozen at the start of RL": "eval/tau_frozen",
            },
        ),
        "acceptance.png": ("share of drafts accepted up to a position", _positions(rows)),
        "time.png": ("seconds per step", {p: f"perf/{p}_s" for p in PHASES}),
    }
    drawn = [_lines(rows, target / name, label, curves) for name, (label, curves) in plots.items()]
    return [path for path in drawn if path is not None]


def _positions(rows: list[dict[str, Any]]) -> dict[str, str]:
    names = {n for row in rows for n in row if n.startswith("rollout/accept_")}
    first = sorted(int(n.rpartition("_")[2]) for n in names)[:8]  # of the many a suffix draft may have
    return {f"position {j}": f"rollout/accept_{j}" for j in first}


def _lines(rows: list[dict[str, Any]], path: Path, label: str, curves: dict[str, str]) -> Path | None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for title, name in curves.items():
        steps, values = _series(rows, name)
        if values:
            sparse = len(values) < len(rows) / 2
            axes.plot(steps, values, label=title, marker="o" if sparse else None, markersize=4)
    if not axes.lines:
        return None
    axes.set(xlabel="RL step", ylabel=label)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    return path


def _series(rows: Iterable[dict[str, Any]], name: str) -> tuple[list[int], list[float]]:
    points = [(row["step"], row[name]) for row in rows if name in row]
    return [p[0] for p in points], [p[1] for p in points]
