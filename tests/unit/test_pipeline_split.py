"""Splitting a policy into stages, what the config may ask for, and the channel of a single rank."""

from __future__ import annotations

import pytest
import torch

from torchspec.config.load import load
from torchspec.distributed.pipeline.split import split_layers, tap_names
from torchspec.distributed.pipeline.tap_channel import MicrobatchInfo, TapChannel
from torchspec.errors import ConfigError, TapError
from torchspec.models.policy import Policy
from torchspec.models.spec import PolicySpec

SPEC = PolicySpec(
    arch="qwen3",
    vocab_size=31,
    dim=16,
    layers=5,
    heads=2,
    kv_heads=1,
    head_dim=8,
    ffn_dim=24,
    norm_eps=1e-6,
    rope_theta=1e4,
    rope_scaling=None,
    tied=False,
    max_len=32,
)


def test_layers_are_split_evenly_or_as_asked_for() -> None:
    assert split_layers(5, "1F1B", 2) == [range(0, 3), range(3, 5)]
    assert split_layers(8, "ZBVZeroBubble", 2) == [range(i, i + 2) for i in (0, 2, 4, 6)]
    assert split_layers(5, "GPipe", 2, [4, 1]) == [range(0, 4), range(4, 5)]
    with pytest.raises(ConfigError, match="4 stages need as many layers, the policy has 3"):
        split_layers(3, "Interleaved1F1B", 2)
    with pytest.raises(ConfigError, match=r"layers_per_stage = \[2, 2\] adds up to 4, the policy has 5"):
        split_layers(5, "1F1B", 2, [2, 2])


def test_taps_belong_to_the_stage_whose_layer_they_enter() -> None:
    split = [range(0, 2), range(2, 3), range(3, 5)]
    assert tap_names(split, (0, 2, 5)) == {0: ["embeds", 0], 1: [2], 2: [5, "final"]}
    assert tap_names(split, (3, 4, 5)) == {0: ["embeds"], 2: [3, 4, 5, "final"]}


def test_stages_hold_the_names_of_the_whole_policy_between_them() -> None:
    with torch.device("meta"):
        whole = {*dict(Policy(SPEC).named_parameters())}
        parts = [{*dict(Policy(SPEC, held=held).named_parameters())} for held in ([0, 4], [1, 2], [3])]
    assert set().union(*parts) == whole
    assert sum(map(len, parts)) == len(whole)
    assert {"decoder.tok_embeddings.weight", "decoder.lm_head.weight"} <= parts[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--parallel.layers_per_stage", "[2, 2]"], "needs parallel.pp > 1"),
        (["--parallel.pp", "2", "--parallel.layers_per_stage", "[4]"], "has 2 stages, not 1"),
        (["--parallel.pp", "2", "--parallel.layers_per_stage", "[4, 0]"], "every stage needs a layer"),
        (
            [
                *("--parallel.pp", "2", "--parallel.schedule", "ZBVZeroBubble"),
                *("--parallel.layers_per_stage", "[2, 2]"),
            ],
            "has 4 stages, not 2",
        ),
        (
            ["--parallel.schedule", "ZBVZeroBubble", "--train.activation_checkpointing", "true"],
            "runs every backward in two parts",
        ),
        (["--parallel.tap_timeout_s", "0"], "parallel.tap_timeout_s = 0.0 must be above 0"),
    ],
)
def test_impossible_pipelines_are_refused(arguments, message) -> None:
    with pytest.raises(ConfigError, match=message):
        load(None, arguments)


def channel_of_one() -> TapChannel:
    """Two virtual stages on one rank: everything is local."""
    channel = TapChannel(
        rank=0,
        stage_ranks=[0, 0],
        sources={0: 1, 1: 2},
        groups={},
        width=4,
        dtype=torch.float32,
        device=torch.device("cpu"),
        timeout_s=1.0,
    )
    channel.begin([MicrobatchInfo(3, 7), MicrobatchInfo(2, 8)], [0, 0], {})
    return channel


def test_taps_of_the_own_rank_are_references() -> None:
    channel = channel_of_one()
    taps = {(s, m): [torch.rand(3 - m, 4) for _ in range(s + 1)] for s in (0, 1) for m in (0, 1)}
    for (stage, m), made in taps.items():
        channel.send(stage, m, made)
    for m in (0, 1):
        for stage, taken in channel.take(m).items():
            pointers = [tap.data_ptr() for tap in taps[stage, m]]
            assert [tap.data_ptr() for tap in taken] == pointers
            assert not any(tap.requires_grad for tap in taken)
    channel.finish()
    assert channel.bytes_sent == 0


def test_what_was_not_sent_or_not_taken_is_an_error() -> None:
    channel = channel_of_one()
    channel.send(0, 0, [torch.rand(3, 4)])
    with pytest.raises(TapError, match="stage 1 has not made the taps of microbatch 0"):
        channel.take(0)
    channel = channel_of_one()
    channel.send(0, 0, [torch.rand(3, 4)])
    with pytest.raises(TapError, match="stage 0 sent the taps of 1 microbatches, not of 2"):
        channel.finish()
    channel = channel_of_one()
    for stage, m in ((0, 0), (1, 0), (0, 1), (1, 1)):
        channel.send(stage, m, [torch.rand(3 - m, 4)] * (stage + 1))
    with pytest.raises(TapError, match="never taken"):
        channel.finish()
