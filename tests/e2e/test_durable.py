"""A run that was stopped goes on as if it had not been."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from torchspec.commands.export import export_run
from torchspec.config.load import load
from torchspec.drafts.eagle3.checkpoint import LAYOUTS, renamed, spec_from_json
from torchspec.drafts.eagle3.spec import Eagle3Spec
from torchspec.metrics.writer import read_metrics
from torchspec.speculation.cost_table import CostTable

HERE = Path(__file__).parent
ROOT = HERE.parents[1]

pytestmark = pytest.mark.e2e

EVALUATED = 8
"""Rollouts of the evaluation after step 5, with the draft and the frozen one: before the checkpoint."""


def run(scenarios: list[dict[str, Any]], timeout: int = 400) -> str:
    command = [sys.executable, str(HERE / "durable_run.py"), json.dumps(scenarios)]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{HERE}"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=timeout)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout + done.stderr


def statuses(output: str) -> list[int]:
    return [int(line.split()[-1]) for line in output.splitlines() if line.startswith("exit status")]


def measured(folder: Path) -> list[dict[str, Any]]:
    """The metrics, less what a clock or the machine had a say in."""
    timed = re.compile(r"perf/|time$|speculation/(estimated|measured)$")
    return [
        {name: value for name, value in row.items() if not timed.match(name)} for row in read_metrics(folder)
    ]


def rollouts(*logs: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for log in logs for line in Path(f"{log}.0").read_text().splitlines()]


def assert_same_tensors(one: Path, other: Path) -> None:
    for path in one.glob("*.safetensors"):
        a, b = load_file(path), load_file(other / path.name)
        assert a.keys() == b.keys()
        assert all(torch.equal(a[name], b[name]) for name in a), path


def session(folder: Path, run_name: str, log: str, **what: Any) -> dict[str, Any]:
    """One session of a run of `folder`."""
    budget = {"budget.rule": "price", "budget.cost_table": folder / "cost.json"}
    options = {"run.dir": folder, "run.name": run_name, **budget}
    overrides = [f"--{key}={value}" for key, value in options.items()]
    return {"log": str(folder / log), "overrides": overrides, **what}


@pytest.fixture(scope="module")
def story(tmp_path_factory) -> tuple[Path, str]:
    """`a` makes ten steps; `b` is killed in its eighth, and started again."""
    folder = tmp_path_factory.mktemp("durable")
    # Two runs measure two cost tables, and draft otherwise; a run that is resumed keeps its own.
    CostTable.linear(base=1e-3, per_token=1e-6).save(folder / "cost.json")
    output = run(
        [
            session(folder, "a", "whole"),
            session(folder, "b", "killed", kill_at=8),
            session(folder, "b", "resumed"),
        ]
    )
    assert statuses(output) == [0, -9, 0], output[-3000:]
    return folder, output


def resumptions(output: str) -> list[str]:
    return [line.split("/")[-1] for line in output.splitlines() if line.startswith("resumed from")]


def of_steps(rows: list[dict[str, Any]], *done: int) -> list[dict[str, Any]]:
    return [row for row in rows if row["done"] in done]


def assert_same_runs(one: Path, other: Path) -> None:
    assert_same_tensors(*(folder / "checkpoints" / "step-000010" for folder in (one, other)))
    for model in ("policy", "draft"):
        assert_same_tensors(one / model, other / model)
    assert measured(other) == measured(one)


def test_ten_steps_are_five_and_a_kill_and_five(story) -> None:
    """Bitwise: weights, moments, rollouts, metrics; with a sampling draft, a suffix drafter and budgets."""
    folder, output = story
    assert resumptions(output) == ["step-000005"]
    assert_same_runs(folder / "a", folder / "b")
    whole = rollouts(folder / "whole")
    assert rollouts(folder / "killed") == of_steps(whole, 0, 1, 2, 3, 4, 5, 6, 7)
    assert rollouts(folder / "resumed") == of_steps(whole, 5, 6, 7, 8, 9, 10)[EVALUATED:]
    # It was a run in which all of this could have differed.
    rows = measured(folder / "a")
    assert [row["step"] for row in rows] == list(range(11))
    assert len({row["reward/mean"] for row in rows[1:]}) == 10
    assert len({row["policy/grad_norm"] for row in rows[1:]}) == 10
    assert all(row["rollout/tau"] > 1.2 for row in rows[1:])
    assert {row["draft_version"] for row in whole} == {0, 2, 4, 6, 8, 10}


@pytest.mark.slow
def test_a_signal_ends_a_session_and_nothing_is_lost(story) -> None:
    """SIGTERM while the engine generates, Ctrl-C between the packs of an update: status 0, and bitwise the run
    that was left alone."""
    folder, _ = story
    output = run(
        [
            session(folder, "c", "told", stop_at=7, stop_in="rollout"),
            session(folder, "c", "told again", stop_at=9, stop_in="update"),
            session(folder, "c", "last"),
        ]
    )
    assert statuses(output) == [0, 0, 0], output[-3000:]
    assert resumptions(output) == ["step-000006", "step-000008"]
    assert [line for line in output.splitlines() if line.startswith("stopped")] == [
        "stopped; the same command goes on after step 6",
        "stopped; the same command goes on after step 8",
    ]
    assert_same_runs(folder / "a", folder / "c")
    assert rollouts(folder / "told again") == of_steps(rollouts(folder / "whole"), 6, 7, 8)
    assert rollouts(folder / "last") == of_steps(rollouts(folder / "whole"), 8, 9, 10)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_newest_checkpoint_is_exported_as_it_was_served(story, tmp_path, layout) -> None:
    folder, _ = story
    if layout == "eagle3":  # one process exports what any layout has trained
        config = (folder / "b" / "config.toml").read_text()
        assert "\ncp = 1\n" in config
        (folder / "b" / "config.toml").write_text(config.replace("\ncp = 1\n", "\ncp = 4\n"))
    said = export_run(load(folder / "b" / "config.toml"), tmp_path / "out", layout)
    assert f"step 10 of {folder}/b" in said
    assert_same_tensors(tmp_path / "out" / "policy", folder / "b" / "policy")
    config = json.loads((tmp_path / "out" / "draft" / "config.json").read_text())
    served = json.loads((folder / "b" / "draft" / "config.json").read_text())
    assert spec_from_json(config) == Eagle3Spec.from_hf_config(served)
    theirs = load_file(tmp_path / "out" / "draft" / "model.safetensors")
    embedding = theirs.pop("embed_tokens.weight", None)
    policy = load_file(tmp_path / "out" / "policy" / "model.safetensors")
    assert (
        embedding is None
        if layout == "eagle3"
        else torch.equal(embedding, policy["model.embed_tokens.weight"])
    )
    ours = load_file(folder / "b" / "draft" / "model.safetensors")
    assert theirs.keys() == {renamed(name, layout) for name in ours}
    assert all(torch.equal(theirs[renamed(name, layout)], x) for name, x in ours.items())


def test_a_finished_run_says_so(story) -> None:
    folder, _ = story
    facts = json.loads((folder / "b" / "run.json").read_text())
    assert facts["finished"]
    assert [session["step"] for session in facts["resumed"]] == [5]
