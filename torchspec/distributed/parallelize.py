"""The one entry to every kind of parallelism: lays a policy out over the mesh as [parallel] asks."""

from __future__ import annotations

from pathlib import Path

import torch

from torchspec.config.schema import Config, Parallel
from torchspec.distributed.fsdp import compute_dtype, shard
from torchspec.distributed.mesh import Mesh
from torchspec.distributed.pipeline.policy import PipelinedPolicy
from torchspec.distributed.pipeline.split import split_layers
from torchspec.distributed.pipeline.tap_channel import connect
from torchspec.errors import ConfigError
from torchspec.models.hf import fill
from torchspec.models.policy import Policy
from torchspec.models.spec import PolicySpec


def load_policy(folder: Path, spec: PolicySpec, mesh: Mesh, config: Config) -> Policy:
    """Return a parallelized policy with the weights of `folder`, which never exists in full on one rank.

    Raises:
        ConfigError: the policy cannot be split as asked for, or the weights do not fit `spec` (see `load_hf`).
    """
    with torch.device("meta"):
        policy = Policy(spec, activation_checkpointing=config.train.activation_checkpointing)
    return fill(parallelize(policy, mesh, config), folder, mesh.device)


def parallelize(policy: Policy, mesh: Mesh, config: Config) -> Policy:
    """Return this rank's part of a policy on the meta device, sharded, with fp32 master weights.

    A model.dtype of float64 makes the master weights fp64: no engine serves them, but tests can check the
    arithmetic in fp64.

    Raises:
        ConfigError: the policy cannot be split as asked for.
    """
    dtype = compute_dtype(config)
    if mesh.pp_size > 1:
        policy = _pipeline(policy, mesh, config.parallel)
    policy.to(torch.promote_types(dtype, torch.float32))
    if isinstance(policy, PipelinedPolicy):
        policy.shard(dtype)
    else:
        shard(policy, policy.layers, mesh, dtype)
    return policy


def _pipeline(policy: Policy, mesh: Mesh, parallel: Parallel) -> PipelinedPolicy:
    """Return this rank's stages of a policy, and connect the ranks of the pipeline. Collective.

    Args:
        policy: the whole policy, on the meta device.

    Raises:
        ConfigError: embedding and head are tied, or the layers cannot be split as asked for.
    """
    if policy.spec.tied:
        raise ConfigError(
            f"parallel.pp = {parallel.pp}: the policy shares embedding and head, which then lie on different "
            f"stages; use parallel.dp_shard and parallel.cp, or a model that does not tie them"
        )
    split = split_layers(policy.spec.layers, parallel.schedule, mesh.pp_size, parallel.layers_per_stage)
    with torch.device("meta"):
        pipelined = PipelinedPolicy(
            policy.spec,
            mesh,
            split=split,
            schedule=parallel.schedule,
            placement=parallel.draft_placement,
            timeout_s=parallel.tap_timeout_s,
            activation_checkpointing=policy.activation_checkpointing,
        )
    ranks = range(mesh.pp_size)
    connect(mesh.pp_group, [(a, b) for a in ranks for b in ranks], mesh.pp_rank, mesh.device)
    return pipelined
