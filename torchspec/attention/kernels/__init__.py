"""Partial-attention kernels, one module per device type, all with the same two functions.

    part_fwd(q, k, v, bounds, scale) -> (out, lse)
    part_bwd(dout, q, k, v, out, lse, bounds, scale) -> (dq, dk, dv)

Shapes: q, dout, out, dq [T, H, D]; k, v, dk, dv [T, G, D]; lse [H, T], natural log, fp32 (fp64 for fp64
inputs); everything contiguous. `bounds` are the documents' ends in the pack, strictly increasing host
integers from 0 to T: no kernel ever sees an empty document. Attention is causal inside each document.

`part_bwd` is fed `out` and `lse` of the whole softmax, which may run over more keys than k and v: with
P = exp(s - lse) and D = rowsum(dout * out) the parts' gradients are independent and add up.
"""

from __future__ import annotations

from types import ModuleType

import torch


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
