"""Signals: a wish that all ranks hear of, and a last save that no second one breaks."""

from __future__ import annotations

import os
import signal
from types import SimpleNamespace

import pytest

from torchspec.config.schema import Config
from torchspec.distributed.interrupt import SIGNALS, Interrupt
from torchspec.errors import Stopped
from torchspec.trainer import Trainer

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
    trainer.lock = None
    trainer.done, trainer.saved_step, trainer.policy_version, trainer.draft_version = 4, 0, 4, 0
    trainer.scores, trainer.before, trainer.learner = {}, {}, SimpleNamespace(optimizers={})  # pyrefly: ignore

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
    trainer.checkpoints = SimpleNamespace(save=save, wait=wait)  # pyrefly: ignore[bad-assignment]
    trainer.fit()
    assert saved == [4, "on disk"]
