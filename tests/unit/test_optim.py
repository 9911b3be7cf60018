"""Schedules, clipping and the refusal to update on what is not a gradient."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from torchspec.config.schema import Optim
from torchspec.training.optim import ModelOptimizer, lr_factor


@pytest.mark.parametrize(
    ("optim", "steps", "expected"),
    [
        (Optim(), 3, [1, 1, 1]),
        (Optim(schedule="linear", warmup_steps=2), 6, [1 / 2, 1, 1, 3 / 4, 1 / 2, 1 / 4, 0]),
        (Optim(schedule="linear", min_lr_ratio=0.5), 2, [1, 0.75, 0.5, 0.5]),
        (Optim(schedule="cosine"), 2, [1, 0.5, 0]),
        (Optim(warmup_steps=4), 2, [0.25, 0.5, 0.75, 1, 1]),
    ],
)
def test_the_schedule(optim, steps, expected) -> None:
    assert [lr_factor(optim, step, steps) for step in range(len(expected))] == pytest.approx(expected)


def model_with_gradient(value: float) -> nn.Linear:
    model = nn.Linear(3, 2)
    for p in model.parameters():
        p.grad = torch.full_like(p, value)
    return model


def test_a_step_clips_updates_and_clears() -> None:
    model, twin = model_with_gradient(10.0), model_with_gradient(0.0)
    twin.load_state_dict(model.state_dict())
    norm = 10.0 * math.sqrt(8)
    for p in twin.parameters():
        p.grad = torch.full_like(p, 10.0 * 0.5 / norm)
    reference = torch.optim.AdamW(twin.parameters(), lr=0.1, betas=(0.9, 0.95), eps=1e-3, weight_decay=0.1)
    reference.step()
    optimizer = ModelOptimizer("policy", model, Optim(lr=0.1, clip=0.5, eps=1e-3, weight_decay=0.1), 4)
    assert optimizer.clip() == pytest.approx(norm)
    optimizer.step()
    for p, q in zip(model.parameters(), twin.parameters()):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7)
        assert p.grad is None


def test_clip_zero_is_no_clip() -> None:
    model = model_with_gradient(10.0)
    seen = []
    optimizer = ModelOptimizer("policy", model, Optim(lr=0.1, clip=0.0), 4)
    optimizer.optimizer.register_step_pre_hook(lambda *_: seen.append(model.weight.grad.max().item()))
    optimizer.clip()
    optimizer.step()
    assert seen == [10.0]


def test_the_learning_rate_follows_the_schedule() -> None:
    model = model_with_gradient(1.0)
    optimizer = ModelOptimizer("draft", model, Optim(lr=0.1, schedule="linear"), 2)
    assert optimizer.lr == 0.1
    optimizer.step()
    assert optimizer.lr == pytest.approx(0.05)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_is_refused_and_left_as_it_is(value) -> None:
    model = model_with_gradient(10.0)
    model.bias.grad[0] = value
    with pytest.raises(FloatingPointError, match=f"the draft's gradient norm is {value}; no update was made"):
        ModelOptimizer("draft", model, Optim(clip=0.5), 4).clip()
    assert (model.weight.grad == 10.0).all()


def test_a_parameter_without_a_gradient_is_an_error() -> None:
    model = model_with_gradient(1.0)
    model.bias.grad = None
    with pytest.raises(RuntimeError, match=r"no gradient reached policy parameters \['bias'\]"):
        ModelOptimizer("policy", model, Optim(), 4).clip()
