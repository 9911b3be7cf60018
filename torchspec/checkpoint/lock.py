"""Who owns a run's folder: a lock file beside it, which one process holds.

No file system's own locks are used, because shared ones often have none. The file is created where none is (O_EXCL),
and its owner refreshes its time of modification every `BEAT_S`. What is judged by time is judged by the clock of the
file system alone: machines' clocks differ.

The lock is beside the folder, not in it, because a new run replaces the folder.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import tempfile
import threading
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

from torchspec.checkpoint.writable import check_writable
from torchspec.config.schema import Config
from torchspec.distributed.mesh import Mesh
from torchspec.errors import ConfigError, GuardStop

BEAT_S = 10.0
LOST_S = 120.0
"""An owner on another machine that has not refreshed the lock for so long is taken to be dead."""
TAKING_S = 30.0
"""Taking over a dead owner's lock takes milliseconds; a file `.taking` of this age was left by a process that ended."""


class RunLock:
    """The ownership of one run's folder by this process, until `release` or the process's end.

    A lock left by a process of this machine that is dead is taken over at once. One left by another machine (or a
    container with processes of its own) is taken over when it has not been refreshed for `LOST_S` seconds.

    Raises:
        ConfigError: another process owns the folder.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder.with_name(f".{folder.name}.lock")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._record = {**_identity(os.getpid()), "since": time.strftime("%Y-%m-%d %H:%M:%S %z")}
        self._record["id"] = uuid.uuid4().hex
        while not self._create(self.path):
            self._remove_dead()
        self._ended = threading.Event()
        threading.Thread(target=self._refresh, name="run lock", daemon=True).start()
        atexit.register(self.release)

    def check(self) -> None:
        """Look again, right before anything is removed or written over.

        Raises:
            GuardStop: another process has taken the folder, because this one stood still for long.
        """
        owner = _read(self.path)
        if owner != self._record:
            raise GuardStop(
                f"{self._folder} is no longer this process's: {self.path} "
                f"{f'names {_name(owner)}' if owner else 'is gone'}; nothing more is written there"
            )

    def release(self) -> None:
        """Give the folder up. Does nothing in a fork of the owner."""
        atexit.unregister(self.release)
        self._ended.set()
        if self._record["pid"] == os.getpid() and _read(self.path) == self._record:
            self.path.unlink()

    def _create(self, path: Path) -> bool:
        try:
            handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileExistsError:
            return False
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as out:
                json.dump(self._record, out)
                out.flush()
                os.fsync(out.fileno())
        except OSError:  # the disk is full
            path.unlink()
            raise
        return True

    def _remove_dead(self) -> None:
        """Remove the lock of an owner that is dead.

        Only the creator of the file `.taking` may remove somebody else's lock, and it judges the lock once more
        before it does. Without that file, two processes could judge one dead lock, and the slower one would remove
        the new lock of the faster one. Nobody removes somebody else's `.taking`: who could, would meet the same
        race again.
        """
        if not self._is_dead():
            return
        taking = self.path.with_name(f"{self.path.name}.taking")
        if not self._create(taking):
            if TAKING_S < _age(taking) < float("inf"):
                raise ConfigError(
                    f"{self._folder}: a process ended while it took this run over from a dead one; remove {taking}"
                )
            time.sleep(0.01)
            return
        try:
            if self._is_dead():
                self.path.unlink(missing_ok=True)  # an owner that was silent for long may release it now
        finally:
            taking.unlink()

    def _is_dead(self) -> bool:
        """Return whether there is a lock of a dead owner; False where there is no lock any more."""
        alive = _alive(_read(self.path), self.path)
        if alive:
            raise ConfigError(
                f"{self._folder} belongs to a run that is going on: {alive}; wait for its end, or choose another "
                f"run.name (if it is surely dead, remove {self.path})"
            )
        return alive is None

    def _refresh(self) -> None:
        while not self._ended.wait(BEAT_S):
            with suppress(OSError):  # the next time; `check` sees what is lost
                if _read(self.path) == self._record:
                    os.utime(self.path)


def own_run(config: Config, mesh: Mesh) -> RunLock | None:
    """Own `run.dir/run.name` from the main rank, or raise on all ranks; None on the others. Collective.

    Raises:
        ConfigError: run.dir cannot be written to, or another process owns the folder.
    """
    lock, refusal = None, ""
    if mesh.is_main:
        folder = Path(config.run.dir) / config.run.name
        try:
            check_writable(folder, "run.dir")
            lock = RunLock(folder)
        except ConfigError as error:
            refusal = str(error)
    if refusal := mesh.from_main(refusal):
        raise ConfigError(refusal)
    return lock


def _identity(pid: int) -> dict[str, Any]:
    """Return what tells a process from all others, also from a later one with its number."""
    return {"host": socket.gethostname(), "machine": _machine(), "pid": pid, "started": _started(pid)}


def _machine() -> str:
    """Return what tells this boot and set of process numbers: containers may share a host's name."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # no Linux
        return ""


def _started(pid: int) -> str:
    """Return a process's start time in ticks since the boot; "" where there is none such that runs."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if state in "ZX" else fields[18]


def _alive(owner: dict[str, Any] | None, path: Path) -> str | None:
    """Return who the living owner is, in words; None for a dead one, "" where the lock is gone."""
    if owner and (owner["host"], owner["machine"]) == (socket.gethostname(), _machine()):
        if _identity(owner["pid"])["started"] == owner["started"] and _exists(owner["pid"]):
            return _name(owner)
        return None
    age = _age(path)
    if age == float("inf"):
        return ""
    if age > LOST_S:
        return None
    who = _name(owner) if owner else "an owner that has not signed yet"
    return f"{who}, last seen {max(0.0, age):.0f} s ago (it counts as dead after {LOST_S:.0f} s)"


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        pass
    return True


def _name(owner: dict[str, Any]) -> str:
    return f"process {owner['pid']} on {owner['host']}, since {owner['since']}"


def _age(path: Path) -> float:
    """Return seconds since the file was refreshed, both by the file system's clock; infinity where it is gone."""
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".now.") as now, path.open("rb") as lock:
            now.write(b"x")
            now.flush()
            return os.fstat(now.fileno()).st_mtime - os.fstat(lock.fileno()).st_mtime
    except FileNotFoundError:
        return float("inf")


def _read(path: Path) -> dict[str, Any] | None:
    """Return the owner that a lock names; None where there is no lock, or none that has been written to its end."""
    try:
        owner = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    return (
        owner if isinstance(owner, dict) and owner.keys() >= {"host", "machine", "pid", "started"} else None
    )
