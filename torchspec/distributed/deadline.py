"""The end of a process that does not stop when it is asked to. Imports no torch."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading

LIMIT_S = 5.0
"""Time that user code has after a signal."""
INTERRUPTED = 128 + signal.SIGINT
"""The exit status."""


def end_process(said: str = "") -> None:
    """End the process and its workers at once, whatever its threads do."""
    if said:
        print(said, file=sys.stderr, flush=True)
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(INTERRUPTED)


def end_later() -> None:
    """End the process after `LIMIT_S` seconds, unless it has ended by itself."""
    timer = threading.Timer(LIMIT_S, end_process)
    timer.daemon = True
    timer.start()
