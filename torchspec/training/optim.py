"""One optimizer per model: its own learning rate, schedule and gradient clip."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torchspec.config.schema import Optim


class ModelOptimizer:
    """AdamW, schedule and clip of one model, the policy or the draft.

    Each model has its own, so a joint gradient norm can never let the draft scale the policy's update.

    Args:
        sum_over_stages: adds up, in place, a tensor over the ranks that hold different layers of the model.
    """

    def __init__(
        self,
        name: str,
        model: nn.Module,
        optim: Optim,
        total_steps: int,
        sum_over_stages: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.name = name
        self.model = model
        self.optim = optim
        self.total_steps = total_steps
        self.sum_over_stages = sum_over_stages
        self.optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=optim.lr,
            betas=(optim.beta1, optim.beta2),
            eps=optim.eps,
            weight_decay=optim.weight_decay,
        )
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: lr_factor(optim, step, total_steps)
        )

    @property
    def lr(self) -> float:
        return float(self.schedule.get_last_lr()[0])

    @property
    def updates(self) -> int:
        """Steps taken so far."""
        return self.schedule.last_epoch

    def moments(self) -> dict[str, Tensor]:
        """AdamW's running means by parameter name; empty before the first update."""
        state = self.optimizer.state
        return {
            f"{name}.{key}": state[p][key]
            for name, p in self.model.named_parameters()
            for key in ("exp_avg", "exp_avg_sq")
            if p in state
        }

    def resume_at(self, updates: int) -> None:
        """Be as after so many updates but for the moments, which are zeros and are to be filled."""
        for p in self.model.parameters() if updates else ():
            self.optimizer.state[p] = {
                "step": torch.tensor(float(updates), dtype=torch.float32),
                "exp_avg": torch.zeros_like(p),
                "exp_avg_sq": torch.zeros_like(p),
            }
        lr = self.optim.lr * lr_factor(self.optim, updates, self.total_steps)
        self.schedule.load_state_dict({**self.schedule.state_dict(), "last_epoch": updates, "_last_lr": [lr]})
        self.optimizer.param_groups[0]["lr"] = lr

    def clip(self) -> float:
        """Scale the gradient down to at most the clip's norm; returns the norm it had.

        Apart from `step`, so that no model makes a step where another's gradient is not finite. Collective.

        Raises:
            FloatingPointError: the gradient is not finite.
            RuntimeError: a parameter got no gradient, so part of the model was silently not trained.
        """
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        if missing := [n for n, p in self.model.named_parameters() if p.requires_grad and p.grad is None]:
            raise RuntimeError(
                f"no gradient reached {self.name} parameters {missing[:5]} ({len(missing)} in all)"
            )
        total = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        total = total.full_tensor() if isinstance(total, DTensor) else total
        if self.sum_over_stages:
            total = self.sum_over_stages(total.square()).sqrt()
        norm = total.item()
        if not math.isfinite(norm):
            raise FloatingPointError(f"the {self.name}'s gradient norm is {norm}; no update was made")
        if self.optim.clip:
            torch.nn.utils.clip_grads_with_norm_(parameters, self.optim.clip, total)
        return norm

    def step(self) -> None:
        """Update by the gradient as it is, advance the schedule, clear the gradient."""
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()


def lr_factor(optim: Optim, step: int, total_steps: int) -> float:
    """Factor on the learning rate at a 0-based optimizer step: linear warm-up, then the schedule.

    Example: linear, warmup_steps = 2, min_lr_ratio = 0, 6 steps: 1/2, 1, 1, 3/4, 1/2, 1/4
    """
    if step < optim.warmup_steps:
        return (step + 1) / optim.warmup_steps
    if optim.schedule == "constant":
        return 1.0
    done = min(1.0, (step - optim.warmup_steps) / max(1, total_steps - optim.warmup_steps))
    shape = 1 - done if optim.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return optim.min_lr_ratio + (1 - optim.min_lr_ratio) * shape
