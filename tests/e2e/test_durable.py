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
    """`whole` makes ten steps; `killed` is killed in its eighth, and started again."""
    folder = tmp_path_factory.mktemp("durable")
    runs = ["--run.dir", str(folder)]
    output = run(
        [
            {"log": str(folder / "whole"), "overrides": [*runs, "--run.name=a"]},
            {"log": str(folder / "first"), "overrides": [*runs, "--run.name=b"], "kill_at": 8},
            {"log": str(folder / "second"), "overrides": [*runs, "--run.name=b"]},
        ]
    )
    assert statuses(output) == [0, -9, 0], output[-3000:]
    return folder, output


def test_ten_steps_are_five_and_a_kill_and_five(story) -> None:
    """Bitwise: weights, moments, rollouts under speculation with a sampling draft, metrics."""
    folder, output = story
    assert f"resumed from {folder}/b/checkpoints/step-000005" in output
    for step in ("step-000005", "step-000010"):
        assert_same_tensors(folder / "a" / "checkpoints" / step, folder / "b" / "checkpoints" / step)
    for model in ("policy", "draft"):
        assert_same_tensors(folder / "a" / model, folder / "b" / model)
    rows = measured(folder / "a")
    assert [row["step"] for row in rows] == list(range(11))
    assert measured(folder / "b") == rows
    whole = rollouts(folder / "whole")
    assert rollouts(folder / "first")[: len(whole) // 2] == whole[: len(whole) // 2]
    resumed = rollouts(folder / "second")
    assert resumed == whole[-len(resumed) :]
    assert {row["done"] for row in resumed} == {5, 6, 7, 8, 9, 10}
    # It was a run in which all of this could have differed.
    assert len({row["reward/mean"] for row in rows[1:]}) == 10
    assert len({row["policy/grad_norm"] for row in rows[1:]}) == 10
    assert all(row["rollout/tau"] > 1.2 for row in rows[1:])
    assert {row["draft_version"] for row in resumed} == {0, 4, 6, 8, 10}


def test_a_finished_run_says_so(story) -> None:
    folder, _ = story
    facts = json.loads((folder / "b" / "run.json").read_text())
    assert facts["finished"]
    assert [session["step"] for session in facts["resumed"]] == [5]
