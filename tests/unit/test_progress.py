"""The lines that `make test` prints: one per file, and pytest's count last."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).parents[1] / "conftest.py"
FILES = {
    "tests/unit/test_main.py": "def test_a(): pass\n",
    "tests/unit/test_a.py": "import pytest\ndef test_a(): pass\ndef test_b(): pytest.skip('b')\n",
    "tests/e2e/test_b.py": "import time\ndef test_a(): time.sleep(0.2)\ndef test_b(): assert 0\n",
}


@pytest.mark.parametrize("workers", [[], ["-n", "2", "--dist", "loadfile", "--no-loadscope-reorder"]])
def test_each_file_has_a_line_and_the_count_is_last(tmp_path: Path, workers: list[str]) -> None:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "tests" / "conftest.py").write_text(CONFTEST.read_text())
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST")}
    command = [sys.executable, "-m", "pytest", "-q", "--tb=no", *workers, "tests"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    lines = [re.sub(r"[\d.]+ s$", "_ s", line) for line in done.stdout.splitlines()]
    expected = [
        "tests/e2e/test_b.py: 1 passed, 1 failed, _ s",
        "tests/unit/test_a.py: 1 passed, 1 skipped, _ s",
        "tests/unit/test_main.py: 1 passed, _ s",  # of ALONE
    ]
    ended = [line for line in lines if line.endswith(" s")]
    assert (sorted(ended) if workers else ended) == expected, done.stdout + done.stderr
    assert re.match(r"1 failed, 3 passed, 1 skipped in ", lines[-1])
