"""The policy's loss: token-level GRPO with clip-higher and truncated importance weights.

Shape letters: T tokens of a pack. Everything is row-aligned as in `records.Batch`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from torchspec.config.schema import RL
from torchspec.records import Batch


@dataclass(kw_only=True, slots=True)
class PolicyLoss:
    """The loss to call backward on, and what is logged of it.

    `sums` are detached sums over this pack's valid rows: add them over packs and ranks and divide by
    `tokens` for means. `max_ratio` is the largest importance ratio of the pack.
    """

    loss: Tensor
    tokens: Tensor
    sums: dict[str, Tensor]
    max_ratio: Tensor


def policy_loss(
    logprobs: Tensor,
    entropy: Tensor,
    batch: Batch,
    rl: RL,
    denominator: float,
    old_logprobs: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
) -> PolicyLoss:
    """GRPO over the valid tokens of one pack, divided by the global number of valid tokens.

    Three policies take part: the one being trained (`logprobs`), the one the step started with
    (`old_logprobs`; `logprobs` itself where the step has a single update) and the engine that sampled
    (`batch.rollout_logprobs`). The ratio of the first two is clipped to [1 - clip_low, 1 + clip_high]
    (PPO; clip-higher of DAPO, arXiv 2503.14476); the ratio of the last two, which is 1 but for
    numerics, corrects the sampling as a truncated importance weight
    min(old / engine, tis_cap).

    Args:
        logprobs: [T] fp32 log-probabilities of `batch.targets` under the law that the engine samples with.
        entropy: [T] fp32, nats, logged only.
        denominator: valid tokens over all ranks and packs of this update.
        ref_logprobs: [T] of the frozen reference; needed iff rl.kl_coef > 0.
    """
    mask = batch.target_mask
    old = logprobs.detach() if old_logprobs is None else old_logprobs
    ratio = torch.exp(logprobs - old)
    clipped = ratio.clamp(1 - rl.clip_low, 1 + rl.clip_high)
    engine_gap = old - batch.rollout_logprobs
    weight = engine_gap.exp().clamp(max=rl.tis_cap) if rl.tis_cap else torch.ones_like(engine_gap)
    per_token = -weight * torch.minimum(ratio * batch.advantages, clipped * batch.advantages)
    sums = {
        "policy/loss": per_token,
        "policy/entropy": entropy,
        "policy/ratio": ratio,
        "policy/clip_fraction": (ratio * batch.advantages > clipped * batch.advantages).float(),
        # k3 estimator of KL(engine || trainer) from tokens the engine sampled; never negative
        "policy/kl_train_rollout": engine_gap.exp() - 1 - engine_gap,
        "policy/importance_weight": weight,
    }
    if ref_logprobs is not None:
        gap = ref_logprobs - logprobs
        # k3, weighted: its expectation over what the engine samples is KL(policy || reference), and so is its gradient.
        kl_ref = weight * ratio * (gap.exp() - 1 - gap)
        per_token = per_token + rl.kl_coef * kl_ref
        sums["policy/kl_reference"] = kl_ref
    zero = logprobs.new_zeros(())
    return PolicyLoss(
        # The sum over no row keeps its graph, so a rank without valid tokens still joins the backward.
        loss=torch.where(mask, per_token, zero).sum() / denominator,
        tokens=mask.sum(),
        sums={name: torch.where(mask, value.detach(), zero).sum() for name, value in sums.items()},
        max_ratio=torch.cat([ratio.detach()[mask], zero[None]]).max(),  # a rank may have no row
    )


def supervised_loss(logprobs: Tensor, batch: Batch, denominator: float) -> Tensor:
    """Mean negative log-likelihood of the valid targets, by the global number of them."""
    return -torch.where(batch.target_mask, logprobs, logprobs.new_zeros(())).sum() / denominator
