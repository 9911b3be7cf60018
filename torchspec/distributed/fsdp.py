"""FSDP2 for the policy and the draft, with mixed precision."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.fsdp import (
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

from torchspec.config.schema import Config
from torchspec.distributed.mesh import Mesh


def compute_dtype(config: Config) -> torch.dtype:
    """Return the dtype of forward and backward passes, model.dtype."""
    return getattr(torch, config.model.dtype)


def shard(
    module: nn.Module,
    layers: Iterable[nn.Module],
    mesh: Mesh,
    compute_dtype: torch.dtype,
    methods: Iterable[str] = (),
    keep_gathered: bool = False,
) -> None:
    """Shard `module` in place over the ranks of dp_shard and cp, also where there is only one.

    Each of `layers` is gathered for its own forward and backward; what `module` holds besides is one more
    unit. Parameters become DTensors in their own dtype (the master weights), are gathered in
    `compute_dtype`, and their gradients are *summed* over ranks in at least fp32: every loss is already
    divided by its global number of valid tokens, so a mean would be wrong.

    Only calling `module` itself, or one of its `methods`, gathers its weights; inputs are not cast. Outside
    of forward and backward every parameter is its shard, so optimizers, refit and export always see the
    master weights. With `keep_gathered` weights stay gathered after a forward, for a pipeline's many
    microbatches, until somebody calls `reshard`.
    """
    # Of a root module FSDP2 by default keeps the weights gathered after a forward (reshard_after_forward
    # None); after a forward without backward they would be stale copies that readers take for the weights.
    precision = MixedPrecisionPolicy(
        param_dtype=compute_dtype,
        reduce_dtype=torch.promote_types(compute_dtype, torch.float32),
        cast_forward_inputs=False,
    )
    for unit in (*layers, module):
        fsdp = fully_shard(
            unit, mesh=mesh.fsdp_mesh, mp_policy=precision, reshard_after_forward=not keep_gathered
        )
        fsdp.set_gradient_divide_factor(1.0)
        # A plain SUM: gloo lacks the PREMUL_SUM that FSDP2 would use for a divide factor.
        fsdp.set_force_sum_reduction_for_comms(True)
    for name in methods:
        register_fsdp_forward_method(module, name)
