"""Each mend is still needed by the vLLM that is installed, and takes. When a probe finds nothing, drop its mend."""

import json
import os
import subprocess
import sys

import pytest

from torchspec.rollout.vllm_cpu import MENDS

pytestmark = pytest.mark.e2e

PROBE = """
import json
from torchspec.rollout.vllm_setup import prepare_environment
from torchspec.rollout.vllm_cpu import MENDS, mend
prepare_environment("cpu")
pristine = {entry.name: entry.shows() for entry in MENDS}
first, second = mend(), mend()
print(json.dumps([pristine, first, second, {entry.name: entry.shows() for entry in MENDS}]))
"""


def test_every_mend_is_needed_and_takes():
    done = subprocess.run(  # a process of its own: here another test may have mended vLLM already
        [sys.executable, "-c", PROBE],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    pristine, first, second, mended = json.loads(done.stdout.splitlines()[-1])
    names = [entry.name for entry in MENDS]
    assert pristine == dict.fromkeys(names, True)
    assert first == names
    assert second == []
    assert mended == dict.fromkeys(names, False)
