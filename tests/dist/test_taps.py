"""Taps over pipelines: bitwise those of the whole policy, and no trace of them in what the schedule does."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.distributed.pipelining import PipelineStage

from tests.dist.learning import fixed_rollouts, full, make_base, reinforce, small_config
from tests.dist.worlds import run_world
from torchspec.build import build_policy
from torchspec.config.schema import Config, Optim, Parallel, TinyModel
from torchspec.data import packing
from torchspec.distributed.mesh import Mesh
from torchspec.distributed.pipeline.stage import ScheduledStage
from torchspec.models import hf
from torchspec.models.policy import Policy
from torchspec.models.spec import PolicySpec
from torchspec.records import Batch, SamplingLaw, Taps
from torchspec.training.optim import ModelOptimizer

pytestmark = pytest.mark.dist
TINY = TinyModel(dim=16, layers=8, heads=2, kv_heads=1, head_dim=8, ffn_dim=24, tied=False)
HOW = {"law": SamplingLaw(temperature=0.8), "logprob_rows": 16}

# schedule, numbers of microbatches, placement, aux layers, layers per stage
Case = tuple[str, tuple[int, ...], str, tuple[int, ...], list[int]]
ON_TWO: list[Case] = [
    ("1F1B", (2, 3, 8), "last", (1, 4, 8), []),
    ("1F1B", (5, 6), "spread", (0, 1, 2), [2, 6]),
    ("GPipe", (1, 7), "last", (5, 6, 7), [5, 3]),
    ("GPipe", (4,), "spread", (3, 4, 5), [4, 4]),
    ("Interleaved1F1B", (1, 2, 8), "last", (1, 3, 7), []),
    ("Interleaved1F1B", (4, 6), "spread", (2, 4, 6), [1, 2, 2, 3]),
    ("ZBVZeroBubble", (1, 2, 5), "last", (1, 3, 5), []),
    ("ZBVZeroBubble", (3, 8), "spread", (2, 4, 8), [3, 1, 2, 2]),
]
ON_FOUR: list[Case] = [
    ("1F1B", (4, 7), "last", (1, 2, 5), []),  # stages with one, two and no taps of their own
    ("1F1B", (8,), "spread", (1, 4, 8), [3, 1, 3, 1]),
    ("GPipe", (2,), "last", (1, 3, 5), []),
    ("Interleaved1F1B", (4,), "last", (1, 3, 7), []),
    ("Interleaved1F1B", (8,), "spread", (0, 3, 8), []),
    ("ZBVZeroBubble", (6,), "last", (1, 3, 7), []),
    ("ZBVZeroBubble", (5,), "spread", (2, 4, 6), []),
]


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return make_base(tmp_path_factory.mktemp("base") / "tiny", TINY)


@pytest.fixture(scope="module")
def on_two(base, tmp_path_factory) -> list[dict[str, Any]]:
    """What two ranks found, in one world: starting one takes longer than most checks."""
    return run_world(2, all_on_two, tmp_path_factory.mktemp("world"), base, parallel=Parallel(pp=2))


def all_on_two(mesh: Mesh, base: Path) -> dict[str, Any]:
    return {
        "taps": compare_taps(mesh, base, ON_TWO),
        "stepped": weights_and_steps(mesh, base),
        "held": watch_buffers(mesh, base),
        "watched": watch(mesh, base),
    }


def config_of(schedule: str, placement: str = "last", sizes: list[int] | None = None) -> Config:
    return small_config(
        parallel__schedule=schedule,
        parallel__draft_placement=placement,
        parallel__layers_per_stage=sizes or [],
    )


def log_likelihood(index: int, output: Any, batch: Batch) -> Tensor:
    return -output.logprobs.sum()


def compare_taps(mesh: Mesh, base: Path, cases: list[Case]) -> list[tuple[str, int, int]]:
    """Raises where a tap differs; returns where the draft was trained: (case, microbatches, microbatch)."""
    spec = PolicySpec.from_hf(base, 128)
    whole = Policy(spec)
    hf.load_hf(whole, base)
    trained = []
    for case, (schedule, counts, placement, aux, sizes) in enumerate(cases):
        policy = build_policy(config_of(schedule, placement, sizes), mesh, base, spec)
        for count in counts:
            packs = packing.pack(fixed_rollouts(groups=5), 4096, count)

            def check(batch: Batch, taps: Taps, packs=packs, aux=aux, count=count, case=case) -> None:
                with torch.no_grad():
                    expected = whole(batch, aux_layers=aux, **HOW).taps
                assert torch.equal(taps.embeds, expected.embeds)
                assert all(torch.equal(a, b) for a, b in zip(taps.aux, expected.aux, strict=True))
                assert torch.equal(taps.final, expected.final)
                m = next(m for m, pack in enumerate(packs) if pack is batch)
                trained.append((case, count, m))

            policy.forward_backward(packs, log_likelihood, aux_layers=aux, draft_step=check, **HOW)
            policy.zero_grad()
            (channel,) = policy._channels.values()
            made = sum(
                n for stage, n in channel.sources.items() if channel.stage_ranks[stage] == mesh.pp_rank
            )
            away = [len(p.tokens) for p, sink in zip(packs, channel._draft_ranks) if sink != mesh.pp_rank]
            assert channel.bytes_sent == 4 * TINY.dim * made * sum(away)  # b n sum_s d_s
    return trained


def assert_trained_where(results: list[list[tuple[int, int, int]]], cases: list[Case]) -> None:
    ranks = len(results)
    for case, (schedule, counts, placement, *_) in enumerate(cases):
        for count in counts:
            for m in range(count):
                where = [rank for rank, trained in enumerate(results) if (case, count, m) in trained]
                last = 0 if schedule == "ZBVZeroBubble" else ranks - 1
                assert where == [last if placement == "last" else m % ranks]
    assert all(len(trained) == len(set(trained)) for trained in results)


def test_taps_are_those_of_the_whole_policy(on_two) -> None:
    assert_trained_where([found["taps"] for found in on_two], ON_TWO)


@pytest.mark.slow
def test_taps_on_four_ranks(base, tmp_path) -> None:
    results = run_world(4, compare_taps, tmp_path, base, ON_FOUR, parallel=Parallel(pp=4))
    assert_trained_where(results, ON_FOUR)


def watch(mesh: Mesh, base: Path) -> dict[str, Any]:
    """What the schedule sends and receives, and the gradients, with the draft on and off."""
    calls: list[tuple[str, int, int]] = []
    for name in ("get_fwd_send_ops", "get_fwd_recv_ops", "get_bwd_send_ops", "get_bwd_recv_ops"):
        plain = getattr(PipelineStage, name)

        def logged(stage, m, name=name, plain=plain):
            ops = plain(stage, m)
            calls.extend((f"{name} {op.op.__name__} {op.group_peer}", stage.stage_index, m) for op in ops)
            return ops

        setattr(PipelineStage, name, logged)
    found = {}
    for schedule in ("1F1B", "ZBVZeroBubble"):
        for placement in ("last", "spread"):
            config = config_of(schedule, placement)
            config.train.pack_tokens = 60
            for on in (True, False):
                calls.clear()
                update = reinforce(mesh, base, {"": (config, on)})[""]
                found[schedule, placement, on] = (list(calls), update["policy"], "draft" in update)
    return found


def test_policy_and_schedule_are_the_same_without_the_draft(on_two) -> None:
    for results in on_two:
        found = results["watched"]
        for (schedule, placement, on), (calls, gradients, drafted) in found.items():
            assert drafted == on
            without_calls, without, _ = found[schedule, placement, False]
            assert calls
            assert calls == without_calls
            assert gradients.keys() == without.keys()
            assert all(torch.equal(gradient, without[name]) for name, gradient in gradients.items())


def watch_buffers(mesh: Mesh, base: Path) -> dict[str, tuple[int, int, bool]]:
    """By schedule, of 8 microbatches: the most receive buffers before a forward, how many are left at the end,
    and whether a loss has a graph then."""
    packs = packing.pack(fixed_rollouts(groups=5), 4096, 8)
    spec = PolicySpec.from_hf(base, 128)
    return {
        schedule: held_by(build_policy(config_of(schedule), mesh, base, spec), packs)
        for schedule in ("1F1B", "GPipe", "Interleaved1F1B", "ZBVZeroBubble")
    }


def held_by(policy: Policy, packs: list[Batch]) -> tuple[int, int, bool]:
    stages: set[ScheduledStage] = set()
    losses: list[Tensor] = []
    held = []
    plain = ScheduledStage.forward_one_chunk

    def count() -> int:
        infos = [i for stage in stages for i in (stage.args_recv_info, stage.grad_recv_info)]
        return sum(info.buffer is not None for of in infos for each in of.values() for info in each)

    def forward(stage: ScheduledStage, *args: Any, **kwargs: Any) -> Any:
        stages.add(stage)
        held.append(count())
        return plain(stage, *args, **kwargs)

    def loss(*args: Any) -> Tensor:
        losses.append(log_likelihood(*args))
        return losses[-1]

    with patch.object(ScheduledStage, "forward_one_chunk", forward):
        policy.forward_backward(packs, loss, **HOW)
    return max(held), count(), any(loss.grad_fn is not None for loss in losses)


def test_a_receive_buffer_lasts_from_its_receive_to_its_backward(on_two) -> None:
    for results in on_two:
        held = results["held"]
        assert {schedule: found[1:] for schedule, found in held.items()} == dict.fromkeys(held, (0, False))
        assert held["1F1B"][0] <= 1


def weights_and_steps(mesh: Mesh, base: Path) -> dict[str, Any]:
    spec = PolicySpec.from_hf(base, 128)
    whole = Policy(spec)
    hf.load_hf(whole, base)
    packs = packing.pack(fixed_rollouts(groups=5), 4096, 4)
    found: dict[str, Any] = {}
    for schedule in ("1F1B", "Interleaved1F1B", "ZBVZeroBubble"):
        policy = build_policy(config_of(schedule, "spread"), mesh, base, spec)
        weights = dict(policy.hf_weights())
        expected = dict(whole.hf_weights())
        assert list(weights) == list(expected)
        assert all(torch.equal(weights[name], weight) for name, weight in expected.items())
        assert torch.equal(policy.head_weight(), whole.head_weight())
        assert {*dict(policy.named_parameters())} < {*dict(whole.named_parameters())}

        scores = policy.score(packs, **HOW)
        assert len(scores) == (4 if mesh.pp_rank == policy.where[-1] else 0)
        for score, expected_score in zip(scores, whole.score(packs, **HOW)):
            assert torch.equal(score, expected_score)

        optim = Optim(lr=0.1, clip=0.5)
        optimizer = ModelOptimizer("policy", policy, optim, 1, mesh.sum_over_pp_)
        policy.forward_backward(packs, log_likelihood, **HOW)
        norm = optimizer.clip()
        optimizer.step()
        found[schedule] = norm, {name: full(p) for name, p in policy.named_parameters()}
    optimizer = ModelOptimizer("policy", whole, optim, 1)
    whole.forward_backward(packs, log_likelihood, **HOW)
    norm = optimizer.clip()
    optimizer.step()
    found["whole"] = norm, {name: full(p) for name, p in whole.named_parameters()}
    return found


def test_weights_scores_and_clipped_steps_are_those_of_the_whole_policy(on_two) -> None:
    for results in on_two:
        found = dict(results["stepped"])
        norm, expected = found.pop("whole")
        assert norm > 0.5  # it was clipped
        for other, weights in found.values():
            assert other == pytest.approx(norm, rel=1e-5)
            for name, weight in weights.items():
                torch.testing.assert_close(weight, expected[name], rtol=1e-4, atol=1e-6)
