"""A rank that dies ends the job everywhere, soon."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

HERE = Path(__file__).parent

pytestmark = pytest.mark.dist


def test_a_killed_rank_ends_the_job() -> None:
    torchrun = str(Path(sys.executable).with_name("torchrun"))
    command = [torchrun, "--standalone", "--nproc_per_node=2", str(HERE / "dying.py")]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parents[1])}
    started = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=180)
    assert done.returncode != 0
    assert "-9" in done.stderr
    # Imports included; torchrun gives the others 30 s to end before it kills them.
    assert time.monotonic() - started < 120
