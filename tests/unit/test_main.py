"""What the entry scripts say, and how they end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from torchspec.commands.main import main
from torchspec.errors import ConfigError, GuardStop

ROOT = Path(__file__).parents[2]
ENV = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
RUN = "import sys; from torchspec.commands.main import main; sys.exit(main(command, sys.argv[1:], 'usage'))"


@pytest.mark.parametrize(
    ("program", "status"),
    [
        ("train.py --help", 0),
        ("train.py -h", 0),
        ("rollout.py --help", 0),
        ("rollout.py", 2),
        ("train.py", 2),
        ("many.py --help", 0),
        ("many.py x", 1),
    ],
)
def test_a_reader_that_leaves_gets_no_traceback(tmp_path, program, status) -> None:
    script, *rest = program.split()
    many = tmp_path / "many.py"
    many.write_text("def command(_):\n    for i in range(9999): print('line', i, flush=True)\n" + RUN)
    path = many if script == "many.py" else ROOT / script
    process = subprocess.Popen(
        [sys.executable, path, *rest], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENV, text=True
    )
    assert process.stdout
    assert process.stderr
    process.stdout.readline()
    process.stdout.close()
    said = process.stderr.read()
    assert process.wait(timeout=120) == status
    process.stderr.close()
    assert "Traceback" not in said
    assert "BrokenPipe" not in said


STUCK = {
    "a loop that catches everything": "while True:\n        try: time.sleep(0.01)\n        except BaseException: pass",
    "a lock": "import threading\n    while True:\n        try: threading.Lock().acquire() or lock.acquire()\n"
    "        except BaseException: lock = threading.Lock(); lock.acquire()",
    "an exit that waits": "import threading\n    threading.Thread(target=time.sleep, args=(99,)).start()\n"
    "    time.sleep(99)",
    "a handler that goes on": "try: time.sleep(99)\n    finally: time.sleep(99)",
    "a child": "import subprocess\n    while True:\n        try: subprocess.run(['sleep', '9'], stdout=-3, stderr=-3)\n"
    "        except BaseException: pass",
    "nothing": "time.sleep(99)",
}


def test_ctrl_c_ends_a_command_within_five_seconds_whatever_it_does(tmp_path) -> None:
    children = {}
    for name, body in STUCK.items():
        path = tmp_path / f"{name.replace(' ', '_')}.py"
        path.write_text(f"import time\ndef command(_):\n    print('on', flush=True)\n    {body}\n{RUN}\n")
        children[name] = subprocess.Popen(
            [sys.executable, path, "x"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENV, text=True
        )
    for child in children.values():
        assert child.stdout
        assert child.stdout.readline() == "on\n"
    time.sleep(0.2)
    for child in children.values():
        child.send_signal(signal.SIGINT)
    asked, ended = time.monotonic(), {}
    for name, child in children.items():
        _, said = child.communicate(timeout=20)
        ended[name] = (child.returncode, "Traceback" in said, round(time.monotonic() - asked, 1))
    assert all(state[:2] == (130, False) for state in ended.values()), ended
    assert max(state[2] for state in ended.values()) < 7, ended


@pytest.mark.parametrize(
    ("error", "rank", "status", "line"),
    [
        (GuardStop("x"), "0", 3, "stopped: x"),
        (GuardStop("x"), "3", 3, "stopped: x [rank 3]"),
        (ConfigError("x"), "0", 2, "error: x"),
        (ConfigError("x"), "2", 2, "error: x [rank 2]"),
        (OSError(28, "No space left on device", "f.jsonl"), "0", 3, "stopped: No space left on device (f.jsonl); "),
        (OSError(122, "x"), "1", 3, "stopped: Disk quota exceeded; the same command goes on once the "),
        (KeyboardInterrupt(), "1", 130, "stopped: interrupted [rank 1]"),
    ],
)  # fmt: skip
def test_an_end_is_one_line_with_the_rank(monkeypatch, capsys, error, rank, status, line) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr(time, "sleep", lambda _: None)

    def command(_: list[str]) -> None:
        raise error

    assert main(command, ["x"], "") == status
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(line)
    assert said.endswith(f" [rank {rank}]" if rank != "0" else said[-1])


def test_warnings_of_other_ranks_name_the_rank() -> None:
    code = (
        "import logging; from torchspec.commands.main import main;"
        "main(lambda _: logging.getLogger('torchspec.training.guards').warning('beyond'), ['x'], '')"
    )
    for rank, line in (("0", "beyond"), ("5", "beyond [rank 5]")):
        done = subprocess.run(
            [sys.executable, "-c", code], env=ENV | {"RANK": rank}, capture_output=True, text=True
        )
        assert done.stderr.splitlines() == [line]


def test_a_defect_is_a_traceback() -> None:
    def command(_: list[str]) -> None:
        raise RuntimeError("defect")

    with pytest.raises(RuntimeError, match="defect"):
        main(command, ["x"], "")
