"""The messages of context-parallel attention: all collectives it needs, on a process group given by name.

Shards differ by a row or so; they travel padded to the longest. A group of one rank, or no group (the empty
name), sends nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d


class ProcessGroupComm:
    """One rank's place in a process group.

    Raises:
        ValueError: there is no group of this name.
    """

    def __init__(self, group: str) -> None:
        self.size, self.rank = 1, 0
        if group:
            try:
                self._group = c10d._resolve_process_group(c10d.GroupName(group))
            except (LookupError, RuntimeError, ValueError) as error:
                raise ValueError(f"group is {group!r}; there is no process group of that name") from error
            self.size, self.rank = self._group.size(), self._group.rank()

    def ring(self, x: Tensor) -> Iterator[Tensor]:
        """This rank's x, then those of ranks rank - 1, rank - 2, ...: C of them, C - 1 hops.

        The next hop is posted before the current x is handed out, so it flies while that is worked on.
        """
        for step in range(self.size):
            hop = self.pass_on(x) if step < self.size - 1 else None
            yield x
            if hop is not None:
                x = hop.wait()

    def pass_on(self, x: Tensor) -> P2PTransfer:
        """Send x to the next rank and receive the like from the one before."""
        return P2PTransfer(x, self._group, self.rank, self.size)

    def gather(self, x: Tensor) -> Tensor:
        """[C, *x.shape]: everyone's x, by rank."""
        if self.size == 1:
            return x.unsqueeze(0)
        out = x.new_empty(self.size, *x.shape)
        dist.all_gather_single(out.flatten(0, 1), x.contiguous(), group=self._group)
        return out

    def scatter_sum(self, x: Tensor) -> Tensor:
        """x [C, ...]: the sum over ranks of their part for this rank."""
        if self.size == 1:
            return x[0]
        out = torch.empty_like(x[0])
        dist.reduce_scatter_single(out, x.flatten(0, 1), group=self._group)
        return out

    def exchange(self, x: Tensor) -> Tensor:
        """x [C, ...]: part i goes to rank i; returns what rank i sent here as part i."""
        if self.size == 1:
            return x
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x, group=self._group)
        return out

    def swap(self, x: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """x [sum(sent), ...], rows by destination rank; returns [sum(received), ...], rows by source rank."""
        if self.size == 1:
            return x
        out = x.new_empty(sum(received), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), received, sent, group=self._group)
        return out


class P2PTransfer:
    """A transfer to the next rank, in flight. It keeps the buffer that is being sent alive."""

    def __init__(self, x: Tensor, group: dist.ProcessGroup, rank: int, size: int) -> None:
        self._sent, self._received = x, torch.empty_like(x)
        ahead, behind = (dist.get_global_rank(group, (rank + d) % size) for d in (1, -1))
        self._works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, self._sent, ahead, group),
                dist.P2POp(dist.irecv, self._received, behind, group),
            ]
        )

    def wait(self) -> Tensor:
        """What the rank before sent."""
        for work in self._works:
            work.wait()
        return self._received


def padded(x: Tensor, rows: int) -> Tensor:
    """x [T, ...] with zero rows appended up to `rows`."""
    if x.shape[0] == rows:
        return x
    return torch.cat([x, x.new_zeros(rows - x.shape[0], *x.shape[1:])])


def padded_pair(k: Tensor, v: Tensor, rows: int) -> Tensor:
    """[2, rows, ...]: k and v as one message."""
    return torch.stack([padded(k, rows), padded(v, rows)])
