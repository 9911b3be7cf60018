"""SIGTERM and Ctrl-C: a wish to stop, which all ranks come to know of at the same point."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType

import torch

from torchspec.distributed.deadline import LIMIT_S, end_process
from torchspec.distributed.mesh import Mesh
from torchspec.errors import Stopped

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class _Abandon(BaseException):
    """Leaves an `abandonable` block."""


class Interrupt:
    """Listens to the signals while it is entered.

    A signal asks; it ends nothing by itself. Later ones change nothing: a Ctrl-C reaches the ranks from the
    terminal and again from torchrun. In particular, none cuts off a checkpoint that is being saved.

    The exception is user code, which may never return. It has `LIMIT_S` seconds from the signal; if the process is
    still in a `user_code` block then, it ends with status 130. The step being made is lost, and the run goes on from
    its newest checkpoint. This needs no help of the code: a thread waits for the signal, which wakes it even if
    Python's own handler cannot run because the main thread is inside a call. Only a call that keeps the
    interpreter's lock all the time delays it.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._wanted = False
        self._abandonable = False
        self._in_user_code = False

    def __enter__(self) -> Interrupt:
        self._before = [signal.signal(number, self._hear) for number in SIGNALS]
        reader, self._waker = os.pipe()
        os.set_blocking(self._waker, False)
        self._waker_before = signal.set_wakeup_fd(self._waker, warn_on_full_buffer=False)
        self._watcher = threading.Thread(target=self._watch, args=(reader,), name="signals", daemon=True)
        self._watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in zip(SIGNALS, self._before):
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._waker_before)
        os.close(self._waker)
        self._watcher.join()

    def check(self) -> None:
        """Raise Stopped on every rank if any has got a signal. Collective."""
        if self._mesh.max_over_world(torch.tensor([float(self._wanted)])).item():
            raise Stopped

    @contextmanager
    def abandonable(self) -> Generator[None]:
        """Mark a block without collectives, which a signal leaves at once. `check` must follow."""
        try:
            self._abandonable = True
            try:
                yield
            finally:
                self._abandonable = False
        except _Abandon:
            pass

    @contextmanager
    def user_code(self) -> Generator[None]:
        """Mark a block that runs code of the user's, in which the process ends `LIMIT_S` seconds after a signal."""
        self._in_user_code = True
        if self._wanted:  # before this block
            os.write(self._waker, bytes([signal.SIGTERM]))
        try:
            yield
        finally:
            self._in_user_code = False

    def _hear(self, _number: int, _frame: FrameType | None) -> None:
        self._wanted = True
        if self._abandonable:
            self._abandonable = False
            raise _Abandon

    def _watch(self, reader: int) -> None:
        """Wait for signals in a thread; python writes the number of each to the pipe."""
        while number := os.read(reader, 1):
            end = time.monotonic() + LIMIT_S
            while number[0] in SIGNALS and self._in_user_code:
                if time.monotonic() > end:
                    end_process(
                        f"stopped: user code did not return within {LIMIT_S:g} s of the signal; the same command goes "
                        f"on from the newest checkpoint"
                    )
                time.sleep(0.05)
        os.close(reader)
