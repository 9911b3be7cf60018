"""Whether outputs can be written: tried before anything expensive, and said in one line when it fails later."""

from __future__ import annotations

import errno
import os
import re
import tempfile
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

from torchspec.errors import ConfigError, GuardStop

NO_ROOM = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EROFS, errno.EIO)
"""What a disk that is full, over quota, read-only or failing answers. None is a fault of the program."""


def check_writable(path: Path, name: str) -> None:
    """Raise a ConfigError unless a file can be created under the nearest existing parent of `path`.

    Args:
        path: of a file or folder that will be written; nothing is left there.
        name: the key or option that names it.
    """
    parent = path
    try:
        parent = path.parent if path.is_file() else path
        while not os.path.lexists(parent):
            parent = parent.parent
        with tempfile.TemporaryFile(dir=parent) as probe:
            probe.write(b"x")
    except OSError as error:
        raise ConfigError(
            f"{name} {path}: nothing can be written in {parent} ({error.strerror or error}); give another path"
        ) from None


@contextmanager
def writing(path: Path, run: Path | None = None) -> Generator[None]:
    """Turn the errors of a disk that cannot take what the block writes into a GuardStop of one line.

    Args:
        path: what is written; the line names it unless the error knows the file.
        run: the run's folder, for the line to say which step is safe.

    Raises:
        GuardStop: the disk is full or the like.
    """
    try:
        yield
    except (ConfigError, GuardStop):
        raise
    except BaseException as error:  # torch's CheckpointException is no Exception
        if (reason := no_room(error)) is None:
            raise
        safe = f"{safe_step(run)}; " if run else ""
        raise GuardStop(
            f"{path}: {reason}; {safe}the same command goes on once the disk takes files again"
        ) from error


def no_room(error: BaseException) -> str | None:
    """Return what a disk that cannot be written to said, where that is the cause of `error`; None otherwise."""
    for cause in _causes(error):
        if isinstance(cause, OSError) and cause.errno in NO_ROOM:
            return os.strerror(cause.errno) + (f" ({cause.filename})" if cause.filename else "")
        # safetensors and torch report only a text.
        if (match := re.search(r"os error (\d+)", str(cause))) and int(match[1]) in NO_ROOM:
            return os.strerror(int(match[1]))
    return None


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and those behind it, also those that torch's checkpoints gather from the ranks."""
    seen: list[BaseException] = []
    waiting = [error]
    while waiting:
        cause = waiting.pop(0)
        if cause in seen:
            continue
        seen.append(cause)
        yield cause
        gathered = getattr(cause, "failures", {})
        waiting += [failure[0] for failure in gathered.values() if isinstance(failure[0], BaseException)]
        waiting += [behind for behind in (cause.__cause__, cause.__context__) if behind]


def safe_step(run: Path) -> str:
    """Say which step of a run is safe on the disk."""
    steps = sorted((run / "checkpoints").glob("step-*"))
    return f"all is safe up to {steps[-1]}" if steps else "no checkpoint is complete yet"
