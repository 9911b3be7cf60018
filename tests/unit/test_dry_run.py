"""What a run would need, before there is one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from torchspec.config import ConfigError
from torchspec.config_load import load
from torchspec.dry_run import MB, estimate, policy_spec, report

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "configs" / "demo_cpu.toml"
SAVING = ["--train.activation_checkpointing", "true", "--draft.row_block", "512"]


def measured_mb(folder: Path, *overrides: str) -> float:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    environment |= {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    command = [sys.executable, str(Path(__file__).with_name("measure_update.py")), str(DEMO), str(folder)]
    done = subprocess.run([*command, *overrides], capture_output=True, text=True, env=environment, check=True)
    return float(done.stdout.split()[-1])


@pytest.mark.parametrize(
    "overrides", [pytest.param([], marks=pytest.mark.slow), SAVING], ids=["demo", "saving"]
)
def test_the_estimate_is_within_a_tenth_of_the_measured_peak(tmp_path, overrides) -> None:
    """Of an update of policy and draft on two full packs, as the resident set of a process grows."""
    config = load(DEMO, overrides)
    expected = estimate(config, policy_spec(config), ranks=1).training_peak / MB
    assert measured_mb(tmp_path, *overrides) == pytest.approx(expected, rel=0.1)


def test_any_world_on_one_cpu(tmp_path) -> None:
    text = report(load(DEMO, ["--parallel.cp", "2"]), "64")
    assert "mesh: 64 ranks = pp 1 x dp_shard 32 x cp 2" in text
    assert "run.name = 'demo'" in text
    rows = {line.split()[0]: line.split()[1] for line in text.splitlines() if line[:1].isalpha()}
    one = {x.split()[0]: x.split()[1] for x in report(load(DEMO), "").splitlines() if x[:1].isalpha()}
    assert float(rows["parameters"]) < float(one["parameters"]) / 16
    assert float(rows["optimizer"]) == pytest.approx(2 * float(rows["parameters"]), abs=0.15)
    assert float(rows["activations"]) == pytest.approx(float(one["activations"]) / 2, rel=0.05)
    assert rows["kv_cache"] == one["kv_cache"] == "256.0"


def test_an_8b_policy_needs_no_weights(tmp_path) -> None:
    shape = {"vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-6}
    other = {"architectures": ["Qwen3ForCausalLM"], "rope_theta": 1e6, "max_position_embeddings": 40960}
    (tmp_path / "config.json").write_text(json.dumps({**shape, **heads, **other}))
    config = load(ROOT / "configs" / "qwen3_8b_8gpu.toml", ["--model.source", str(tmp_path)])
    memory = estimate(config, policy_spec(config), ranks=8)
    draft = 4096 * (3 * 4096 + 2 * 4096 + 32 * 128 + 3 * 12288 + 32000) + 2 * 2 * 4096 * 8 * 128 + 4096**2
    assert memory.parameters * 8 / 4 == pytest.approx(8.19e9 + draft, rel=0.02)
    assert memory.optimizer == 2 * memory.parameters


@pytest.mark.parametrize(("world", "message"), [("0", "1 or more"), ("x", "a number of ranks")])
def test_a_world_must_be_a_number(world, message) -> None:
    with pytest.raises(ConfigError, match=message):
        report(load(DEMO), world)
