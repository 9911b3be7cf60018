"""Record the metrics of the shipped CPU configs, shortened, and compare two recordings bit by bit.

A change that claims to leave behaviour alone is checked with it, on one machine:

    git worktree add ../before COMMIT
    python tests/metrics_record.py record before.json --root ../before
    python tests/metrics_record.py record after.json
    python tests/metrics_record.py compare before.json after.json

Floats are written as hexadecimal text, so equal means equal in every bit. Times are left out, and so is what
depends on a measurement of the machine: the hybrid config gets a cost table that is given, not measured.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
COSTS = {
    "tokens": [1, 64, 128, 512, 1088],
    "batches": [1, 16, 64],
    "seconds": [
        [0.002, 0.0028, 0.0042, 0.012, 0.024],
        [0.0025, 0.0035, 0.005, 0.0134, 0.0255],
        [0.004, 0.0055, 0.0073, 0.0165, 0.029],
    ],
    "draft": [[0.0008, 0.0004], [0.001, 0.0005], [0.0016, 0.0008]],
}
RUNS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "demo": (
        2,
        "demo_cpu",
        {"run.steps": 4, "warmup.steps": 24, "data.size": 256, "eval.every": 2, "data.eval_size": 16},
    ),
    "hybrid": (1, "hybrid_cpu", {"run.steps": 8, "warmup.steps": 24, "data.size": 32}),
    "pipeline": (2, "pipeline_cpu", {"run.steps": 3}),
}
TIMES = ("perf/", "speculation/measured")
RENAMED = {
    "speculation/eagle3_": "speculation/model_",
}
"""Prefixes of metrics that got another name, old and new."""


def record(root: Path) -> dict[str, list[dict[str, str]]]:
    """Run every config of `RUNS` with the code in `root`; returns the rows of metrics.jsonl by config."""
    found = {}
    for name, (ranks, config, options) in RUNS.items():
        with tempfile.TemporaryDirectory() as folder:
            costs = Path(folder) / "cost.json"
            costs.write_text(json.dumps(COSTS))
            options = {**options, "run.dir": folder, "budget.cost_table": str(costs)}
            arguments = [f"--{key}={value}" for key, value in options.items()]
            launch = [sys.executable]
            if ranks > 1:
                launch += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
            command = [*launch, "train.py", f"configs/{config}.toml", *arguments]
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}
            subprocess.run(command, cwd=root, env=environment, check=True)
            rows = (Path(folder) / name / "metrics.jsonl").read_text().splitlines()
            found[name] = [_exact(json.loads(row)) for row in rows]
    return found


def _exact(row: dict[str, Any]) -> dict[str, str]:
    """Every value as text that says all its bits, times left out, under the metric's present name."""
    values = {}
    for name, value in row.items():
        if name == "time" or name.startswith(TIMES):
            continue
        for old, new in RENAMED.items():
            name = name.replace(old, new)
        values[name] = float(value).hex()
    return values


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """What is not equal, a line each: config, row, metric, both values."""
    found = []
    for name in sorted({*before, *after}):
        old, new = before.get(name, []), after.get(name, [])
        if len(old) != len(new):
            found.append(f"{name}: {len(old)} rows before, {len(new)} after")
        for a, b in zip(old, new):
            step = float.fromhex(a["step"])
            found += [
                f"{name} step {step:.0f}: {key} was {_shown(a.get(key))}, is {_shown(b.get(key))}"
                for key in sorted({*a, *b})
                if a.get(key) != b.get(key)
            ]
    return found


def _shown(value: str | None) -> str:
    return "absent" if value is None else repr(float.fromhex(value))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    recorder = commands.add_parser("record")
    recorder.add_argument("out", type=Path)
    recorder.add_argument("--root", type=Path, default=ROOT, help="checkout whose code is run")
    comparer = commands.add_parser("compare")
    comparer.add_argument("before", type=Path)
    comparer.add_argument("after", type=Path)
    options = parser.parse_args()
    if options.command == "record":
        options.out.write_text(json.dumps(record(options.root.resolve()), indent=1) + "\n")
        return 0
    recordings = [json.loads(path.read_text()) for path in (options.before, options.after)]
    found = differences(*recordings)
    rows = sum(len(x) for x in recordings[1].values())
    print("\n".join(found) or f"equal in every bit: {rows} rows of {', '.join(recordings[1])}")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
