"""The one authority on ranks: device, process group, device mesh. No other module asks torch.distributed."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from torchspec.config import ConfigError, Parallel

# Rollouts of different length let ranks reach a collective far apart; a dead rank is still noticed.
TIMEOUT = timedelta(minutes=30)


class Mesh:
    """This process's place among all ranks.

    Reads torchrun's environment; without it, this is a world of one process. The device mesh has the
    dimensions pp, dp_shard and cp; only dp_shard has more than one rank today.

    Args:
        parallel: the config's section.
        device: "cuda" or "cpu"; None: CUDA where there is a GPU.

    Raises:
        ConfigError: the number of ranks is not what `parallel` asks for.
    """

    def __init__(self, parallel: Parallel, device: str | None = None) -> None:
        self.world_size = int(os.environ.get("WORLD_SIZE", "1"))
        self.rank = int(os.environ.get("RANK", "0"))
        self.dp_size = self.world_size if parallel.dp_shard == -1 else parallel.dp_shard
        if self.dp_size != self.world_size:
            raise ConfigError(
                f"parallel.dp_shard = {parallel.dp_shard} needs {parallel.dp_shard} ranks, but there are "
                f"{self.world_size}; start torchrun with --nproc-per-node {parallel.dp_shard}, or set it to -1"
            )
        kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self.device = torch.device(kind)
        if kind == "cuda":
            local, gpus = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
            if local >= gpus:
                raise ConfigError(
                    f"rank {self.rank} has no GPU: this machine has {gpus}; lower --nproc-per-node"
                )
            self.device = torch.device("cuda", local)
            torch.cuda.set_device(self.device)
        store = None if "RANK" in os.environ else dist.HashStore()
        dist.init_process_group(
            "nccl" if kind == "cuda" else "gloo",
            store=store,
            rank=self.rank,
            world_size=self.world_size,
            timeout=TIMEOUT,
        )
        self._mesh = init_device_mesh(kind, (1, self.dp_size, 1), mesh_dim_names=("pp", "dp_shard", "cp"))
        self.dp_rank = self.dp_mesh.get_local_rank()

    @property
    def dp_mesh(self) -> DeviceMesh:
        """The one-dimensional mesh that FSDP2 shards over."""
        return self._mesh["dp_shard"]

    @property
    def is_main(self) -> bool:
        """True on the one rank that writes files and prints."""
        return self.rank == 0

    def sum_over_dp(self, value: Tensor) -> Tensor:
        """Sum of `value` over the data-parallel ranks, on this mesh's device; `value` is unchanged."""
        return self._reduce(value, dist.ReduceOp.SUM)

    def max_over_dp(self, value: Tensor) -> Tensor:
        """Elementwise maximum of `value` over the data-parallel ranks; `value` is unchanged."""
        return self._reduce(value, dist.ReduceOp.MAX)

    def _reduce(self, value: Tensor, op: dist.ReduceOp.RedOpType) -> Tensor:
        total = value.detach().to(self.device, copy=True)
        if self.dp_size > 1:
            dist.all_reduce(total, op, group=self.dp_mesh.get_group())
        return total

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.world_size > 1:
            dist.barrier()

    def close(self) -> None:
        """Leave the process group."""
        dist.destroy_process_group()
