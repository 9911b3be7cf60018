"""The Triton kernels on the CPU, by Triton's interpreter: a process of its own, for the variable is read at import."""

import os
import subprocess
import sys
from pathlib import Path


def test_branch_kernels_in_the_interpreter():
    script = Path(__file__).with_name("triton_branch.py")
    done = subprocess.run(
        [sys.executable, script],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.strip() == "ok", done.stderr
