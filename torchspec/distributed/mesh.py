"""The ranks of a run: device, process groups, device mesh."""

from __future__ import annotations

import os
from collections.abc import Iterable
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from torchspec.config.schema import Config, Parallel
from torchspec.distributed.device import choose_device_type
from torchspec.errors import ConfigError

# Rollouts of different length let ranks reach a collective far apart; a dead rank is still noticed.
TIMEOUT = timedelta(minutes=30)

T = TypeVar("T")


class Mesh:
    """This process's place among all ranks.

    Reads torchrun's environment; without it, this is a world of one process. The device mesh has the
    dimensions pp, dp_shard and cp, cp fastest: neighbours exchange keys and values. The pp * cp ranks that
    share a dp_shard index are one *replica*: they work on the same packs.

    Args:
        parallel: the config's section.
        device: "cuda" or "cpu"; None: CUDA where there is a GPU.

    Raises:
        ConfigError: the number of ranks is not what `parallel` asks for, or a GPU is here that torch cannot use.
    """

    def __init__(self, parallel: Parallel, device: str | None = None) -> None:
        self.world_size = int(os.environ.get("WORLD_SIZE", "1"))
        self.rank = int(os.environ.get("RANK", "0"))
        self.pp_size, self.cp_size = parallel.pp, parallel.cp
        self.dp_size = dp_size(parallel, self.world_size)
        kind = device or choose_device_type()
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
        sizes = (self.pp_size, self.dp_size, self.cp_size)
        self._mesh = init_device_mesh(kind, sizes, mesh_dim_names=("pp", "dp_shard", "cp"))
        self._fsdp = self._mesh["dp_shard", "cp"]._flatten("fsdp")
        self._replica = self._mesh["pp", "cp"]._flatten("replica")
        self.pp_rank = self._mesh.get_local_rank("pp")
        self.dp_rank = self._mesh.get_local_rank("dp_shard")

    @property
    def fsdp_mesh(self) -> DeviceMesh:
        """The one-dimensional mesh that FSDP2 shards over: dp_shard and cp of one pipeline stage."""
        return self._fsdp

    @property
    def cp_group(self) -> str:
        """Name of this rank's context-parallel process group; "" where it has one rank."""
        return self._mesh.get_group("cp").group_name if self.cp_size > 1 else ""

    @property
    def pp_group(self) -> dist.ProcessGroup:
        """The ranks of this rank's pipeline."""
        return self._mesh.get_group("pp")

    def pp_groups(self, count: int, timeout_s: float) -> list[dist.ProcessGroup]:
        """`count` more groups of the same ranks, with traffic of their own. Collective over all ranks."""
        pipelines = self._mesh.mesh.flatten(1).T.tolist()
        timeout = timedelta(seconds=timeout_s)
        made = [dist.new_subgroups_by_enumeration(pipelines, timeout=timeout)[0] for _ in range(count)]
        return [group for group in made if isinstance(group, dist.ProcessGroup)]

    def sum_over_pp_(self, value: Tensor) -> Tensor:
        """Sum over the ranks of this pipeline, in place."""
        dist.all_reduce(value, group=self.pp_group)
        return value

    def broadcast_over_pp_(self, value: Tensor, source: int) -> Tensor:
        """Overwrite `value` with that of pipeline rank `source`."""
        dist.broadcast(value, group=self.pp_group, group_src=source)
        return value

    @property
    def is_main(self) -> bool:
        """True on the one rank that writes files and prints."""
        return self.rank == 0

    def sum_over_fsdp(self, value: Tensor) -> Tensor:
        """Sum of `value` over the ranks that split a global batch, dp_shard and cp; `value` is unchanged."""
        return self._reduce(value, dist.ReduceOp.SUM, self._fsdp.get_group())

    def sum_over_world(self, value: Tensor) -> Tensor:
        """Sum of `value` over all ranks, on this mesh's device; `value` is unchanged."""
        return self._reduce(value, dist.ReduceOp.SUM)

    def max_over_world(self, value: Tensor) -> Tensor:
        """Elementwise maximum of `value` over all ranks; `value` is unchanged."""
        return self._reduce(value, dist.ReduceOp.MAX)

    def _reduce(
        self, value: Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None = None
    ) -> Tensor:
        total = value.detach().to(self.device, copy=True)
        dist.all_reduce(total, op, group=group)
        return total

    def gather_replica(self, items: list[T]) -> list[T]:
        """The items of all ranks of this replica, by rank: equal on each of them."""
        return self._gather(items, self._replica.size(), self._replica.get_group())

    def gather_world(self, items: list[T]) -> list[T]:
        """The items of all ranks, by rank: equal on each of them."""
        return self._gather(items, self.world_size)

    def _gather(self, items: list[T], size: int, group: dist.ProcessGroup | None = None) -> list[T]:
        if size == 1:
            return items
        parts: list[list[T]] = [[]] * size
        dist.all_gather_object(parts, items, group=group)
        return [item for part in parts for item in part]

    def from_main(self, value: T, group: dist.ProcessGroup | None = None) -> T:
        """The main rank's `value`, a plain object, on every rank; `group` None: the default one."""
        box = [value]
        dist.broadcast_object_list(box, src=0, group=group)
        return box[0]

    def new_cpu_group(self) -> dist.ProcessGroup:
        """A process group of all ranks for host memory; its collectives may run beside all others."""
        group = dist.new_group(backend="gloo", timeout=TIMEOUT)
        assert isinstance(group, dist.ProcessGroup)  # every rank is a member
        return group

    def gather_on_main(self, value: T, group: dist.ProcessGroup) -> list[T]:
        """Every rank's `value`, by rank, on the main rank; an empty list on the others."""
        parts: list[T] | None = [value] * self.world_size if self.is_main else None
        dist.gather_object(value, parts, dst=0, group=group)
        return parts or []

    def union(self, names: Iterable[str]) -> list[str]:
        """The names of all ranks, sorted."""
        parts: list[list[str]] = [sorted(names)]
        if self.world_size > 1:
            parts *= self.world_size
            dist.all_gather_object(parts, sorted(names))
        return sorted({name for part in parts for name in part})

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.world_size > 1:
            dist.barrier()

    def close(self) -> None:
        """Leave the process group."""
        dist.destroy_process_group()


