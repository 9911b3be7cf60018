"""The policy's loss against the formula written out per token."""

from __future__ import annotations

import math

import pytest
import torch

from torchspec.config.schema import RL
from torchspec.records import Batch
from torchspec.training.policy_loss import policy_loss, supervised_loss

T = 40


@pytest.fixture
def pack() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)

    def normal(scale: float) -> torch.Tensor:
        return torch.randn(T, generator=draw, dtype=torch.float64) * scale

    new = normal(1.0) - 3
    return {
        "new": new,
        "old": new + normal(0.4),
        "engine": new + normal(0.4),
        "ref": new + normal(0.4),
        "advantages": normal(1.0),
        "mask": torch.rand(T, generator=draw) < 0.7,
    }


def batch_of(pack: dict[str, torch.Tensor]) -> Batch:
    ids = torch.zeros(T, dtype=torch.int64)
    return Batch(
        tokens=ids,
        positions=ids,
        targets=ids,
        target_mask=pack["mask"],
        rollout_logprobs=pack["engine"],
        advantages=pack["advantages"],
        chain=ids,
        cu_seqlens=torch.tensor([0, T], dtype=torch.int32),
    )


def expected_loss(pack: dict[str, torch.Tensor], rl: RL, old: torch.Tensor) -> float:
    total = 0.0
    for t in range(T):
        if not pack["mask"][t]:
            continue
        new, engine, ref, a = (float(pack[k][t]) for k in ("new", "engine", "ref", "advantages"))
        ratio = math.exp(new - float(old[t]))
        clipped = min(max(ratio, 1 - rl.clip_low), 1 + rl.clip_high)
        weight = min(math.exp(float(old[t]) - engine), rl.tis_cap) if rl.tis_cap else 1.0
        total += -weight * min(ratio * a, clipped * a)
        total += rl.kl_coef * weight * ratio * (math.exp(ref - new) - 1 - (ref - new))
    return total / 100.0


@pytest.mark.parametrize(
    "rl", [RL(), RL(clip_high=0.5, clip_low=0.1), RL(tis_cap=0.0), RL(tis_cap=1.1), RL(kl_coef=0.3)]
)
@pytest.mark.parametrize("updates", ["one", "several"])
def test_equals_the_formula_token_by_token(pack, rl, updates) -> None:
    old = pack["old"] if updates == "several" else None
    ref = pack["ref"] if rl.kl_coef else None
    result = policy_loss(pack["new"], torch.zeros(T), batch_of(pack), rl, 100.0, old, ref)
    expected = expected_loss(pack, rl, pack["new"] if old is None else old)
    assert result.loss.item() == pytest.approx(expected, abs=1e-12)
    assert result.tokens == pack["mask"].sum()


@pytest.mark.parametrize("engine", ["the policy", "another"])
@pytest.mark.parametrize("updates", ["one", "several"])
def test_the_expected_kl_term_is_the_kl_of_policy_and_reference(engine, updates) -> None:
    """Its value and its gradient, summed exactly over a vocabulary; k3 alone has another gradient."""
    draw = torch.Generator().manual_seed(3)
    new, old, ref, other = (torch.randn(T, generator=draw, dtype=torch.float64) * 0.5 for _ in range(4))
    new.requires_grad_()
    policy, reference = new.log_softmax(0), ref.log_softmax(0)
    start = old.log_softmax(0) if updates == "several" else policy.detach()
    sampler = other.log_softmax(0) if engine == "another" else start
    kl = (policy.exp() * (policy - reference)).sum()
    (wanted,) = torch.autograd.grad(kl, new, retain_graph=True)

    # The token-level loss of every token, weighted with the engine's probability; without advantages only KL is left.
    rl, total = RL(kl_coef=1.0, tis_cap=1e9), torch.zeros((), dtype=torch.float64)
    for token in range(T):
        one = {"engine": sampler, "advantages": torch.zeros(T), "mask": torch.arange(T) == token}
        given = start if updates == "several" else None
        result = policy_loss(policy, torch.zeros(T), batch_of(one), rl, 1.0, given, reference)
        total = total + sampler[token].exp() * result.loss
    (found,) = torch.autograd.grad(total, new)
    assert total.item() == pytest.approx(kl.item(), abs=1e-12)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


def test_clip_higher_lets_good_tokens_rise_further_than_bad_ones_fall(pack) -> None:
    """Ratio 1.25 with A > 0 still has a gradient at clip_high 0.28, ratio 0.75 with A < 0 has none at 0.2."""
    old = torch.zeros(T, dtype=torch.float64)
    new = torch.full((T,), math.log(1.25), dtype=torch.float64)
    new[T // 2 :] = math.log(0.75)
    pack |= {"new": new.requires_grad_(), "engine": old, "mask": torch.ones(T, dtype=torch.bool)}
    pack["advantages"] = torch.cat([torch.ones(T // 2), -torch.ones(T // 2)]).double()
    result = policy_loss(pack["new"], old, batch_of(pack), RL(), 1.0, old)
    result.loss.backward()
    assert (pack["new"].grad[: T // 2] < 0).all()
    assert (pack["new"].grad[T // 2 :] == 0).all()
    assert result.sums["policy/clip_fraction"] == T // 2


def test_with_one_update_the_gradient_is_the_policy_gradient(pack) -> None:
    new = pack["new"].clone().requires_grad_()
    pack["engine"] = pack["new"]
    policy_loss(new, torch.zeros(T), batch_of(pack), RL(), 100.0).loss.backward()
    torch.testing.assert_close(new.grad, -pack["advantages"] * pack["mask"] / 100.0, rtol=1e-12, atol=0)


def test_the_train_rollout_kl_is_zero_only_without_a_gap(pack) -> None:
    sums = policy_loss(pack["new"], torch.zeros(T), batch_of(pack), RL(), 1.0).sums
    assert sums["policy/kl_train_rollout"] > 0.1
    pack["engine"] = pack["new"]
    sums = policy_loss(pack["new"], torch.zeros(T), batch_of(pack), RL(), 1.0).sums
    assert sums["policy/kl_train_rollout"] == 0
    assert sums["policy/importance_weight"] == pack["mask"].sum()


def test_a_pack_without_valid_tokens_has_zero_loss_and_a_graph(pack) -> None:
    pack["mask"] = torch.zeros(T, dtype=torch.bool)
    new = pack["new"].clone().requires_grad_()
    result = policy_loss(new, torch.zeros(T), batch_of(pack), RL(), 1.0)
    result.loss.backward()
    assert result.loss == 0
    assert (new.grad == 0).all()
    assert result.max_ratio == 0
    new.grad = None
    supervised_loss(new, batch_of(pack), 1.0).backward()
    assert (new.grad == 0).all()


def test_supervised_loss_is_the_mean_negative_log_likelihood(pack) -> None:
    loss = supervised_loss(pack["new"], batch_of(pack), float(pack["mask"].sum()))
    assert loss.item() == pytest.approx(-pack["new"][pack["mask"]].mean().item(), abs=1e-12)
