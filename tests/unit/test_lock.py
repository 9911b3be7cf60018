"""Who owns a run's folder, and whether what it writes can be written."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException

from torchspec.checkpoint import lock as locks
from torchspec.checkpoint.cache import private_name, publish
from torchspec.checkpoint.lock import LOST_S, RunLock, own_run
from torchspec.checkpoint.writable import check_writable, no_room, writing
from torchspec.config.schema import Config
from torchspec.errors import ConfigError, GuardStop

ALONE: Any = SimpleNamespace(is_main=True, from_main=lambda x: x, barrier=lambda: None)


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path / "runs" / "r"


@pytest.fixture
def child():
    """A process of this machine that lives."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.wait()


def leave(folder: Path, content: str | dict[str, Any], age: float = 0.0) -> Path:
    """The lock that another owner has left, last refreshed `age` seconds ago."""
    path = folder.with_name(".r.lock")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    os.utime(path, (time.time() - age,) * 2)
    return path


def owner(pid: int, **changes: Any) -> dict[str, Any]:
    return {**locks._identity(pid), "since": "2026-01-02 03:04:05 +0000", "id": "x", **changes}


REFUSED = [
    ("a live process here", lambda pid: owner(pid), 0.0, r"process \d+ on \S+, since 2026-01-02"),
    ("a live one that stood still", lambda pid: owner(pid), 1e4, r"wait for its end, or choose another run\.name"),
    ("another machine", lambda pid: owner(pid, host="node7"), 30.0, r"on node7, .*last seen \d+ s ago \(it counts"),
    ("another container", lambda pid: owner(1, machine="other"), 30.0, r"process 1 on .*last seen"),
    ("not signed yet", lambda pid: "", 1.0, r"an owner that has not signed yet, last seen"),
    ("signed in part", lambda pid: '{"host": "no', 1.0, r"has not signed yet"),
    ("a clock ahead", lambda pid: owner(pid, host="node7"), -30.0, r"last seen 0 s ago"),
]  # fmt: skip


@pytest.mark.parametrize(("content", "age", "message"), [c[1:] for c in REFUSED], ids=[c[0] for c in REFUSED])
def test_a_living_owner_keeps_the_folder(folder, child, content, age, message) -> None:
    path = leave(folder, content(child.pid), age)
    before = path.read_text()
    config = Config()
    config.run.dir, config.run.name, config.run.overwrite = str(folder.parent), "r", True
    with pytest.raises(ConfigError, match=message) as error:
        own_run(config, ALONE)
    assert str(error.value).startswith(f"{folder} belongs to a run that is going on: ")
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)
    assert path.read_text() == before
    assert [p.name for p in folder.parent.iterdir()] == [".r.lock"]


def gone(child: subprocess.Popen) -> int:
    child.kill()
    child.wait()
    return child.pid


def zombie(child: subprocess.Popen) -> int:
    child.kill()
    while locks._started(child.pid):
        time.sleep(0.01)
    return child.pid


TAKEN = [
    ("a dead process here", lambda child: owner(child.pid) | {"pid": gone(child)}, 0.0),
    ("a zombie", lambda child: owner(child.pid) | {"pid": zombie(child)}, 0.0),
    ("a recycled number", lambda child: owner(child.pid, started="17"), 0.0),
    ("another machine, long silent", lambda child: owner(child.pid, host="node7"), LOST_S + 9),
    ("another container, long silent", lambda child: owner(1, machine="other"), LOST_S + 9),
    ("never signed", lambda child: "", LOST_S + 9),
    ("no lock's content", lambda child: "[1, 2]", LOST_S + 9),
]  # fmt: skip


@pytest.mark.parametrize(("content", "age"), [c[1:] for c in TAKEN], ids=[c[0] for c in TAKEN])
def test_a_dead_owners_folder_is_taken_over(folder, child, content, age) -> None:
    path = leave(folder, content(child), age)
    lock = RunLock(folder)
    assert json.loads(path.read_text())["pid"] == os.getpid()
    lock.check()
    lock.release()
    assert list(folder.parent.iterdir()) == []


@pytest.mark.parametrize("stale", [False, True], ids=["free", "of a dead owner"])
def test_of_many_that_come_at_once_one_gets_it(folder, child, stale) -> None:
    if stale:
        leave(folder, owner(child.pid, started="17"))
    got, refused, start = [], [], threading.Barrier(12)

    def come() -> None:
        start.wait()
        try:
            got.append(RunLock(folder))
        except ConfigError as error:
            refused.append(error)

    threads = [threading.Thread(target=come) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(got), len(refused)) == (1, 11)
    got[0].check()
    got[0].release()


def test_a_slow_judge_does_not_remove_the_lock_of_a_faster_one(folder, child, monkeypatch) -> None:
    """The slower process has judged the dead owner when the faster one takes the folder over."""
    leave(folder, owner(child.pid, started="17"))
    judge, faster = locks._alive, []

    def judge_slowly(*args: Any) -> str | None:
        verdict = judge(*args)
        monkeypatch.setattr(locks, "_alive", judge)
        faster.append(RunLock(folder))
        return verdict

    monkeypatch.setattr(locks, "_alive", judge_slowly)
    with pytest.raises(ConfigError, match="belongs to a run that is going on"):
        RunLock(folder)
    faster[0].check()
    faster[0].release()
    assert list(folder.parent.iterdir()) == []


