"""Whatever goes wrong between stages is an error on every rank, soon, and says what is missing."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.dist.learning import fixed_rollouts, make_base, small_config
from tests.dist.test_taps import HOW, TINY, log_likelihood
from tests.dist.worlds import run_world
from torchspec import packing
from torchspec.assemble import build_policy
from torchspec.config import Parallel
from torchspec.mesh import Mesh
from torchspec.models.spec import PolicySpec
from torchspec.parallel.tap_channel import TapChannel, TapError

pytestmark = pytest.mark.dist
TIMEOUT_S = 1.5
ALIVE_S = 9.0
"""How long a rank with an error lives on, so that it is not its end that others notice."""


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return make_base(tmp_path_factory.mktemp("base") / "tiny", TINY)


def plant(fault: str, folder: Path) -> Any:
    """Spoil the first rank's sends, or return a loss that fails on the last rank."""
    send, header = TapChannel.send, TapChannel._header

    def spoilt_send(channel, stage, microbatch, taps) -> None:
        if microbatch == 3 and fault == "never sent":
            return
        if microbatch == 1 and fault == "dies":
            torch.save(("died", 0.0), folder / "0.result")
            os._exit(0)
        send(channel, stage, microbatch, taps)

    def spoilt_header(channel, stage, microbatch, *rest) -> list[int]:
        *others, signature = header(channel, stage, microbatch, *rest)
        return [*others, signature + (microbatch == 2)]

    def failing_loss(index, output, batch) -> torch.Tensor:
        if index == 1:
            raise ValueError("no loss for this one")
        return log_likelihood(index, output, batch)

    if fault == "header" and os.environ["RANK"] == "0":
        TapChannel._header = spoilt_header
    elif os.environ["RANK"] == "0":
        TapChannel.send = spoilt_send
    return failing_loss if fault == "loss" else log_likelihood


def run_faulty(mesh: Mesh, base: Path, fault: str, folder: Path) -> tuple[str, float]:
    config = small_config(tap__timeout_s=TIMEOUT_S, parallel__layers_per_stage=[])
    policy = build_policy(config, mesh, base, PolicySpec.from_hf(base, 128))
    packs = packing.pack(fixed_rollouts(groups=5), 4096, 4)
    aux = {"aux_layers": (1, 2, 5), "train_on": lambda batch, taps: None}
    policy.forward_backward(packs, log_likelihood, **HOW, **aux)
    policy.zero_grad()
    loss = plant(fault, folder)
    started = time.monotonic()
    error = "none"
    try:
        policy.forward_backward(packs, loss, **HOW, **aux)
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    seconds = time.monotonic() - started
    if error != "none":
        with pytest.raises(TapError, match="failed before"):  # there is no way on
            next(iter(policy._channels.values())).begin([], [], {})
    time.sleep(ALIVE_S - seconds)
    return error, seconds


FAULTS = {  # what the last rank says
    "header": "microbatch 2: the message has pack [0-9]+, not [0-9]+",
    "never sent": "microbatch 3 from stage 0 .3 received and 3 consumed of 4; .* tap.timeout_s = 1.5",
    "loss": "ValueError: no loss for this one",
    "dies": "Connection closed by peer|Read error",
}


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_an_error_on_every_rank_in_time(base, fault, ranks, tmp_path) -> None:
    args = (base, fault, tmp_path)
    results = run_world(ranks, run_faulty, tmp_path, *args, parallel=Parallel(pp=ranks))
    for rank, (error, seconds) in enumerate(results):
        if not (fault == "dies" and rank == 0):
            assert error != "none", f"rank {rank} noticed nothing"
            assert seconds < TIMEOUT_S + 3.0, f"rank {rank} needed {seconds:.1f} s: {error}"
    assert re.search(FAULTS[fault], results[-1][0]), results
