"""Partial-attention kernels, one module per device type, all with the same four functions.

    part_fwd(q, k, v, tasks, scale)                       yields (rows, out, lse, opens)
    part_bwd(dout, q, k, v, out, lse, tasks, scale)       yields (rows, keys, dq, dk, dv)
    branch_fwd(q, out, lse, branch_k, branch_v, scale)        -> (out, lse)
    branch_bwd(dout, q, branch_k, branch_v, out, lse, dq, scale) -> (dq, dbranch_k, dbranch_v)

Shapes: q, dout, out, dq [T, H, D]; k, v, dk, dv [S, G, D]; branch entries [T, G, D]; lse [H, T], natural log,
in the accumulator dtype: fp32, fp64 for fp64 inputs. Inputs are contiguous, and so is a whole `lse`.

`tasks` are `plan.Task`s: no kernel ever sees an empty one. A part is what some of them give for the query
rows `rows` (a slice or an index tensor; in `part_bwd` also the `keys`). `opens` says that it is the first
part of its rows, namely the one of a causal task; others are to be merged into it.

`branch_fwd` merges row i's own entries into its trunk part, which is None where no row sees any trunk; it
may overwrite `out`. `branch_bwd` adds the branches' share to the trunk's `dq` (or None). They return q's
dtype; `out` and `dq` may come in the accumulator dtype.

The backward functions are fed `out` and `lse` of the whole softmax, over more keys than theirs: with
P = exp(s - lse) and D = rowsum(dout * out) the parts' gradients are independent and add up.
"""

from __future__ import annotations

from types import ModuleType

import torch


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which parts are merged and gradients summed: fp32, or fp64 for fp64."""
    return torch.promote_types(dtype, torch.float32)


def kernels_for(device: torch.device) -> ModuleType:
    """The kernel module for tensors on `device`.

    Raises:
        ValueError: there are no kernels for this device type.
    """
    if device.type == "cpu":
        from torchspec.attention.kernels import cpu

        return cpu
    if device.type == "cuda":
        from torchspec.attention.kernels import flash

        return flash
    raise ValueError(f"q is on device {device}; attention kernels exist for cpu and cuda")