def dp_size(parallel: Parallel, world: int) -> int:
    """Replicas among `world` ranks; a ConfigError where [parallel] needs another number of ranks."""
    replica = parallel.pp * parallel.cp
    wanted = replica * max(parallel.dp_shard, 1)
    if world % replica or parallel.dp_shard not in (-1, world // replica):
        raise ConfigError(
            f"parallel.pp = {parallel.pp}, parallel.cp = {parallel.cp} and parallel.dp_shard = "
            f"{parallel.dp_shard} need {'a multiple of ' if parallel.dp_shard == -1 else ''}{wanted} ranks, "
            f"but there are {world}; start torchrun with --nproc-per-node {wanted}, or change [parallel]"
        )
    return world // replica


def check_world(config: Config, mesh: Mesh, problems: int, held_out: int) -> None:
    """Refuse numbers that cannot be divided over the ranks.

    Args:
        problems, held_out: number of problems to train on, and of held-out ones.

    Raises:
        ConfigError: a number does not fit; the text names the key, its value and what is allowed.
    """
    ranks, replicas = mesh.world_size, mesh.dp_size
    if mesh.device.type == "cuda" and config.model.dtype == "float32":
        raise ConfigError("model.dtype = float32 runs on CPU only (flash attention); set it to bfloat16")
    count, updates = config.rollout.problems_per_step, config.rl.minibatches
    if count % ranks:
        raise ConfigError(f"rollout.problems_per_step = {count} must be a multiple of the {ranks} ranks")
    if count // replicas < updates:
        raise ConfigError(
            f"rl.minibatches = {updates} exceeds the {count // replicas} problems of a replica's step"
        )
    if config.eval.every and held_out < ranks:
        raise ConfigError(f"data.eval_size = {held_out} must be at least the {ranks} ranks")
    most = max(count, config.warmup.problems_per_step if config.warmup.steps else 0)
    if problems < most:
        raise ConfigError(f"{problems} problems to train on cannot fill a step of {most}")
