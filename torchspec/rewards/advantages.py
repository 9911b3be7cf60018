"""Advantages of a group's responses."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torchspec.config.schema import RL
from torchspec.records import Rollout


def group_advantages(rollouts: Sequence[Rollout], rl: RL) -> None:
    """Fill `advantage` of scored `rollouts` from their groups, after the rule for cut responses.

    GRPO (arXiv 2402.03300, section 4.1): (r - mean) / (std + 1e-6) over the group, std of the population;
    without rl.normalise_std r - mean (Dr. GRPO, arXiv 2503.20783). Groups of one, and of equal rewards, get
    exactly 0. What rl.overlong does with a response whose `finish` is "length": "mask" takes it out of its
    group's statistics and of the policy loss; "penalise" subtracts rl.overlong_penalty from its reward (at
    every call); "keep" treats it as any other.
    """
    groups: dict[str, list[tuple[Rollout, float]]] = {}
    for r in rollouts:
        if r.reward is None:
            raise ValueError(f"rollout {r.sample} of {r.problem_id} has no reward")
        if r.finish == "length" and rl.overlong == "mask":
            r.train, r.advantage = False, 0.0
            continue
        if rl.overlong == "penalise":
            penalty = rl.overlong_penalty if r.finish == "length" else 0.0
            r.reward -= penalty
            r.reward_parts["overlong"] = 0.0 - penalty
        groups.setdefault(r.problem_id, []).append((r, r.reward))
    for group in groups.values():
        rewards = [reward for _, reward in group]
        mean = math.fsum(rewards) / len(rewards)
        std = math.sqrt(math.fsum((x - mean) ** 2 for x in rewards) / len(rewards))
        scale = 1.0 / (std + 1e-6) if rl.normalise_std else 1.0
        equal = min(rewards) == max(rewards)  # their mean may be off by a rounding error
        for r, reward in group:
            r.advantage = 0.0 if equal else (reward - mean) * scale
