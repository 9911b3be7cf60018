"""A checkpoint that an earlier version wrote (tests/data/old_run) goes on with today's code."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import tomli_w

from torchspec.config.old_names import KEYS, translate
from torchspec.metrics.writer import read_metrics

ROOT = Path(__file__).parents[2]
OLD = ROOT / "tests" / "data" / "old_run"

pytestmark = pytest.mark.e2e

RESUME = """
from pathlib import Path
import torch
from safetensors.torch import load_file
from torchspec.checkpoint.checkpoint import tensors_of
from torchspec.config.load import load
from torchspec.trainer import Trainer

trainer = Trainer(load("now.toml", ["--run.steps", "3"]))
(shard,) = Path("runs/old/checkpoints/step-000002").glob("shard-*")
stored, held = load_file(shard), tensors_of(trainer.learner.optimizers)
assert stored.keys() == held.keys(), stored.keys() ^ held.keys()
for name, tensor in stored.items():
    assert torch.equal(tensor, getattr(held[name], "full_tensor", lambda: held[name])()), name
assert any(x.any() for name, x in stored.items() if ".adam." in name)
print("restored", len(stored), "at step", trainer.progress.done, "window", trainer.engine.drain_stats().window_bytes)
trainer.fit()
trainer.close()
"""


def test_the_old_run_has_the_old_names() -> None:
    text = (OLD / "config.toml").read_text()
    for old in KEYS:
        section, key = old.split(".")
        assert key in tomllib.loads(text)[section]
    assert 'attention = "passq"' in text


def test_a_run_of_before_goes_on(tmp_path) -> None:
    """Weights, moments, schedules, the suffix window and the order of problems are the checkpoint's."""
    shutil.copytree(OLD, tmp_path / "runs" / "old")
    shutil.copy(OLD / "cost.json", tmp_path)
    now = translate(tomllib.loads((OLD / "old.toml").read_text()))
    (tmp_path / "now.toml").write_text(tomli_w.dumps(now))
    before = read_metrics(OLD)
    done = subprocess.run(
        [sys.executable, "-c", RESUME],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    said = re.search(r"restored (\d+) at step 2 window (\d+)", done.stdout)
    assert said
    assert int(said[1]) > 100
    window = int(said[2])
    assert window == round(before[-1]["speculation/window_mb"] * 2**20)
    assert re.search(r"step +3/3", done.stdout)

    folder = tmp_path / "runs" / "old"
    rows = read_metrics(folder)
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert rows[:2] == before
    assert rows[2]["speculation/window_mb"] * 2**20 > window
    manifest = json.loads((folder / "checkpoints" / "step-000003" / "manifest.json").read_text())
    assert manifest["updates"] == {"policy": 3, "draft": 3}
    assert json.loads((folder / "run.json").read_text())["resumed"][0]["step"] == 2
