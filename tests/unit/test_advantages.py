"""Advantages of a group, and what becomes of responses that were cut."""

import math
import random
import statistics

import pytest

from torchspec.config.schema import RL
from torchspec.records import Rollout
from torchspec.rewards.advantages import group_advantages


def rollout(problem_id: str, reward: float | None, **fields) -> Rollout:
    defaults = dict(sample=0, prompt_tokens=[1], tokens=[2], logprobs=[-1.0], finish="stop")
    return Rollout(
        problem_id=problem_id, reward=reward, policy_version=0, draft_version=0, **{**defaults, **fields}
    )


def advantages(rollouts: list[Rollout], **rl) -> list[float]:
    group_advantages(rollouts, RL(**rl))
    return [r.advantage for r in rollouts]


def test_advantages_against_the_formula():
    rng = random.Random(0)
    rewards = {f"p{i}": [rng.random() for _ in range(8)] for i in range(4)}
    rollouts = [rollout(f"p{i % 4}", rewards[f"p{i % 4}"][i // 4]) for i in range(32)]  # interleaved groups
    for normalise in (True, False):
        for r, got in zip(rollouts, advantages(rollouts, normalise_std=normalise), strict=True):
            group = rewards[r.problem_id]
            scale = statistics.pstdev(group) + 1e-6 if normalise else 1.0
            assert got == pytest.approx((r.reward - statistics.fmean(group)) / scale, rel=1e-12)


def test_advantages_by_hand():
    rollouts = [rollout("p", x) for x in (0.0, 1.0)]
    assert advantages(rollouts) == pytest.approx([-0.5 / 0.500001, 0.5 / 0.500001], rel=1e-15)
    assert advantages(rollouts, normalise_std=False) == [-0.5, 0.5]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 10])
@pytest.mark.parametrize("normalise", [True, False])
def test_equal_rewards_give_exactly_0(size, normalise):
    for reward in (0.1, 0.7, 1.1, 1e9 + 0.1, -0.3):
        assert (
            advantages([rollout("p", reward) for _ in range(size)], normalise_std=normalise) == [0.0] * size
        )


def cut_group() -> list[Rollout]:
    return [rollout("p", 1.0), rollout("p", 0.0), rollout("p", 1.0, finish="length", advantage=9.0)]


def test_overlong_mask_leaves_the_statistics_and_the_loss():
    group = cut_group()
    assert advantages(group, overlong="mask", normalise_std=False) == [0.5, -0.5, 0.0]
    assert [r.train for r in group] == [True, True, False]
    assert [r.reward for r in group] == [1.0, 0.0, 1.0]


def test_overlong_penalise_counts_less():
    group = cut_group()
    got = advantages(group, overlong="penalise", overlong_penalty=1.5, normalise_std=False)
    assert got == pytest.approx([1 - 1 / 6, -1 / 6, -0.5 - 1 / 6])
    assert [r.train for r in group] == [True] * 3
    assert group[2].reward == -0.5
    assert [r.reward_parts for r in group] == [{"overlong": 0.0}, {"overlong": 0.0}, {"overlong": -1.5}]


def test_overlong_keep_is_as_any_other():
    group = cut_group()
    got = advantages(group, overlong="keep", normalise_std=False)
    assert got == pytest.approx([1 / 3, -2 / 3, 1 / 3])
    assert all(r.train for r in group)
    assert math.isclose(math.fsum(got), 0.0, abs_tol=1e-15)


def test_a_group_of_cut_responses_only():
    group = [rollout("p", x, finish="length") for x in (0.0, 1.0)]
    assert advantages(group, overlong="mask") == [0.0, 0.0]
    assert not any(r.train for r in group)
