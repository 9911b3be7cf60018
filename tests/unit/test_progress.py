"""`make test`: a line per file, pytest's count last, and the files of ALONE on one worker."""

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


PARALLEL = ["-n", "2", "--dist", "loadfile", "--no-loadscope-reorder"]


def run_tests(folder: Path, files: dict[str, str], options: list[str]) -> list[str]:
    """Return the lines that pytest prints on `files` with the conftest.py of this repository."""
    for name, text in (
        files | {"tests/conftest.py": CONFTEST.read_text(), "pytest.ini": "[pytest]\n"}
    ).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST")}
    command = [sys.executable, "-m", "pytest", "-q", "--tb=no", *options, "tests"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    return done.stdout.splitlines()


@pytest.mark.parametrize("options", [[], PARALLEL], ids=["alone", "parallel"])
def test_each_file_has_a_line_and_the_count_is_last(tmp_path: Path, options: list[str]) -> None:
    lines = run_tests(tmp_path, FILES, options)
    ended = [re.sub(r"[\d.]+ s$", "_ s", line) for line in lines if line.endswith(" s")]
    assert (sorted(ended) if options else ended) == [
        "tests/e2e/test_b.py: 1 passed, 1 failed, _ s",
        "tests/unit/test_a.py: 1 passed, 1 skipped, _ s",
        "tests/unit/test_main.py: 1 passed, _ s",  # of ALONE
    ]
    assert re.match(r"1 failed, 3 passed, 1 skipped in ", lines[-1])


def test_files_of_alone_share_a_worker(tmp_path: Path) -> None:
    text = "import os\ndef test_a(): open(os.environ['PYTEST_XDIST_WORKER'], 'w').close()\n"
    files = {f"tests/unit/test_{name}.py": text for name in ("main", "rewards", "interrupt")}
    lines = run_tests(tmp_path, files, PARALLEL)
    assert lines[-1].startswith("3 passed")
    assert len(list(tmp_path.glob("gw*"))) == 1
