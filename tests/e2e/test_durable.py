"""A run that was stopped goes on as if it had not been."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from torchspec.config_load import load
from torchspec.draft.eagle3 import DraftSpec
from torchspec.draft.layouts import LAYOUTS, renamed, spec_from_json
from torchspec.export_run import export_run
from torchspec.metrics import read_metrics

HERE = Path(__file__).parent
ROOT = HERE.parents[1]

pytestmark = pytest.mark.e2e


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
    return [
        {name: value for name, value in row.items() if not name.startswith("perf/") and name != "time"}
        for row in read_metrics(folder)
    ]


def rollouts(*logs: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for log in logs for line in Path(f"{log}.0").read_text().splitlines()]


def assert_same_tensors(one: Path, other: Path) -> None:
    for path in one.glob("*.safetensors"):
        a, b = load_file(path), load_file(other / path.name)
        assert a.keys() == b.keys()
        assert all(torch.equal(a[name], b[name]) for name in a), path


@pytest.fixture(scope="module")
def story(tmp_path_factory) -> tuple[Path, str]:
    """`a` makes ten steps; `b` is killed in its eighth, told to stop in the seventh and the ninth, and ends."""
    folder = tmp_path_factory.mktemp("durable")

    def session(run_name: str, log: str, **what: Any) -> dict[str, Any]:
        overrides = [f"--run.dir={folder}", f"--run.name={run_name}"]
        return {"log": str(folder / log), "overrides": overrides, **what}

    output = run(
        [
            session("a", "whole"),
            session("b", "killed", kill_at=8),
            session("b", "told", stop_at=7, stop_in="rollout"),
            session("b", "told_again", stop_at=9, stop_in="update"),
            session("b", "last"),
        ]
    )
    assert statuses(output) == [0, -9, 0, 0, 0], output[-3000:]
    return folder, output


def test_ten_steps_are_five_and_a_kill_and_five(story) -> None:
    """Bitwise: weights, moments, rollouts under speculation with a sampling draft, metrics."""
    folder, output = story
    assert [line.split("/")[-1] for line in output.splitlines() if line.startswith("resumed from")] == [
        "step-000005",
        "step-000006",
        "step-000008",
    ]
    assert_same_tensors(*(folder / name / "checkpoints" / "step-000010" for name in "ab"))
    for model in ("policy", "draft"):
        assert_same_tensors(folder / "a" / model, folder / "b" / model)
    rows = measured(folder / "a")
    assert [row["step"] for row in rows] == list(range(11))
    assert measured(folder / "b") == rows
    whole = rollouts(folder / "whole")

    def after(*done: int) -> list[dict[str, Any]]:
        return [row for row in whole if row["done"] in done]

    assert rollouts(folder / "killed") == after(0, 1, 2, 3, 4, 5, 6, 7)
    assert rollouts(folder / "told") == [row for row in after(5) if row["draft_version"] == 4][-12:]
    assert rollouts(folder / "told_again") == after(6, 7, 8)
    assert rollouts(folder / "last") == after(8, 9, 10)
    # It was a run in which all of this could have differed.
    assert len({row["reward/mean"] for row in rows[1:]}) == 10
    assert len({row["policy/grad_norm"] for row in rows[1:]}) == 10
    assert all(row["rollout/tau"] > 1.2 for row in rows[1:])
    assert {row["draft_version"] for row in whole} == {0, 2, 4, 6, 8, 10}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_newest_checkpoint_is_exported_as_it_was_served(story, tmp_path, layout) -> None:
    folder, _ = story
    said = export_run(load(folder / "b" / "config.toml"), tmp_path / "out", layout)
    assert f"step 10 of {folder}/b" in said
    assert_same_tensors(tmp_path / "out" / "policy", folder / "b" / "policy")
    config = json.loads((tmp_path / "out" / "draft" / "config.json").read_text())
    served = json.loads((folder / "b" / "draft" / "config.json").read_text())
    assert spec_from_json(config) == DraftSpec.from_hf_config(served)
    theirs = load_file(tmp_path / "out" / "draft" / "model.safetensors")
    ours = load_file(folder / "b" / "draft" / "model.safetensors")
    assert theirs.keys() == {renamed(name, layout) for name in ours}
    assert all(torch.equal(theirs[renamed(name, layout)], x) for name, x in ours.items())


def test_a_finished_run_says_so(story) -> None:
    folder, _ = story
    facts = json.loads((folder / "b" / "run.json").read_text())
    assert facts["finished"]
    assert [session["step"] for session in facts["resumed"]] == [5, 6, 8]


def test_a_signal_ends_a_session_with_status_0_and_a_word(story) -> None:
    _, output = story
    assert [line for line in output.splitlines() if line.startswith("stopped")] == [
        "stopped; the same command goes on after step 6",
        "stopped; the same command goes on after step 8",
    ]
