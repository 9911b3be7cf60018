"""Context parallelism: the ranks of a cp group share every pack, each with its rows."""

from __future__ import annotations

from dataclasses import replace

import torch

from torchspec.attention import Traffic, choose_transport, local_plan
from torchspec.config.schema import Config
from torchspec.distributed.fsdp import compute_dtype
from torchspec.models.spec import PolicySpec
from torchspec.records import Batch


def local_rows(batch: Batch, group: str, transport: str) -> Batch:
    """This rank's rows of a whole pack, in the zigzag layout of `attention.plan`.

    Everything that shifts tokens, or counts along a document, is in the pack already: a rank only picks.

    Args:
        batch: the pack, equal on all ranks of the group.
        group: name of the context-parallel group; "" leaves the pack as it is.
        transport: how the policy's layers exchange keys and values, as in `context_attention`.
    """
    if not group:
        return batch
    index = torch.from_numpy(local_plan(batch.cu_seqlens, group).index)
    rows = {name: getattr(batch, name)[index] for name in (*Batch.DEVICE_ROWS, "chain")}
    return replace(batch, **rows, group=group, transport=transport)


def policy_transport(config: Config, spec: PolicySpec, ranks: int) -> str:
    """Return the transport of the policy's keys and values over `ranks` context-parallel ranks; one rank needs none."""
    if ranks == 1:
        return "ring"
    traffic = Traffic(
        tokens=config.train.pack_tokens,
        queries=config.train.pack_tokens,
        size=ranks,
        heads=spec.heads,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        itemsize=compute_dtype(config).itemsize,
        layers=spec.layers,
    )
    return choose_transport(traffic, config.parallel.attention)
