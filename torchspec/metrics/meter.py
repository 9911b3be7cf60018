"""What a run says of itself: metrics.jsonl, TensorBoard events, one console line a step.

Names are `group/what`: policy, draft, rollout, reward, eval, perf. Values that are means over tokens or
responses are sums divided once, after adding over ranks; nothing is averaged twice.
"""

from __future__ import annotations

import itertools
import json
import resource
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchspec.distributed.mesh import Mesh
from torchspec.records import Rollout, SpecStats
from torchspec.speculation.stats import SpeculationStats

TOTAL = -1.0
"""In place of a count: report the sum itself. Sums of it over records and ranks stay negative."""


class Meter:
    """Collects one step's numbers on every rank and reduces them with two collectives.

    A rank may leave names out: stages of a pipeline know different things. Tensors are only looked at in
    `reduce`, so recording never waits for a GPU.

    Example: two ranks record `mean("reward/mean", 3.0, 4)` and `mean("reward/mean", 1.0, 4)`:
        meter.reduce(mesh)["reward/mean"] == 0.5
    """

    def __init__(self) -> None:
        self._sums: dict[str, list[tuple[float | Tensor, float | Tensor]]] = {}
        self._max: dict[str, list[float | Tensor]] = {}

    def mean(self, name: str, total: float | Tensor, count: float | Tensor) -> None:
        """Add to a mean's numerator and denominator; a mean of nothing is reported as 0."""
        self._sums.setdefault(name, []).append((total, count))

    def total(self, name: str, value: float | Tensor) -> None:
        """Add to a sum over ranks."""
        self._sums.setdefault(name, []).append((value, TOTAL))

    def maximum(self, name: str, value: float | Tensor) -> None:
        self._max.setdefault(name, []).append(value)

    def reduce(self, mesh: Mesh) -> dict[str, float]:
        names, peaks = mesh.union(self._sums), mesh.union(self._max)
        pairs = [[sum(map(float, column)) for column in zip(*self._sums.get(n, [(0, 0)]))] for n in names]
        tops = [max(map(float, self._max.get(n, [float("-inf")]))) for n in peaks]
        sums = mesh.sum_over_world(torch.tensor(pairs, dtype=torch.float64).reshape(-1, 2))
        values = dict(zip(peaks, mesh.max_over_world(torch.tensor(tops, dtype=torch.float64)).tolist()))
        for name, (total, count) in zip(names, sums.tolist()):
            values[name] = total if count < 0 else total / count if count else 0.0
        return values


class Stopwatch:
    """Seconds that the device spends on named parts of a step.

    On CUDA events mark a part's ends in the stream, and nobody waits before `read`; elsewhere the host's clock.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._parts: list[tuple[str, str, Any, Any]] = []

    @contextmanager
    def time(self, name: str, within: str = "") -> Generator[None]:
        """Time a part. If it lies `within` another, its seconds are not also that one's."""
        start = self._mark()
        yield
        self._parts.append((name, within, start, self._mark()))

    def read(self) -> dict[str, float]:
        """Seconds by name since the last reading."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        seconds: dict[str, float] = {}
        for name, within, start, end in self._parts:
            spent = end - start if isinstance(end, float) else start.elapsed_time(end) / 1e3
            seconds[name] = seconds.get(name, 0.0) + spent
            if within:
                seconds[within] = seconds.get(within, 0.0) - spent
        self._parts.clear()
        return seconds

    def _mark(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class MetricWriter:
    """Writes one row a step to `metrics.jsonl` and TensorBoard; rank 0 only.

    Args:
        folder: the run's.
        done: steps whose rows stay; what an earlier session wrote of later ones is dropped, as the run makes
            them again.
    """

    def __init__(self, folder: Path, done: int = 0) -> None:
        from torch.utils.tensorboard import SummaryWriter

        path = folder / "metrics.jsonl"
        if path.exists():
            kept = [line for line in path.read_text(encoding="utf-8").splitlines() if _step_of(line) <= done]
            partial = path.with_name(".metrics.partial")
            partial.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
            partial.rename(path)
        self._rows = path.open("a", encoding="utf-8")
        self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=done + 1 if done else None)

    def write(self, step: int, values: dict[str, float]) -> None:
        row: dict[str, Any] = {"step": step, "time": round(time.time(), 3), **values}
        self._rows.write(json.dumps(row) + "\n")
        self._rows.flush()
        for name, value in values.items():
            self._board.add_scalar(name, value, step)
        self._board.flush()

    def close(self) -> None:
        self._rows.close()
        self._board.close()


def _step_of(line: str) -> float:
    """The step of a row; infinity for a row that was not written to its end."""
    try:
        return json.loads(line)["step"]
    except ValueError:
        return float("inf")


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The rows of a run's metrics.jsonl, oldest first."""
    with (folder / "metrics.jsonl").open(encoding="utf-8") as rows:
        return [json.loads(row) for row in rows]


