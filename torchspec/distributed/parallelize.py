"""Load a policy's weights into the layout that [parallel] asks for."""

from __future__ import annotations

from pathlib import Path

import torch

from torchspec.config.schema import Parallel
from torchspec.distributed.fsdp import shard
from torchspec.distributed.mesh import Mesh
from torchspec.distributed.pipeline.policy import PipelinedPolicy
from torchspec.distributed.pipeline.split import split_layers
from torchspec.distributed.pipeline.tap_channel import connect
from torchspec.errors import ConfigError
from torchspec.models.hf import fill
from torchspec.models.policy import Policy
from torchspec.models.spec import PolicySpec


def load_policy(
    folder: Path,
    spec: PolicySpec,
    mesh: Mesh,
    compute_dtype: torch.dtype,
    *,
    activation_checkpointing: bool = False,
) -> Policy:
    """A sharded policy with fp32 master weights from `folder`; never exists in full on one rank.

    A `compute_dtype` of fp64 makes them fp64: no engine serves that, but the arithmetic can be checked in it.

    Raises:
        ConfigError: the weights do not fit `spec` (see `load_hf`).
    """
    with torch.device("meta"):
        policy = Policy(spec, activation_checkpointing=activation_checkpointing)
    policy.to(torch.promote_types(compute_dtype, torch.float32))
    shard(policy, policy.layers, mesh, compute_dtype)
    return fill(policy, folder, mesh.device)


def load_pipelined(
    folder: Path,
    spec: PolicySpec,
    mesh: Mesh,
    parallel: Parallel,
    compute_dtype: torch.dtype,
    *,
    placement: str,
    timeout_s: float,
    activation_checkpointing: bool = False,
) -> PipelinedPolicy:
    """As `hf.load_policy`: this rank's part of the policy, sharded, with the weights of `folder`.

    Raises:
        ConfigError: a policy that cannot be split as asked for, or weights that do not fit `spec`.
    """
    if spec.tied:
        raise ConfigError(
            f"parallel.pp = {parallel.pp}: {folder} shares embedding and head, which then lie on different "
            f"stages; use parallel.dp_shard and parallel.cp, or a model that does not tie them"
        )
    split = split_layers(spec.layers, parallel.schedule, mesh.pp_size, parallel.layers_per_stage)
    with torch.device("meta"):
        policy = PipelinedPolicy(
            spec,
            mesh,
            split=split,
            schedule=parallel.schedule,
            placement=placement,
            timeout_s=timeout_s,
            activation_checkpointing=activation_checkpointing,
        )
    ranks = range(mesh.pp_size)
    connect(mesh.pp_group, [(a, b) for a in ranks for b in ranks], mesh.pp_rank, mesh.device)
    policy.to(torch.promote_types(compute_dtype, torch.float32))
    policy.shard(compute_dtype)
    fill(policy, folder, mesh.device)
    return policy
