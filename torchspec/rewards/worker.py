"""The worker: a process that judges responses, and that a time-out can end."""

from __future__ import annotations

import logging
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from torchspec.rewards.judges import math_judge, reasoning_gym_judge

WORKER_START_S = 120.0
"""Importing sympy and reasoning-gym takes seconds; more on a busy machine."""


class Worker:
    """A process of its own, started at the first question and replaced when it hangs or dies.

    A plain subprocess: `multiprocessing` would fork the trainer's state, or import its main module again.
    """

    def __init__(self, functions: list[str], task: str, task_args: dict[str, Any], timeout_s: float) -> None:
        self._setup = (functions, task, task_args, timeout_s)
        self._timeout_s = timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection

    def ask(self, *question: Any) -> tuple[float, tuple[str, str] | None]:
        """(score, None), or (0, (kind, detail)) where `question` made the worker fail."""
        if self._process is None or self._process.poll() is not None:
            self._start()
        try:
            self._pipe.send(question)
            if self._pipe.poll(self._timeout_s):
                return self._pipe.recv()
            failure = ("timeout", f"more than {self._timeout_s:g} s")
        except (EOFError, ConnectionError):
            failure = ("crash", "the worker died")
        self.close()
        return 0.0, failure

    def close(self) -> None:
        """End the process, and wait for it."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
            self._pipe.close()

    def _start(self) -> None:
        self._pipe, far_end = Pipe()
        fd = far_end.fileno()
        self._process = subprocess.Popen(
            [sys.executable, "-c", f"from torchspec.rewards.worker import serve; serve({fd})"],
            stdin=subprocess.DEVNULL,
            pass_fds=[fd],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        )
        far_end.close()
        self._pipe.send(self._setup)
        try:
            ready = self._pipe.poll(WORKER_START_S) and self._pipe.recv()
        except (EOFError, ConnectionError):
            ready = False
        if not ready:
            self.close()
            raise RuntimeError("the reward worker did not start; its error is above")


def serve(fd: int) -> None:
    """The worker's loop: answer questions from the connection `fd` until the other end closes it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the trainer's; it closes the pipe
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own timeouts are off
    pipe = Connection(fd)
    names, task, task_args, timeout_s = pipe.recv()
    functions: dict[str, Callable[..., float]] = {}
    if "math_verify" in names:
        functions["math_verify"] = math_judge()
    if "reasoning_gym" in names:
        functions["reasoning_gym"] = reasoning_gym_judge(task, task_args)
    pipe.send(True)
    while True:
        try:
            name, *arguments = pipe.recv()
        except EOFError:
            return
        signal.alarm(math.ceil(timeout_s) + 1)  # ends this process if the trainer that should do so is gone
        try:
            reply = (functions[name](*arguments), None)
        except Exception as error:  # scorers raise whatever they like on text they did not expect
            reply = (0.0, ("error", repr(error)))
        signal.alarm(0)
        pipe.send(reply)
