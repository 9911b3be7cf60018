"""Builds the objects of a run from its config: checkpoint folder, sharded policy, draft, learner."""

from __future__ import annotations

from pathlib import Path

from torchspec.checkpoint.cache import cache_folder, fingerprint, private_name, publish
from torchspec.config.schema import Config, Optim
from torchspec.distributed.context_parallel import policy_transport
from torchspec.distributed.fsdp import compute_dtype
from torchspec.distributed.mesh import Mesh
from torchspec.distributed.parallelize import load_policy
from torchspec.drafts.base import DraftModel
from torchspec.drafts.build import draft_trainer
from torchspec.models.hf import resolve_source
from torchspec.models.policy import Policy
from torchspec.models.spec import PolicySpec
from torchspec.models.tiny import make_tiny
from torchspec.training.learner import DraftLearner, Learner
from torchspec.training.optim import ModelOptimizer


def base_folder(config: Config, mesh: Mesh) -> Path:
    """Return the Hugging Face folder that the run starts from; a tiny policy is created once and cached."""
    model = config.model
    if model.source != "tiny":
        return resolve_source(model.source)
    folder = cache_folder(config) / f"tiny-{fingerprint(model.tiny, model.max_len, config.run.seed)}"
    if mesh.from_main(not folder.exists()):
        private = private_name(folder, mesh)
        if mesh.is_main:
            make_tiny(private, model.tiny, model.max_len, config.run.seed)
        publish(private, folder, mesh)
    return folder


def build_policy(config: Config, mesh: Mesh, folder: Path, spec: PolicySpec) -> Policy:
    """Return the policy with the folder's weights, parallelized; master weights are fp32."""
    return load_policy(folder, spec, mesh, config)


def build_learner(
    config: Config,
    mesh: Mesh,
    policy: Policy,
    policy_optimizer: ModelOptimizer,
    draft: DraftLearner | None = None,
    reference: Policy | None = None,
) -> Learner:
    """Return a learner for these models, with the compute dtype and the attention transport of the config."""
    return Learner(
        config,
        mesh,
        policy,
        policy_optimizer,
        draft,
        reference,
        dtype=compute_dtype(config),
        transport=policy_transport(config, policy.spec, mesh.cp_size),
    )


def rl_learner(config: Config, mesh: Mesh, policy: Policy, draft: DraftModel | None, start: Path) -> Learner:
    """Return the learner of the RL steps.

    Args:
        start: the folder of the policy before the first step, the reference of the KL term.
    """
    updates = config.run.steps * config.rl.minibatches
    draft_updates = updates // config.draft.train_every if config.draft.train_every else 0
    reference = None
    if config.rl.kl_coef:
        reference = build_policy(config, mesh, start, policy.spec).eval().requires_grad_(False)
    optimizer = _policy_optimizer(policy, config.optim, updates)
    return build_learner(
        config, mesh, policy, optimizer, _draft_learner(config, draft, draft_updates), reference
    )


def warmup_learner(config: Config, mesh: Mesh, policy: Policy, draft: DraftModel | None) -> Learner:
    """Return the learner of the supervised warm-up, with its own learning rate and schedule."""
    warmup = config.warmup
    optim = Optim(lr=warmup.lr, schedule="cosine", min_lr_ratio=0.1, warmup_steps=10)
    optimizer = _policy_optimizer(policy, optim, warmup.steps)
    return build_learner(config, mesh, policy, optimizer, _draft_learner(config, draft, warmup.draft_steps))


def _policy_optimizer(policy: Policy, optim: Optim, updates: int) -> ModelOptimizer:
    return ModelOptimizer("policy", policy, optim, updates, policy.sum_over_stages)


def _draft_learner(config: Config, draft: DraftModel | None, updates: int) -> DraftLearner | None:
    if draft is None:
        return None
    optimizer = ModelOptimizer("draft", draft, config.draft.optim, updates)
    return DraftLearner(draft_trainer(config.draft, draft), optimizer)
