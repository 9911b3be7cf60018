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
from torchspec.build import build_policy
from torchspec.config.schema import Parallel
from torchspec.data import packing
from torchspec.distributed.mesh import Mesh
from torchspec.distributed.pipeline.tap_channel import TapChannel
from torchspec.errors import TapError
from torchspec.models.spec import PolicySpec

pytestmark = pytest.mark.dist
TIMEOUT_S = 1.5


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return make_base(tmp_path_factory.mktemp("base") / "tiny", TINY)


def plant(fault: str, folder: Path, patch: pytest.MonkeyPatch) -> Any:
    """Spoil the first rank's sends, or return a loss that fails on the last rank."""
    send, header = TapChannel.send, TapChannel._header

    def spoilt_send(channel, stage, microbatch, taps) -> None:
        if microbatch == 3 and fault == "never sent":
            return
        if microbatch == 1 and fault == "dies":
            torch.save({}, folder / "0.result")
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
        patch.setattr(TapChannel, "_header", spoilt_header)
    elif os.environ["RANK"] == "0":
        patch.setattr(TapChannel, "send", spoilt_send)
    return failing_loss if fault == "loss" else log_likelihood


def run_faults(mesh: Mesh, base: Path, faults: list[str], folder: Path) -> dict[str, tuple[str, float]]:
    """What this rank raised in each case, and after how many seconds. Ranks with an error live on."""
    config = small_config(parallel__tap_timeout_s=TIMEOUT_S)
    packs = packing.pack(fixed_rollouts(groups=5), 4096, 4)
    aux = {"aux_layers": (1, 2, 5), "draft_step": lambda batch, taps: None}
    found = {}
    for fault in faults:
        (group,) = mesh.pp_groups(1, 60.0)  # each fault breaks the one it met
        Mesh.pp_group = property(lambda _, group=group: group)
        policy = build_policy(config, mesh, base, PolicySpec.from_hf(base, 128))
        policy.forward_backward(packs, log_likelihood, **HOW, **aux)
        policy.zero_grad()
        mesh.barrier()
        with pytest.MonkeyPatch.context() as patch:
            loss = plant(fault, folder, patch)
            started = time.monotonic()
            with pytest.raises(Exception) as raised:  # noqa: PT011 - which type is what is looked at
                policy.forward_backward(packs, loss, **HOW, **aux)
            found[fault] = f"{raised.typename}: {raised.value}", time.monotonic() - started
        with pytest.raises(TapError, match="failed before"):  # there is no way on
            next(iter(policy._channels.values())).begin([], [], {})
    return found


FAULTS = {  # what the last rank says
    "header": "microbatch 2: the message has pack [0-9]+, not [0-9]+",
    "never sent": "microbatch 3 from stage 0 .3 received and 3 consumed of 4; .* parallel.tap_timeout_s = 1.5",
    "loss": "ValueError: no loss for this one",
    "dies": "Connection closed by peer|Read error",
}


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("faults", [["header", "never sent", "loss"], ["dies"]], ids=["errors", "death"])
def test_a_fault_is_an_error_on_every_rank_in_time(base, faults, ranks, tmp_path) -> None:
    args = (base, faults, tmp_path)
    results = run_world(ranks, run_faults, tmp_path, *args, parallel=Parallel(pp=ranks), timeout_s=120)
    for fault in faults:
        for rank, found in enumerate(results):
            if found:  # all but the rank that died
                error, seconds = found[fault]
                assert seconds < TIMEOUT_S + 3.0, f"rank {rank} needed {seconds:.1f} s: {error}"
        assert re.search(FAULTS[fault], results[-1][fault][0]), results
