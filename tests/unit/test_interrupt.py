"""Signals: a wish that all ranks hear of, and a last save that no second one breaks."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import SimpleNamespace

import pytest

from torchspec.config.schema import Config
from torchspec.distributed.deadline import LIMIT_S
from torchspec.distributed.interrupt import SIGNALS, Interrupt
from torchspec.errors import Stopped
from torchspec.trainer import Trainer
from torchspec.training.progress import Progress

ALONE = SimpleNamespace(is_main=False, max_over_world=lambda x: x)


def kill(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


@pytest.fixture
def interrupt():
    def outside(number: int, _) -> None:
        raise AssertionError(f"{signal.Signals(number).name} came through")  # by default it would end pytest

    before = [signal.signal(number, outside) for number in SIGNALS]
    yield Interrupt(ALONE)  # pyrefly: ignore[bad-argument-type]
    assert [signal.signal(number, handler) for number, handler in zip(SIGNALS, before)] == [outside, outside]


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_asks_and_leaves_only_what_may_be_abandoned(interrupt, number) -> None:
    reached = []
    with interrupt:
        interrupt.check()
        kill(number)
        reached.append("after the first")
        with pytest.raises(Stopped):
            interrupt.check()
    with interrupt:
        interrupt._wanted = False
        with interrupt.abandonable():
            kill(number)
            reached.append("never")
        kill(number)  # no longer within
        reached.append("after the block")
        with pytest.raises(Stopped):
            interrupt.check()
    assert reached == ["after the first", "after the block"]


@pytest.mark.parametrize("first", SIGNALS)
@pytest.mark.parametrize("second", SIGNALS)
def test_a_second_signal_does_not_break_the_last_save(interrupt, first, second) -> None:
    """Ctrl-C comes from the terminal and again from torchrun; patient people press it twice."""
    trainer, saved = Trainer.__new__(Trainer), []  # only the loop is looked at
    trainer.config = Config()
    trainer.config.eval.every = 0
    trainer.mesh, trainer.interrupt = ALONE, interrupt  # pyrefly: ignore[bad-assignment]

    def step(_: int) -> dict[str, float]:
        kill(first)
        interrupt.check()
        raise AssertionError("unreachable")

    def save(facts, *_) -> None:
        kill(second)
        saved.append(facts["step"])

    def wait() -> None:
        kill(second)
        saved.append("on disk")

    trainer.step = step
    checkpoints, versions = (
        SimpleNamespace(save=save, wait=wait),
        SimpleNamespace(policy_version=4, draft_version=0),
    )
    trainer.progress = Progress(checkpoints, 1, {}, {}, versions, None)  # pyrefly: ignore[bad-argument-type]
    trainer.progress.done = 4
    trainer.fit()
    assert saved == [4, "on disk"]


def sleeps() -> None:
    while True:
        time.sleep(1)


def swallows() -> None:
    while True:
        try:
            time.sleep(0.01)
        except BaseException:
            continue


def computes() -> None:
    while True:
        sum(range(1000))


def locks() -> None:
    lock = threading.Lock()
    lock.acquire()
    while True:
        lock.acquire()


def reads() -> None:
    os.read(os.pipe()[0], 1)


def masks() -> None:
    """The main thread gets no signal, so Python's handler never runs."""
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    time.sleep(99)


@pytest.mark.parametrize("wanted", ["in it", "before"])
def test_user_code_that_does_not_return_ends_with_the_process(interrupt, wanted) -> None:
    children = {}
    for code in (sleeps, swallows, computes, locks, reads, masks):
        if (pid := os.fork()) == 0:
            with interrupt:
                if wanted == "before":
                    kill(signal.SIGTERM)
                try:
                    with interrupt.user_code():
                        code()
                finally:
                    os._exit(1)
        children[pid] = code.__name__
    time.sleep(1)
    asked = time.monotonic()
    for pid in children:
        os.kill(pid, signal.SIGINT)
    ended = {}
    for pid, name in children.items():
        ended[name] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), round(time.monotonic() - asked, 1)
    assert all(status == 130 and seconds < LIMIT_S + 2 for status, seconds in ended.values()), ended


def test_user_code_that_returns_in_time_stops_as_ever(interrupt) -> None:
    reached = []
    with interrupt:
        with interrupt.user_code():
            kill(signal.SIGINT)
            time.sleep(0.2)
            reached.append("the end of the user's code")
        with pytest.raises(Stopped):
            interrupt.check()
        with interrupt.abandonable(), interrupt.user_code():
            kill(signal.SIGINT)
            reached.append("never")
        time.sleep(0.2)
    assert reached == ["the end of the user's code"]
    assert not [thread for thread in threading.enumerate() if thread.name == "signals"]


def test_a_save_after_a_signal_is_not_cut_off_however_long_it_takes(interrupt, monkeypatch) -> None:
    monkeypatch.setattr("torchspec.distributed.interrupt.LIMIT_S", 0.1)
    with interrupt:
        with interrupt.user_code():
            kill(signal.SIGTERM)
        time.sleep(1)
        kill(signal.SIGINT)
        time.sleep(0.5)
