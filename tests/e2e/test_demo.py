"""The demo config, shortened, through the real command line; and user errors as users meet them."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from torchspec.metrics.writer import read_metrics
from torchspec.speculation.cost_table import CostTable

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "configs" / "demo_cpu.toml"
HYBRID = ROOT / "configs" / "hybrid_cpu.toml"
PIPELINE = ROOT / "configs" / "pipeline_cpu.toml"
TORCHRUN = str(Path(sys.executable).with_name("torchrun"))

pytestmark = pytest.mark.e2e


def run(*command: str, timeout: int = 600) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env, timeout=timeout)


def train_demo(folder: Path, *overrides: str, timeout: int = 600, config: Path = DEMO) -> Path:
    launch = [TORCHRUN, "--standalone", "--nproc_per_node=2", "train.py", str(config)]
    done = run(*launch, "--run.dir", str(folder), *overrides, timeout=timeout)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (folder / "stdout").write_text(done.stdout)
    return folder / "demo"


@pytest.fixture(scope="module")
def short_run(tmp_path_factory) -> Path:
    """Three steps of the demo on two ranks, which share every pack (the slow test has them share none)."""
    short = {
        "run.steps": "3",
        "warmup.steps": "6",
        "warmup.draft_steps": "2",
        "warmup.problems_per_step": "16",
        "rollout.problems_per_step": "4",
        "rollout.samples_per_problem": "4",
        "data.size": "64",
        "data.eval_size": "8",
        "eval.every": "2",
        "rl.minibatches": "2",
        "rl.kl_coef": "0.01",
        "parallel.cp": "2",
        "draft.row_block": "200",
    }
    return train_demo(tmp_path_factory.mktemp("runs"), *(f"--{k}={v}" for k, v in short.items()))


@pytest.mark.dist
def test_a_short_demo_leaves_finite_metrics(short_run) -> None:
    rows = read_metrics(short_run)
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert all(math.isfinite(value) for row in rows for value in row.values())
    for row in rows[1:]:
        assert row["rollout/tau"] >= 1
        assert row["draft/loss"] > 0
        assert row["policy/entropy"] > 0
        assert row["policy/kl_train_rollout"] < 1e-3  # fp32 on both sides
        assert {
            "policy/kl_reference",
            "policy/ratio",
            "draft/tau_simulated",
            "rollout/accept_0",
        } <= row.keys()
    for row in (rows[0], rows[2], rows[3]):
        assert {"eval/reward", "eval/tau", "eval/tau_frozen"} <= row.keys()


@pytest.mark.dist
def test_a_short_demo_leaves_everything_it_says(short_run) -> None:
    facts = json.loads((short_run / "run.json").read_text())
    assert "train.py" in facts["argv"][0]
    assert facts["commit"]
    assert facts["versions"]["torch"].startswith("2.13")
    assert "steps = 3" in (short_run / "config.toml").read_text()
    assert {p.name for p in (short_run / "plots").iterdir()} == {
        "reward.png",
        "tau.png",
        "acceptance.png",
        "time.png",
    }
    assert list((short_run / "tensorboard").iterdir())
    stdout = (short_run.parent / "stdout").read_text()
    assert sum(line.startswith("step ") for line in stdout.splitlines()) == 3
    assert f"vllm serve {short_run}/policy\n" in stdout
    assert f'"model": "{short_run}/draft"' in stdout
    assert not list(short_run.parent.rglob("*.partial"))


@pytest.mark.dist
def test_any_checkpoint_generates_scored_rollouts(short_run, tmp_path) -> None:
    out = tmp_path / "rollouts.jsonl"
    options = ["--policy", str(short_run / "policy"), "--draft", str(short_run / "draft"), "--limit", "3"]
    done = run(sys.executable, "rollout.py", "generate", str(DEMO), *options, "--out", str(out))
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) == 3 * 8
    assert len({row["problem_id"] for row in rows}) == 3
    for row in rows:
        assert len(row["tokens"]) == len(row["logprobs"]) > 0
        assert row["reward"] is not None
        assert row["spec"]["steps"] > 0
    assert "24 rollouts of 3 problems | reward" in done.stdout


@pytest.fixture(scope="module")
def hybrid_run(tmp_path_factory) -> Path:
    """Four steps of the hybrid example on two ranks, two epochs over eight problems."""
    folder = tmp_path_factory.mktemp("runs")
    short = {
        "run.steps": "4",
        "warmup.steps": "0",
        "warmup.draft_steps": "0",
        "rollout.problems_per_step": "4",
        "rollout.samples_per_problem": "4",
        "rollout.max_new_tokens": "32",
        "data.size": "8",
    }
    overrides = [f"--{k}={v}" for k, v in short.items()]
    launch = [TORCHRUN, "--standalone", "--nproc_per_node=2", "train.py", str(HYBRID)]
    done = run(*launch, "--run.dir", str(folder), *overrides)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return folder / "hybrid"


@pytest.mark.dist
def test_a_hybrid_run_reports_both_drafters(hybrid_run) -> None:
    rows = read_metrics(hybrid_run)
    assert all(math.isfinite(value) for row in rows for value in row.values())
    for row in rows:
        parts = [row[f"speculation/{name}_drafted"] for name in ("model", "suffix")]
        classes = [row[f"speculation/{name}_drafted"] for name in ("short", "medium", "long")]
        assert sum(parts) == sum(classes) > 0
        assert row["rollout/tau"] >= 1
        assert row["speculation/model_tau"] >= 1
        assert {"speculation/suffix_accept_15", "perf/draft_host_ms", "perf/learn_s"} <= row.keys()
        assert row["speculation/estimated"] > 0
        assert row["speculation/measured"] > 0
    assert rows[-1]["speculation/window_mb"] > rows[0]["speculation/window_mb"] > 0
    assert CostTable.load(hybrid_run / "cost.json").draft


def test_the_bench_compares_all_drafters_in_one_engine(hybrid_run, tmp_path) -> None:
    out = tmp_path / "bench"
    options = [
        "--policy",
        str(hybrid_run / "policy"),
        "--draft",
        str(hybrid_run / "draft"),
        "--out",
        str(out),
    ]
    options += ["--limit", "4", "--epochs", "2", "--greedy-check", "--rollout.samples_per_problem", "2"]
    options += ["--budget.cost_table", str(hybrid_run / "cost.json"), "--run.dir", str(tmp_path)]
    done = run(sys.executable, "rollout.py", "bench", str(HYBRID), *options)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "greedy tokens of off, model, suffix, hybrid are equal in every epoch" in done.stdout
    rows = json.loads((out / "bench.json").read_text())["rows"]
    assert [(row["epoch"], row["mode"]) for row in rows] == [
        (epoch, mode) for epoch in (1, 2) for mode in ("off", "model", "suffix", "hybrid")
    ]
    assert {row["tokens"] for row in rows} == {rows[0]["tokens"]}
    assert all(row["ratio"] == 1 and not sum(row["drafted"]) for row in rows if row["mode"] == "off")
    assert rows[6]["tau"] > 2  # the suffix drafter's second epoch
    assert (out / "bench.png").stat().st_size > 5000


@pytest.mark.dist
def test_a_pipeline_trains_and_refits(tmp_path) -> None:
    """Both stages' weights reach the engine: it samples with the trainer's probabilities after an update."""
    train_demo(tmp_path, "--rl.minibatches=2", "--rl.kl_coef=0.01", config=PIPELINE)
    rows = read_metrics(tmp_path / "pipeline")
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert all(math.isfinite(value) for value in row.values())
        assert row["policy/kl_train_rollout"] < 1e-3
        assert row["draft/loss"] > 0
        assert 0 <= row["perf/tap_wait"] < 1
    assert rows[1]["policy/kl_reference"] > 0


@pytest.mark.slow
@pytest.mark.timeout(2700)
@pytest.mark.dist
def test_the_demo_learns(tmp_path) -> None:
    """The headline of the project: reward rises, and co-training keeps the draft ahead of the frozen one."""
    rows = read_metrics(train_demo(tmp_path, timeout=2400))

    def mean(name: str, part: list[dict[str, Any]]) -> float:
        values = [row[name] for row in part if name in row]
        return sum(values) / len(values)

    tenth = len(rows) // 10
    assert mean("reward/mean", rows[-tenth:]) > mean("reward/mean", rows[1 : 1 + tenth]) + 0.1
    last = [row for row in rows if "eval/tau" in row][-1]
    assert last["eval/tau"] > last["eval/tau_frozen"] + 0.8
    assert last["eval/reward"] > rows[0]["eval/reward"] + 0.1


BAD_COMMANDS: list[tuple[list[str], str]] = [
    (["train.py", "nowhere.toml"], "nowhere.toml: no such config file"),
    (["train.py", str(DEMO), "--draft.tt_steps", "3"], "did you mean draft.ttt_steps?"),
    (["train.py", str(DEMO), "--data.task", "spel_backward"], "spell_backward"),
    (["train.py", str(DEMO), "--parallel.dp_shard", "2"], "need 2 ranks, but there are 1"),
    (["train.py", str(DEMO), "--draft.aux_layers", "[1, 2, 9]"], "three ascending ids from 0 to 4"),
    (["train.py", str(DEMO), "--rollout.max_new_tokens", "120"], "at most 8 fit;"),
    (["rollout.py", "generate", str(DEMO), "--out", "no/where/x.jsonl"], "its folder does not exist"),
    (
        ["rollout.py", "bench", str(HYBRID), "--out", "b", "--modes", "off,sufix"],
        "'sufix' is unknown; did you mean 'suffix'? one of: off",
    ),
    (["train.py", str(HYBRID), "--budget.cost_table", "no.json"], "'no.json': there is no such file"),
    (["rollout.py", "generat", str(DEMO)], "unknown command 'generat'"),
]


@pytest.mark.parametrize(("command", "message"), BAD_COMMANDS, ids=lambda x: " ".join(x)[-60:])
def test_user_errors_are_one_line_and_status_2(tmp_path, command, message) -> None:
    done = run(sys.executable, *command, "--run.dir", str(tmp_path / "runs"))
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode == 2, done.stderr[-2000:]
    assert len(lines) == 1, done.stderr[-2000:]
    assert message in lines[0]
    assert "Traceback" not in done.stderr
    # At most the tiny base model is made, in the cache; never a run folder.
    assert not (tmp_path / "runs" / "demo").exists()
