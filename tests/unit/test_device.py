"""The choice of the device, with injected answers of torch and of the driver."""

from __future__ import annotations

import subprocess
from types import SimpleNamespace

import pytest
import torch

from torchspec.distributed import device
from torchspec.errors import ConfigError


@pytest.fixture
def answers(monkeypatch):
    def set_up(*, available: bool, build: str | None, driver: str) -> None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
        monkeypatch.setattr(torch.version, "cuda", build)

        def run(command, **_):
            if not driver:
                raise FileNotFoundError(command[0])
            return SimpleNamespace(stdout=f"{driver}\n{driver}\n")

        monkeypatch.setattr(subprocess, "run", run)

    return set_up


@pytest.mark.parametrize(
    ("available", "build", "driver", "expected"),
    [
        (True, "13.0", "580.65.06", "cuda"),
        (False, "13.0", "", "cpu"),
        (False, None, "550.54.15", "cpu"),
        (False, None, "", "cpu"),
    ],
)
def test_the_device_is_what_torch_can_use(answers, available, build, driver, expected) -> None:
    answers(available=available, build=build, driver=driver)
    assert device.choose_device_type() == expected


def test_an_old_driver_is_an_error_and_no_silent_cpu_run(answers, monkeypatch) -> None:
    answers(available=False, build="13.0", driver="550.54.15")
    with pytest.raises(ConfigError, match=r"driver 550\.54\.15.*CUDA 13\.0.*R580.*CUDA_VISIBLE_DEVICES"):
        device.choose_device_type()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert device.choose_device_type() == "cpu"
