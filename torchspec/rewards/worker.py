"""The worker: a process that runs judges and users' functions, and that a time-out can end."""

from __future__ import annotations

import ctypes
import importlib
import logging
import math
import os
import reprlib
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from decimal import Decimal
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from numbers import Real
from typing import Any

from torchspec.errors import ConfigError, one_line
from torchspec.rewards.judges import math_judge, math_reader, reasoning_gym_judge

WORKER_START_S = 120.0
"""Importing sympy, reasoning-gym or a user's module takes seconds; more on a busy machine."""
MOST_DETAIL = 500
"""Characters of an error's text that go into a message."""
PR_SET_PDEATHSIG = 1
"""Linux: the signal that a process gets when the thread that started it ends."""


class Worker:
    """A process of its own. It is started at the first question and replaced when it hangs or dies.

    It is a plain subprocess: `multiprocessing` would fork the trainer's state, or import its main module again.
    It leads a process group, so that a Ctrl-C in the terminal does not reach it, and `close` also ends the
    processes that a user's function has started.
    """

    def __init__(self, functions: list[str], task: str, task_args: dict[str, Any], timeout_s: float) -> None:
        self._setup = (functions, task, task_args)
        self._timeout_s = timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection

    def ask(self, *question: Any) -> tuple[float, tuple[str, str] | None]:
        """Return (score, None), or (0, (kind, detail)) where `question` made the worker fail."""
        if self._process is None or self._process.poll() is not None:
            self.start()
        try:
            self._pipe.send(question)
            if self._pipe.poll(self._timeout_s):
                return self._pipe.recv()
            failure = ("timeout", f"more than reward.timeout_s = {self._timeout_s:g} s")
        except (EOFError, ConnectionError):
            failure = ("crash", "the worker died")
        except BaseException:  # a signal: the reply to this question must not answer the next one
            self.close()
            raise
        self.close()
        return 0.0, failure

    def close(self) -> None:
        """End the process and those it started, and wait for it."""
        if self._process is not None:
            if self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None
            self._pipe.close()

    def start(self) -> None:
        """Start the process, in place of one that has died; wait until it has imported its functions.

        Raises:
            ConfigError: a user's function cannot be imported.
        """
        self.close()
        self._pipe, far_end = Pipe()
        fd = far_end.fileno()
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", f"from torchspec.rewards.worker import serve; serve({fd})"],
            stdin=subprocess.DEVNULL,
            pass_fds=[fd],
            process_group=0,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path)},
        )
        far_end.close()
        refusal = None
        try:
            self._pipe.send(self._setup)
            ready = self._pipe.poll(WORKER_START_S)
            refusal = self._pipe.recv() if ready else None
        except (EOFError, ConnectionError):
            ready = False
        except BaseException:  # a signal
            self.close()
            raise
        if not ready or refusal:
            self.close()
        if refusal:
            raise ConfigError(refusal)
        if not ready:
            raise ConfigError(
                f"reward.functions: the worker of {', '.join(self._setup[0])} died, or was not ready in "
                f"{WORKER_START_S:g} s; its error, if it printed one, is above"
            )


class NoScore(ValueError):
    """A user's function returned something that is not a finite number."""


def serve(fd: int) -> None:
    """Answer questions from the connection `fd` until its other end closes it: the worker's whole life."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the trainer, which ends this process
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own timeouts are off
    pipe = Connection(fd)
    try:
        names, task, task_args = pipe.recv()
        functions = {name: _function(name, task, task_args) for name in names}
    except ConfigError as error:
        pipe.send(str(error))
        return
    pipe.send("")
    while True:
        try:
            name, *arguments = pipe.recv()
        except EOFError:
            return
        try:
            reply = (functions[name](*arguments), None)
        except NoScore as error:
            reply = (0.0, ("value", str(error)))
        except BaseException as error:  # functions raise what they like, SystemExit too
            reply = (0.0, ("error", _detail(error)))
        pipe.send(reply)


def _function(name: str, task: str, task_args: dict[str, Any]) -> Callable[..., float]:
    if name == "math_verify":
        return math_judge()
    if name == "math_reads":
        return math_reader()
    if name == "reasoning_gym":
        return reasoning_gym_judge(task, task_args)
    return user_function(name)


def user_function(path: str) -> Callable[..., float]:
    """Import the function of a dotted path, `pkg.mod:fn` or `pkg.mod.fn`.

    Raises:
        ConfigError: the module cannot be imported, or has no such function.
    """
    module_name, _, name = path.replace(":", ".").rpartition(".")
    try:
        function = getattr(importlib.import_module(module_name), name, None)
    except ImportError as error:
        raise ConfigError(
            f'reward.functions: cannot import "{path}": {one_line(error)}; its folder must be on PYTHONPATH'
        ) from error
    except BaseException as error:  # a module runs when it is imported
        raise ConfigError(f'reward.functions: importing "{path}" fails: {_detail(error)}') from error
    if not callable(function):
        raise ConfigError(f'reward.functions: "{path}": {module_name} has no function {name}')
    return lambda problem, response: as_score(function(problem, response))


def as_score(value: Any) -> float:
    """Return `value` as a float. Accept a bool, a number of Python, or a numpy or torch value of one element.

    Raises:
        NoScore: it is not a finite number.
    """
    number = value
    if not isinstance(value, Real | Decimal) and callable(getattr(value, "item", None)):
        try:
            number = value.item()
        except (ValueError, RuntimeError):  # numpy and torch: more than one element
            number = None
    try:
        if isinstance(number, Real | Decimal) and math.isfinite(score := float(number)):
            return score
    except (ValueError, OverflowError):  # a signaling Decimal; beyond the range of a float
        pass
    raise NoScore(f"returned {reprlib.repr(value)}")


def _detail(error: BaseException) -> str:
    """Return the type, text and place of `error` in one line."""
    text = f"{type(error).__name__}: {one_line(error)}"[:MOST_DETAIL]
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{text} ({frame.filename}:{frame.lineno})"
