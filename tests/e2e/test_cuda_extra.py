"""What `pip install .[cuda]` resolves to on this platform (Linux x86-64), without installing it."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the CUDA extra is for Linux x86-64")
def test_the_cuda_extra_resolves_to_what_the_code_was_written_for(tmp_path) -> None:
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
    subprocess.run([*command, "--report", str(report), f"{ROOT}[cuda]"], check=True, timeout=850)
    found = {
        item["metadata"]["name"].lower(): item["metadata"]
        for item in json.loads(report.read_text())["install"]
    }
    assert found["torch"]["version"].split("+")[0] == "2.13.0"
    assert found["vllm"]["version"] == "0.32.0"
    assert found["torchtitan"]["version"] == "0.3.0"
    assert found["transformers"]["version"] >= "5.16.1"
    # The wheel's own word: no other torch fits this vLLM.
    assert [x for x in found["vllm"]["requires_dist"] if x.replace(" ", "").startswith("torch==2.13.0")]