def test_a_take_over_that_was_killed_is_named_with_its_remedy(folder, child) -> None:
    leave(folder, owner(child.pid, started="17"))
    taking = folder.with_name(".r.lock.taking")
    taking.touch()
    os.utime(taking, (time.time() - 60,) * 2)
    with pytest.raises(ConfigError, match=rf"took this run over from a dead one; remove {taking}"):
        RunLock(folder)


def test_an_owner_whose_folder_was_taken_learns_it_before_it_removes_anything(folder, monkeypatch) -> None:
    lock = RunLock(folder)
    leave(folder, owner(1, host="node7"))
    with pytest.raises(GuardStop, match=r"no longer this process's: .* names process 1 on node7"):
        lock.check()
    lock.release()
    assert lock.path.exists()  # the other's
    lock.path.unlink()
    with pytest.raises(GuardStop, match="is gone; nothing more is written there"):
        lock.check()


def test_the_owner_refreshes_the_lock_and_a_fork_does_not_release_it(folder, monkeypatch) -> None:
    monkeypatch.setattr(locks, "BEAT_S", 0.05)
    lock = RunLock(folder)
    os.utime(lock.path, (0, 0))
    time.sleep(0.5)
    assert lock.path.stat().st_mtime > 1e9
    if (pid := os.fork()) == 0:
        lock.release()
        os._exit(0)
    os.waitpid(pid, 0)
    lock.check()
    lock.release()
    RunLock(folder).release()


def test_two_runs_that_fill_the_cache_at_once_leave_one_whole_folder(tmp_path, monkeypatch) -> None:
    folder, names = tmp_path / "cache" / "start-1", []
    for pid in (1, 2):
        monkeypatch.setattr(os, "getpid", lambda pid=pid: pid)
        names.append(private_name(folder, ALONE))
    for i, private in enumerate(names):
        private.mkdir(parents=True)
        (private / "policy").write_text(str(i))
    assert publish(names[1], folder, ALONE)
    assert not publish(names[0], folder, ALONE)
    assert (folder / "policy").read_text() == "1"
    assert [p.name for p in folder.parent.iterdir()] == ["start-1"]


# Writing

UNWRITABLE = [
    ("under a file", "file/runs/r"),
    ("a file itself", "file/r"),
    ("no file system for files", "/proc/runs/r"),
    ("read-only", "/sys/runs/r"),
    ("a device", "/dev/full/runs"),
    ("too long", "x" * 300),
    ("a circle of links", "circle/r"),
]


@pytest.mark.parametrize("path", [c[1] for c in UNWRITABLE], ids=[c[0] for c in UNWRITABLE])
def test_what_cannot_be_written_is_refused_by_name(tmp_path, path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "circle").symlink_to("circle")
    with pytest.raises(ConfigError) as error:
        check_writable(tmp_path / path, "run.dir")
    assert str(error.value).startswith(f"run.dir {tmp_path / path}: nothing can be written in ")
    assert str(error.value).endswith("); give another path")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("path", ["new", "new/deep/er", "there", "there/new", "there/old.jsonl"])
def test_what_can_be_written_leaves_nothing(tmp_path, path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "old.jsonl").write_text("old")
    before = sorted(tmp_path.rglob("*"))
    check_writable(tmp_path / path, "--out")
    assert sorted(tmp_path.rglob("*")) == before
    assert (tmp_path / "there" / "old.jsonl").read_text() == "old"


def behind(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


FULL = [
    ("full", OSError(errno.ENOSPC, "x"), "No space left on device"),
    ("limit", OSError(errno.EFBIG, "x"), "File too large"),
    ("quota", OSError(errno.EDQUOT, "x"), "Disk quota exceeded"),
    ("read-only", OSError(errno.EROFS, "x", "f"), r"Read-only file system \(f\)"),
    ("broken", OSError(errno.EIO, "x"), "Input/output error"),
    ("behind another", behind(RuntimeError("writer"), OSError(errno.ENOSPC, "x")), "No space left on device"),
    ("safetensors", SafetensorError("Error while serializing: I/O error: x (os error 28)"), "No space left"),
    ("checkpoint", CheckpointException("write", {0: (OSError(errno.ENOSPC, "x"), None)}), "No space left"),
]  # fmt: skip


@pytest.mark.parametrize(("error", "said"), [c[1:] for c in FULL], ids=[c[0] for c in FULL])
def test_a_disk_that_takes_no_more_is_one_line_with_the_safe_step(tmp_path, error, said) -> None:
    (tmp_path / "checkpoints" / "step-000007").mkdir(parents=True)
    (tmp_path / "checkpoints" / ".step-000008.partial").mkdir(parents=True)
    with pytest.raises(GuardStop, match=said) as stop, writing(tmp_path / "metrics.jsonl", tmp_path):
        raise error
    text = str(stop.value)
    assert text.startswith(f"{tmp_path / 'metrics.jsonl'}: ")
    assert "all is safe up to " in text
    assert "step-000007; the same command goes on once the disk takes files again" in text
    assert "\n" not in text


@pytest.mark.parametrize(
    "error",
    [OSError(errno.ENOENT, "x"), OSError(errno.EPIPE, "x"), ValueError("x"), ConfigError("x"), GuardStop("y"),
     RuntimeError("os error 2")],
)  # fmt: skip
def test_other_errors_stay_what_they_are(tmp_path, error) -> None:
    assert no_room(error) is None
    with pytest.raises(type(error)) as raised, writing(tmp_path):
        raise error
    assert raised.value is error
