"""The update does not depend on how the data are split over ranks and packs, nor on the draft."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.dist.learning import build, fixed_rollouts, full, gradients, make_base, reinforce, small_config
from tests.dist.worlds import run_world
from torchspec.data import packing
from torchspec.distributed.mesh import Mesh
from torchspec.errors import NonFinite
from torchspec.metrics.meter import Meter
from torchspec.records import SamplingLaw

pytestmark = pytest.mark.dist

CASES = {
    "one pack": (small_config(), True),
    "packs of 60": (small_config(train__pack_tokens=60), True),
    "packs of 60, no draft": (small_config(train__pack_tokens=60), False),
    "two minibatches": (small_config(rl__minibatches=2), True),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return make_base(tmp_path_factory.mktemp("base") / "tiny")


@pytest.fixture(scope="module")
def updates(base, tmp_path_factory) -> dict[int, list[dict[str, dict[str, Any]]]]:
    """What every rank saw in every case, by number of ranks."""
    return {
        ranks: run_world(ranks, reinforce, tmp_path_factory.mktemp("world"), base, CASES) for ranks in (1, 2)
    }


@pytest.mark.parametrize("case", ["one pack", "packs of 60"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_loss_and_gradients_do_not_depend_on_the_split(updates, ranks, case) -> None:
    single = updates[1][0]["one pack"]
    for rank in updates[ranks]:
        result = rank[case]
        for name, value in single["metrics"].items():
            if not name.startswith("perf/"):
                assert result["metrics"][name] == pytest.approx(value, rel=1e-5, abs=1e-6), name
        for model in ("policy", "draft"):
            assert result[model].keys() == single[model].keys()
            for name, expected in single[model].items():
                scale = expected.abs().max().item()
                assert scale > 0, name
                torch.testing.assert_close(result[model][name], expected, rtol=1e-5, atol=1e-5 * scale)


@pytest.mark.parametrize("ranks", [1, 2])
def test_policy_gradients_are_bitwise_the_same_without_the_draft(updates, ranks) -> None:
    with_draft, without = (updates[ranks][0][case] for case in ("packs of 60", "packs of 60, no draft"))
    assert "draft" in with_draft
    assert "draft" not in without
    assert with_draft["policy"].keys() == without["policy"].keys()
    assert all(torch.equal(g, without["policy"][name]) for name, g in with_draft["policy"].items())


def test_metrics_of_several_updates_are_means_over_them(updates) -> None:
    """Nothing steps here, so one update and two see the same policy: token means agree, losses stay near."""
    one, two = (updates[1][0][case]["metrics"] for case in ("one pack", "two minibatches"))
    for name in (
        "policy/entropy",
        "policy/kl_train_rollout",
        "policy/ratio",
        "draft/ce_0",
        "draft/overlap_2",
    ):
        assert two[name] == pytest.approx(one[name], rel=1e-5), name
    assert two["draft/loss"] == pytest.approx(one["draft/loss"], rel=0.1)


def separate_backwards(mesh: Mesh, base: Path) -> list[list[str]]:
    """Names of the policy's and the draft's parameters with a gradient after the policy's backward alone,
    then after the draft's alone."""
    learner, _ = build(mesh, base, small_config())
    (batch,) = packing.pack(fixed_rollouts(), 4096)
    policy, trainer = learner.policy, learner.draft.trainer
    output = policy(batch, law=SamplingLaw(temperature=1.0), logprob_rows=64, aux_layers=trainer.aux_layers)
    output.logprobs.sum().backward()
    names = [sorted(gradients(policy)), sorted(gradients(trainer.draft))]
    policy.zero_grad()
    trainer.backward(batch, output.taps, policy.head_weight(), 1.0)
    return [*names, sorted(gradients(policy)), sorted(gradients(trainer.draft))]


def test_each_loss_reaches_its_own_model_only(base, tmp_path) -> None:
    policy, draft, policy_after, draft_after = run_world(1, separate_backwards, tmp_path, base)[0]
    assert policy
    assert not draft
    assert draft_after
    assert not policy_after


def poisoned(mesh: Mesh, base: Path) -> dict[str, Any]:
    """An update in which rank 1 alone has a rollout with an infinite advantage; another in which a weight of
    the draft has a NaN: what was raised, and whether the weights changed."""
    learner, _ = build(mesh, base, small_config())
    for optimizer in learner.optimizers.values():
        del optimizer.clip, optimizer.step  # doubles that make no step
    before = {n: full(p) for n, p in learner.policy.named_parameters()}
    mine = [r for r in fixed_rollouts() if int(r.problem_id[1:]) % mesh.dp_size == mesh.dp_rank]
    if mesh.rank == mesh.world_size - 1:
        mine[-1].advantage = float("inf")
    errors = []
    with pytest.raises(NonFinite) as error:
        learner.reinforce(mine, Meter(), train_draft=True)
    errors.append(str(error.value))
    same = all(torch.equal(before[n], full(p)) for n, p in learner.policy.named_parameters())
    learner.policy_optimizer.optimizer.zero_grad()
    learner.draft.optimizer.optimizer.zero_grad()
    mine[-1].advantage = 0.5
    weight = learner.draft.trainer.draft.fc.weight
    with torch.no_grad():
        weight.mul_(float("nan"))
    before_draft = full(learner.draft.trainer.draft.lm_head.weight)
    with pytest.raises(NonFinite) as error:
        learner.reinforce(mine, Meter(), train_draft=True)
    errors.append(str(error.value))
    same &= all(torch.equal(before[n], full(p)) for n, p in learner.policy.named_parameters())
    same_draft = torch.equal(before_draft, full(learner.draft.trainer.draft.lm_head.weight))
    return {"errors": errors, "same": same, "same_draft": same_draft}


def test_what_is_not_finite_stops_every_rank_before_the_optimizer_step(tmp_path, base) -> None:
    for result in run_world(2, poisoned, tmp_path, base):
        assert result["same"]
        assert result["same_draft"]
        policy, draft = result["errors"]
        assert "policy's loss is not finite" in policy
        assert "draft's gradient norm is nan; no update was made" in draft
