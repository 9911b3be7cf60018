"""What stops a run."""

from __future__ import annotations

import logging
import math

import pytest

from torchspec.commands.main import main
from torchspec.config.schema import Config
from torchspec.errors import GuardStop
from torchspec.training.guards import Guards

KL, TAU = "policy/kl_train_rollout", "speculation/model_tau"


@pytest.fixture
def config() -> Config:
    config = Config()
    config.guards.max_kl, config.guards.min_tau, config.guards.patience = 0.1, 1.2, 3
    return config


@pytest.mark.parametrize(
    ("metric", "good", "bad", "key"),
    [(KL, 0.1, 0.11, "guards.max_kl"), (TAU, 1.2, 1.0, "guards.min_tau"), (KL, 0, math.nan, "guards.max_kl")],
)
def test_a_bound_warns_and_stops_after_so_many_steps_in_a_row(config, caplog, metric, good, bad, key) -> None:
    guards = Guards(config)
    with caplog.at_level(logging.WARNING, logger="torchspec"):
        for step, value in enumerate([good, bad, bad, good, bad, bad]):
            guards.check(step, {metric: value})
    assert len(caplog.records) == 4
    assert f"step 1: {metric} = {bad:.4g} is" in caplog.text
    resumed = Guards(config)
    resumed.load_state_dict(guards.state_dict())
    with pytest.raises(GuardStop, match=rf"step 6: {metric} = .* {key} = .* \(for 3 steps in a row\)"):
        resumed.check(6, {metric: bad})


def test_what_is_off_or_was_not_measured_is_not_judged() -> None:
    config = Config()
    config.guards.max_kl = 0
    guards = Guards(config)
    for step in range(9):
        guards.check(step, {KL: 99.0, TAU: 1.0})
        guards.check(step, {})


def test_the_command_line_ends_with_status_3_and_one_line(capsys) -> None:
    def command(argv: list[str]) -> None:
        raise GuardStop("step 7: why")

    assert main(command, ["x.toml"], "usage") == 3
    assert capsys.readouterr().err == "stopped: step 7: why\n"