def console_line(step: int, steps: int, values: dict[str, float], seconds_left: float) -> str:
    """One line a step.

    Example:
        step  12/80 | reward 0.41 | policy +0.012 | draft 0.83 | tau 2.91 | rollout 5.1k tok/s | ...
    """
    minutes, seconds = divmod(round(seconds_left), 60)
    hours, minutes = divmod(minutes, 60)
    parts = [
        f"step {step:>{len(str(steps))}}/{steps}",
        f"reward {values['reward/mean']:.3f}",
        f"policy {values['policy/loss']:+.3f}",
    ]
    if "draft/loss" in values:
        parts.append(f"draft {values['draft/loss']:.3f}")
    if "rollout/tau" in values:
        parts.append(f"tau {values['rollout/tau']:.2f}")
    parts += [
        f"rollout {_thousands(values['perf/rollout_tokens_per_s'])} tok/s",
        f"train {_thousands(values['perf/train_tokens_per_s'])} tok/s",
        f"wait {values['perf/wait_s']:.1f}s",
        f"mem {values['perf/memory_gb']:.1f}GB",
        f"eta {hours}h{minutes:02}" if hours else f"eta {minutes}m{seconds:02}",
    ]
    return " | ".join(parts)


def _thousands(value: float) -> str:
    return f"{value / 1000:.1f}k" if value >= 1000 else f"{value:.0f}"


def farewell(folder: Path, plots: list[Path], num_draft_tokens: int, method: str = "") -> str:
    """What a finished run has left, and how to serve it; 0 draft tokens: without a draft. `method` is vLLM's."""
    lines = [
        f"metrics     {folder / 'metrics.jsonl'}",
        f"TensorBoard tensorboard --logdir {folder / 'tensorboard'}",
        *(f"plot        {plot}" for plot in plots),
        f"serve       vllm serve {folder / 'policy'}",
    ]
    if num_draft_tokens:
        spec = {
            "method": method,
            "model": str(folder / "draft"),
            "num_speculative_tokens": num_draft_tokens,
            "draft_sample_method": "probabilistic",
        }
        # vLLM's CPU backend needs our patches (rollout/vllm/cpu_patches.py) to sample rightly while speculating.
        lines.append(f"  on a GPU  ... --speculative-config '{json.dumps(spec)}'")
    return "\n".join(lines)


def add_tau(meter: Meter, name: str, stats: SpecStats) -> None:
    """Mean acceptance length over all verify steps, the bonus token counted; left out where nothing was drafted."""
    if stats.steps:
        meter.mean(name, stats.steps + sum(stats.accepted), stats.steps)


def rollout_metrics(rollouts: list[Rollout], meter: Meter, num_draft_tokens: int) -> None:
    """Lengths, rewards and acceptance of one step's rollouts.

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


def speculation_metrics(tally: SpeculationStats, window_bytes: int, meter: Meter) -> None:
    """What the drafters did in one step's rollouts, and what it brought.

    `speculation/estimated`, `speculation/measured`: speed-up over plain decoding at the cost table's times, as
    predicted while generating and as it came; 0 without a measured budget.
    """
    for name, stats in tally.drafters.items():
        meter.total(f"speculation/{name}_drafted", sum(stats.drafted))
        meter.total(f"speculation/{name}_accepted", sum(stats.accepted))
        add_tau(meter, f"speculation/{name}_tau", stats)
        for j, (accepted, drafted) in enumerate(zip(stats.accepted, stats.drafted)):
            if len(tally.drafters) > 1:  # a single one's are rollout/accept_j
                meter.mean(f"speculation/{name}_accept_{j}", accepted, drafted)
    for name, stats in tally.classes.items():
        meter.total(f"speculation/{name}_drafted", sum(stats.drafted))
        add_tau(meter, f"speculation/{name}_tau", stats)
    meter.mean("perf/draft_host_ms", 1e3 * tally.host_seconds, tally.steps)
    meter.mean("perf/draft_model_ms", 1e3 * tally.model_seconds, tally.steps)
    meter.maximum("speculation/window_mb", window_bytes / 2**20)
    meter.mean("speculation/estimated", tally.expected_seconds, tally.predicted_seconds)
    meter.mean("speculation/measured", tally.plain_seconds, tally.seconds)


def simulated_tau(values: dict[str, float]) -> float:
    """Acceptance length that the training data predicts: 1 + sum over passes of the product of overlaps.

    Example: {"draft/overlap_0": 0.8, "draft/overlap_1": 0.5} gives 1 + 0.8 + 0.8 * 0.5 = 2.2
    """
    tau = alive = 1.0
    for d in itertools.count():
        if (overlap := values.get(f"draft/overlap_{d}")) is None:
            return tau
        alive *= overlap
        tau += alive
    raise AssertionError("unreachable")


def peak_memory_gb(device: torch.device) -> float:
    """Most memory this process has had, in GB (2**30): of the GPU, or on CPU its resident set."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 2**30
