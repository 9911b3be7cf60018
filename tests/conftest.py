"""The order of the test files, and one line of progress per file."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

# Files of the first folder take longest. They start first, so that two workers end together.
ORDER = ["tests/e2e/", "tests/dist/", "tests/unit/"]
# These files compare seconds or memory with limits. They run last, one after the other on one worker.
ALONE = [
    "tests/dist/test_tap_faults.py",
    "tests/dist/test_dry_run_memory.py",
    "tests/unit/test_rewards.py",
    "tests/unit/test_user_rewards.py",
    "tests/unit/test_main.py",
    "tests/unit/test_interrupt.py",
]


def file_of(nodeid: str) -> str:
    return nodeid.split("::")[0]


def start_of(item: pytest.Item) -> tuple[bool, int]:
    """Return the key that sorts tests; tests of one file keep their order."""
    path = file_of(item.nodeid)
    folder = next((place for place, prefix in enumerate(ORDER) if path.startswith(prefix)), len(ORDER))
    return path in ALONE, folder


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=start_of)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Return `--dist loadfile` with the files of ALONE as one."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path = file_of(nodeid)
            return "alone" if path in ALONE else path

    return Scheduling(config, log) if config.getvalue("dist") == "loadfile" else None


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # pytest-xdist's workers print nothing
        config.pluginmanager.register(Progress(config))


class Progress:
    """Print a line when a worker has ended a file. Without pytest-xdist there is one worker, None."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.files: dict[Any, str] = {}
        self.counts: dict[Any, Counter[str]] = {}
        self.seconds: dict[Any, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        worker, path = getattr(report, "node", None), file_of(report.nodeid)
        if self.files.get(worker) != path:
            self.end_file(worker)
            self.files[worker], self.counts[worker], self.seconds[worker] = path, Counter(), 0.0
        status = self.config.hook.pytest_report_teststatus(report=report, config=self.config)[0]
        self.counts[worker][status] += bool(status)
        self.seconds[worker] += report.duration

    def pytest_sessionfinish(self) -> None:
        for worker in list(self.files):
            self.end_file(worker)

    def end_file(self, worker: Any) -> None:
        if worker in self.files:
            counts = [f"{count} {status}" for status, count in self.counts[worker].items() if count]
            line = ", ".join([*counts, f"{self.seconds[worker]:.1f} s"])
            writer = self.config.get_terminal_writer()
            if writer.width_of_current_line:  # pytest's dots
                writer.line()
            writer.line(f"{self.files.pop(worker)}: {line}", flush=True)
