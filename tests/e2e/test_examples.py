"""The examples, as their pages say to run them; shortened."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from torchspec.metrics.writer import read_metrics

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.e2e


def train(config: Path, run_dir: Path, **overrides: object) -> list[dict[str, float]]:
    """Run `config` in one process with its own folder on the path, and return its metrics."""
    keys = {"run.dir": run_dir, **overrides}
    flags = [word for key, value in keys.items() for word in (f"--{key}", str(value))]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(config.parent)}
    done = subprocess.run(
        [sys.executable, "train.py", str(config), *flags],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=env,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (folder,) = (path for path in run_dir.iterdir() if path.name != "cache")
    return read_metrics(folder)


def test_a_reward_of_the_users_is_learned_from(tmp_path) -> None:
    short = {
        "run.steps": 2,
        "warmup.steps": 20,
        "warmup.draft_steps": 2,
        "rollout.problems_per_step": 4,
        "rollout.samples_per_problem": 4,
        "data.size": 64,
        "data.eval_size": 4,
        "eval.every": 0,
    }
    rows = train(ROOT / "examples" / "custom_reward" / "run.toml", tmp_path, **short)
    steps = [row for row in rows if row["step"] > 0]
    assert len(steps) == 2
    for row in steps:
        assert math.isfinite(row["policy/loss"])
        assert 0 <= row["reward/letters:right_letters"] <= 1
