"""A learner on fixed rollouts, for worlds of any size: the parts of the real run, small."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from torchspec.build import build_learner, build_policy
from torchspec.config.schema import Config, TinyModel
from torchspec.distributed.mesh import Mesh
from torchspec.drafts.build import build_draft, draft_spec, draft_trainer
from torchspec.metrics.meter import Meter
from torchspec.models.spec import PolicySpec
from torchspec.models.tiny import make_tiny
from torchspec.records import Rollout
from torchspec.training.learner import DraftLearner, Learner
from torchspec.training.optim import ModelOptimizer

TINY = TinyModel(dim=32, layers=3, heads=4, kv_heads=2, head_dim=8, ffn_dim=48)


def make_base(folder: Path, tiny: TinyModel = TINY) -> Path:
    make_tiny(folder, tiny, max_len=128, seed=3)
    return folder


def small_config(**overrides: Any) -> Config:
    config = Config()
    config.draft.aux_layers = [1, 2, 3]
    config.draft.ttt_steps = 3
    config.draft.loss_rows = 16
    config.model.max_len = 128
    config.train.logprob_rows = 16
    for dotted, value in overrides.items():
        section, key = dotted.split("__")
        setattr(getattr(config, section), key, value)
    return config


def fixed_rollouts(groups: int = 4, samples: int = 3) -> list[Rollout]:
    """Groups of different lengths; one response is cut and masked, one is a single token."""
    draw = random.Random(0)
    rollouts = []
    for g in range(groups):
        prompt = [draw.randrange(3, 90) for _ in range(draw.randrange(2, 20))]
        for s in range(samples):
            length = 1 if (g, s) == (0, 0) else draw.randrange(2, 30)
            rollouts.append(
                Rollout(
                    problem_id=f"p{g}",
                    sample=s,
                    prompt_tokens=prompt,
                    tokens=[draw.randrange(3, 90) for _ in range(length)],
                    logprobs=[-draw.uniform(2, 6) for _ in range(length)],
                    finish="stop",
                    policy_version=0,
                    draft_version=0,
                    advantage=draw.uniform(-1, 1),
                    train=(g, s) != (1, 1),
                )
            )
    return rollouts


def full(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return tensor.detach().clone()


def gradients(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: full(p.grad) for name, p in module.named_parameters() if p.grad is not None}


def build(mesh: Mesh, base: Path, config: Config) -> tuple[Learner, dict[str, dict[str, torch.Tensor]]]:
    """A learner whose optimizers record full gradients instead of stepping."""
    spec = PolicySpec.from_hf(base, config.model.max_len)
    policy = build_policy(config, mesh, base, spec)
    draft = build_draft(config, mesh, draft_spec(config, spec), {}, [])  # full vocabulary: no counts needed
    seen: dict[str, dict[str, torch.Tensor]] = {}
    sides = {
        "policy": ModelOptimizer("policy", policy, config.optim, 10, policy.sum_over_stages),
        "draft": ModelOptimizer("draft", draft, config.draft.optim, 10),
    }
    for name, optimizer in sides.items():

        def clip(name: str = name, model: nn.Module = optimizer.model) -> float:
            seen[name] = gradients(model)
            return 0.0

        optimizer.clip, optimizer.step = clip, optimizer.model.zero_grad
    trainer = draft_trainer(config.draft, draft)
    side = DraftLearner(trainer, sides["draft"])
    return build_learner(config, mesh, policy, sides["policy"], side), seen


def reinforce(
    mesh: Mesh, base: Path, cases: dict[str, tuple[Config, bool]]
) -> dict[str, dict[str, dict[str, Any]]]:
    """One update per case (config, train the draft?) on this rank's groups: metrics and full gradients."""
    results = {}
    # In the order in which two ranks of a replica would have them: minibatches depend on it.
    ordered = sorted(fixed_rollouts(), key=lambda r: int(r.problem_id[1:]) % 2)
    for name, (config, train_draft) in cases.items():
        learner, seen = build(mesh, base, config)
        mine = [r for r in ordered if int(r.problem_id[1:]) % mesh.world_size == mesh.rank]
        meter = Meter()
        learner.reinforce(mine, meter, train_draft)
        results[name] = {"metrics": meter.reduce(mesh), **seen}
    return results
