"""Drafters against each other and against none: one engine, the same prompts, several epochs over them."""

from __future__ import annotations

import copy
import dataclasses
import difflib
import json
from pathlib import Path
from typing import Any, cast

import numpy as np

from torchspec.build import base_folder
from torchspec.checkpoint.run_folder import git_commit, installed_versions
from torchspec.checkpoint.writable import check_writable
from torchspec.config.schema import Config, longest_draft
from torchspec.data.problems import load_problems
from torchspec.data.prompts import prompts_by_id
from torchspec.data.tokenizer import load_tokenizer
from torchspec.distributed.mesh import Mesh
from torchspec.errors import ConfigError
from torchspec.models.spec import PolicySpec
from torchspec.records import Rollout, SpecStats
from torchspec.rollout.engine import Request, SpeculatingEngine, sampling_of
from torchspec.rollout.registry import build_engine, check_engine
from torchspec.speculation.lengths import LengthStats
from torchspec.speculation.speculator import Speculator

MODES = ("off", "model", "suffix", "hybrid")
HEADER = (
    f"{'epoch':>5} {'mode':<8}{'tok/s':>9}{'ratio':>8}{'cpu ratio':>11}{'tau':>7}{'drafted':>9}"
    f"{'accepted':>10}{'p50 len':>9}{'p99 len':>9}{'makespan s':>12}  accepted by position"
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One mode in one epoch.

    `ratio` is tokens_per_s over that of "off" in the same epoch, `cpu_ratio` the same by CPU time of the engine's
    thread, which other load on the machine does not stretch (CPU engines only); nan without "off".
    """

    epoch: int
    mode: str
    tokens: int
    tokens_per_s: float
    ratio: float
    tokens_per_cpu_s: float
    cpu_ratio: float
    tau: float
    drafted: list[int]
    accepted: list[int]
    length_p50: float
    length_p99: float
    makespan_s: float

    def line(self) -> str:
        shares = [a / d for a, d in zip(self.accepted, self.drafted) if d][:8]
        return (
            f"{self.epoch:>5} {self.mode:<8}{self.tokens_per_s:>9.1f}{self.ratio:>7.2f}x{self.cpu_ratio:>10.2f}x"
            f"{self.tau:>7.2f}{sum(self.drafted):>9}{sum(self.accepted):>10}{self.length_p50:>9.0f}{self.length_p99:>9.0f}"
            f"{self.makespan_s:>12.2f}  {' '.join(f'{share:.2f}' for share in shares)}"
        )


def bench(
    config: Config,
    draft: Path | None,
    modes: list[str],
    epochs: int,
    limit: int,
    greedy_check: bool,
    out: Path,
) -> list[Row]:
    """Run `modes` by turns, `epochs` times over the same training problems; print the table as it grows.

    Every mode has its own history and begins without any. Within an epoch all modes get the same prompts and
    seeds; sampled tokens differ all the same, because a draft changes which random numbers are used.

    Args:
        draft: folder of a draft; "model" and "hybrid" need it.
        limit: at most so many problems; 0: all.
        greedy_check: sample greedily, and refuse to go on when a mode's tokens differ from the first mode's.
        out: folder for bench.json, cost.json and bench.png.

    Raises:
        ConfigError: something of this cannot be used; nothing is generated then.
        RuntimeError: the greedy check failed.
    """
    _check(modes, draft, epochs, out)
    problems = load_problems(config.data)[0][: limit or None]
    mesh = Mesh(config.parallel)
    if mesh.world_size > 1:
        raise ConfigError("rollout.py bench runs as one process; start it without torchrun")
    folder = base_folder(config, mesh)
    spec = PolicySpec.from_hf(folder, config.model.max_len)
    check_engine(config, mesh.device.type, spec)
    tokenizer = load_tokenizer(folder, spec)
    longest = config.model.max_len - config.rollout.max_new_tokens
    prompts = prompts_by_id(tokenizer, problems, longest, config.data.overlong)
    requests = [
        Request(problem_id=key, prompt_tokens=tokens, samples=config.rollout.samples_per_problem)
        for key, tokens in prompts.items()
    ]
    config = _with_drafter(config, "hybrid" if draft else "suffix")
    built = build_engine(
        config,
        policy_folder=folder,
        draft_folder=draft,
        seed=config.run.seed,
        device_type=mesh.device.type,
    )
    engine = cast(SpeculatingEngine, built)
    engine.save_costs(out / "cost.json")
    speculators = {mode: _speculator(config, mode, engine, epochs) for mode in modes}
    print(HEADER)
    rows: list[Row] = []
    for epoch in range(1, epochs + 1):
        tokens: dict[str, list[list[int]]] = {}
        epoch_rows = []
        for turn in range(len(modes)):
            mode = modes[(turn + epoch) % len(modes)]  # nobody is always first
            row, rollouts = _epoch(config, engine, speculators[mode], requests, epoch, mode, greedy_check)
            epoch_rows.append(row)
            tokens[mode] = [r.tokens for r in rollouts]
        off = next((row for row in epoch_rows if row.mode == "off"), None)
        for row in sorted(epoch_rows, key=lambda row: modes.index(row.mode)):
            if off:
                ratios = (row.tokens_per_s / off.tokens_per_s, row.tokens_per_cpu_s / off.tokens_per_cpu_s)
                row = dataclasses.replace(row, ratio=ratios[0], cpu_ratio=ratios[1])
            rows.append(row)
            print(rows[-1].line(), flush=True)
        _write(out, config, engine, rows)  # what was measured is kept whatever comes
        for mode in modes if greedy_check else ():
            if tokens[mode] != tokens[modes[0]]:
                raise RuntimeError(f"epoch {epoch}: greedy tokens of {mode} differ from those of {modes[0]}")
    for mode, (ratio, cpu_ratio) in later_ratios(rows).items():
        print(f"{f'2-{epochs}':>5} {mode:<8}{'':>9}{ratio:>7.2f}x{cpu_ratio:>10.2f}x")
    if greedy_check:
        print(f"greedy tokens of {', '.join(modes)} are equal in every epoch")
    engine.close()
    mesh.close()
    return rows


def later_ratios(rows: list[Row]) -> dict[str, tuple[float, float]]:
    """Return each mode's ratios to "off" from the second epoch on: all tokens over all time, by wall and CPU time."""

    def rates(mode: str) -> np.ndarray:
        own = [row for row in rows if row.mode == mode and row.epoch > 1]
        times = [(row.tokens / row.tokens_per_s, row.tokens / row.tokens_per_cpu_s) for row in own]
        return sum(row.tokens for row in own) / np.sum(times, axis=0)

    modes = dict.fromkeys(row.mode for row in rows if row.epoch > 1)
    return {mode: tuple((rates(mode) / rates("off")).tolist()) for mode in modes if "off" in modes}


def _check(modes: list[str], draft: Path | None, epochs: int, out: Path) -> None:
    for mode in modes:
        if mode not in MODES:
            near = difflib.get_close_matches(mode, MODES, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ConfigError(f"--modes: {mode!r} is unknown; {hint}one of: {', '.join(MODES)}")
        if mode in ("model", "hybrid") and draft is None:
            raise ConfigError(f"--modes: {mode} needs --draft, the folder of a draft")
    if len(set(modes)) != len(modes):
        raise ConfigError("--modes: each only once")
    if epochs < 1:
        raise ConfigError("--epochs must be at least 1")
    if not out.resolve().parent.is_dir():
        raise ConfigError(f"--out {out}: its parent folder does not exist")
    if out.exists() and not out.is_dir():
        raise ConfigError(f"--out {out}: a file; give a folder")
    check_writable(out, "--out")
    out.mkdir(exist_ok=True)


def _with_drafter(config: Config, drafter: Any) -> Config:
    config = copy.deepcopy(config)
    config.rollout.drafter = drafter
    return config


def _speculator(config: Config, mode: str, engine: SpeculatingEngine, epochs: int) -> Speculator | None:
    if mode == "off":
        return None
    lengths = LengthStats(default=config.rollout.max_new_tokens)
    return Speculator(_with_drafter(config, mode), lengths, engine.cost, window=max(16, epochs))


def _epoch(
    config: Config,
    engine: SpeculatingEngine,
    speculator: Speculator | None,
    requests: list[Request],
    epoch: int,
    mode: str,
    greedy: bool,
) -> tuple[Row, list[Rollout]]:
    engine.speculate(speculator)
    sampling = dataclasses.replace(sampling_of(config), seed=config.run.seed + 1_000_000 * epoch)
    if greedy:
        sampling = dataclasses.replace(sampling, temperature=0.0)
    before = dataclasses.replace(engine.counters)
    rollouts = engine.generate(requests, sampling)
    seconds = engine.counters.seconds - before.seconds
    cpu_seconds = engine.counters.thread_seconds - before.thread_seconds
    if speculator:
        speculator.lengths.observe(rollouts)
        speculator.learn(epoch, rollouts)
    lengths = [len(r.tokens) for r in rollouts]
    stats = SpecStats.total((r.spec for r in rollouts if r.spec), longest_draft(config))
    row = Row(
        epoch=epoch,
        mode=mode,
        tokens=sum(lengths),
        tokens_per_s=sum(lengths) / seconds,
        ratio=float("nan"),
        tokens_per_cpu_s=sum(lengths) / cpu_seconds,
        cpu_ratio=float("nan"),
        tau=stats.tau,
        drafted=stats.drafted,
        accepted=stats.accepted,
        length_p50=float(np.percentile(lengths, 50)),
        length_p99=float(np.percentile(lengths, 99)),
        makespan_s=seconds,
    )
    return row, rollouts


def _write(out: Path, config: Config, engine: SpeculatingEngine, rows: list[Row]) -> None:
    facts = {
        "commit": git_commit(),
        "versions": installed_versions(),
        "config": dataclasses.asdict(config),
        "cost": dataclasses.asdict(engine.cost) if engine.cost else None,
        "rows": [dataclasses.asdict(row) for row in rows],
        "later_ratios": later_ratios(rows),
    }
    (out / "bench.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    _draw(out / "bench.png", rows)


def _draw(path: Path, rows: list[Row]) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    for mode in dict.fromkeys(row.mode for row in rows):
        own = [row for row in rows if row.mode == mode]
        epochs = [row.epoch for row in own]
        left.plot(epochs, [row.tokens_per_s for row in own], marker="o", label=mode)
        right.plot(epochs, [row.tau for row in own], marker="o", label=mode)
    for axes, label in ((left, "tokens per second"), (right, "tau: tokens per verify step with a draft")):
        axes.set(xlabel="epoch over the same problems", ylabel=label)
        axes.set_ylim(bottom=0)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=120)
