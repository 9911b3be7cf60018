"""Times the parts of a step and reads the peak memory."""

from __future__ import annotations

import resource
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch


class Stopwatch:
    """Seconds that the device spends on named parts of a step.

    On CUDA events mark a part's ends in the stream, and nobody waits before `read`; elsewhere the host's clock.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._parts: list[tuple[str, str, Any, Any]] = []

    @contextmanager
    def time(self, name: str, within: str = "") -> Generator[None]:
        """Time a part. If it lies `within` another, its seconds are not also that one's."""
        start = self._mark()
        yield
        self._parts.append((name, within, start, self._mark()))

    def read(self) -> dict[str, float]:
        """Seconds by name since the last reading."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        seconds: dict[str, float] = {}
        for name, within, start, end in self._parts:
            spent = end - start if isinstance(end, float) else start.elapsed_time(end) / 1e3
            seconds[name] = seconds.get(name, 0.0) + spent
            if within:
                seconds[within] = seconds.get(within, 0.0) - spent
        self._parts.clear()
        return seconds

    def _mark(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def peak_memory_gb(device: torch.device) -> float:
    """Most memory this process has had, in GB (2**30): of the GPU, or on CPU its resident set."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 2**30
