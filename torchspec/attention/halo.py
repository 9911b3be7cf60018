"""Rows that lie further on in their document, wherever they are: shifts of a pack spread over ranks."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from torchspec.attention import core
from torchspec.attention.comm import ProcessGroupComm
from torchspec.attention.plan import Plan, build_plan


def local_plan(cu_seqlens: Tensor, group: str) -> Plan:
    """This rank's zigzag plan of a pack; `group` as in `context_attention`."""
    comm = ProcessGroupComm(group)
    return build_plan(core.pack_ends(cu_seqlens), comm.size, comm.rank)


def with_halo(x: Tensor, plan: Plan, group: str, reach: int) -> Tensor:
    """This rank's rows, then the rows up to `reach` further on in their documents that other ranks own.

    A collective of `group`; one all-to-all, no gradient. `plan.shift(distance, reach)` indexes the result.

    Args:
        x: [T, ...], detached; every rank's with the same trailing shape and dtype.

    Returns:
        [T + len(plan.halo(reach)), ...]; x itself where one rank has the whole pack.
    """
    if plan.size == 1:
        return x
    owner, row = plan.places
    sent = []
    for rank in range(plan.size):
        wanted = build_plan(plan.cu_seqlens, plan.size, rank, plan.window).halo(reach)
        sent.append(row[wanted[owner[wanted] == plan.rank]])
    source = owner[plan.halo(reach)]
    received = np.bincount(source, minlength=plan.size).tolist()
    rows = torch.from_numpy(np.concatenate(sent)).to(x.device)
    arrived = ProcessGroupComm(group).swap(x[rows], [len(part) for part in sent], received)
    # They come by source rank; the halo is in pack order.
    order = torch.from_numpy(np.argsort(np.argsort(source, kind="stable"), kind="stable")).to(x.device)
    return torch.cat([x, arrived[order]])
