"""SIGTERM and Ctrl-C: a wish to stop, which all ranks come to know of at the same point."""

from __future__ import annotations

import signal
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType

import torch

from torchspec.distributed.mesh import Mesh
from torchspec.errors import Stopped

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class _Abandon(BaseException):
    """Leaves an `abandonable` block."""


class Interrupt:
    """Listens to the signals while it is entered.

    A signal asks; it ends nothing by itself. Later ones change nothing: a Ctrl-C reaches the ranks from the
    terminal and again from torchrun.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._wanted = False
        self._abandonable = False

    def __enter__(self) -> Interrupt:
        self._before = [signal.signal(number, self._hear) for number in SIGNALS]
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in zip(SIGNALS, self._before):
            signal.signal(number, handler)

    def check(self) -> None:
        """Raise Stopped on every rank if any has got a signal. Collective."""
        if self._mesh.max_over_world(torch.tensor([float(self._wanted)])).item():
            raise Stopped

    @contextmanager
    def abandonable(self) -> Generator[None]:
        """A block without collectives, which a signal leaves at once; `check` must follow."""
        try:
            self._abandonable = True
            try:
                yield
            finally:
                self._abandonable = False
        except _Abandon:
            pass

    def _hear(self, _number: int, _frame: FrameType | None) -> None:
        self._wanted = True
        if self._abandonable:
            self._abandonable = False
            raise _Abandon
