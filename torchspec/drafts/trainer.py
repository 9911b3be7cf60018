"""Draft training: forward and backward of one microbatch, with denominators of the whole global batch."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from torchspec.attention import local_plan, with_halo
from torchspec.drafts.base import DraftModel, Objective, Opened, Pack, Unit
from torchspec.records import Batch, Taps


@dataclass(kw_only=True, slots=True)
class DraftStats:
    """Sums over the rows trained; add those of microbatches, all-reduce all of them over ranks (SUM).

    `loss` fp64 [] is this part's share of the normalised loss; `counts` and `sums` are as in `DraftLosses`.
    """

    loss: Tensor
    counts: Tensor
    sums: dict[str, Tensor]

    def __add__(self, other: DraftStats) -> DraftStats:
        return DraftStats(
            loss=self.loss + other.loss,
            counts=self.counts + other.counts,
            sums={name: total + other.sums[name] for name, total in self.sums.items()},
        )


class DraftTrainer:
    """Trains a draft, sharded by `distributed.fsdp.shard` or not.

    With a_k the weight of prediction k and M(k, i) marking the rows scored, the loss is
        sum_k a_k sum_i M(k, i) CE(k, i) / sum_k a_k sum_i M(k, i),
    both sums over the global batch. Gradients add up over microbatches, and must be summed (not averaged)
    over ranks.

    Anchors go in units: an anchor reads what `draft.open` made, and nothing of other anchors. So one unit is
    run, differentiated and forgotten before the next starts: exact, nothing is computed twice, and memory
    beyond what is opened depends on a unit's size, not on the pack.

    Args:
        draft: the model.
        objective: what it is trained on.
    """

    def __init__(self, draft: DraftModel, objective: Objective) -> None:
        self.draft = draft
        self.objective = objective

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """The policy's taps that `backward` needs."""
        return self.draft.spec.aux_layers

    def counts(self, batch: Batch) -> Tensor:
        """Return the scored rows of each prediction, int64 [K] on the CPU: sum them over all microbatches and
        ranks before training."""
        return self.objective.counts(batch)

    def denominator(self, counts: Tensor) -> float:
        """Return sum_k a_k counts_k, at least 1, for the global batch's `counts` [K]."""
        return max(sum(a * n for a, n in zip(self.objective.weights, counts.tolist(), strict=True)), 1.0)

    def backward(self, batch: Batch, taps: Taps, teacher_head: Tensor, denominator: float) -> DraftStats:
        """Add one microbatch's gradients to the draft's parameters.

        A collective of the batch's group, and under FSDP of all ranks the draft is sharded over.

        Args:
            batch: the pack, or this rank's rows of one; possibly without any row to score, or any at all.
            taps: the policy's activations for them.
            teacher_head: [Vd, E], the rows `draft.teacher_rows` of the policy's head.
            denominator: `self.denominator` of the global counts.
        """
        reach = self.objective.reach
        plan = local_plan(batch.cu_seqlens, batch.group)
        units = self.objective.units(batch, plan)
        embeds, final = (with_halo(x.detach(), plan, batch.group, reach) for x in (taps.embeds, taps.final))
        aux = tuple(x.detach() for x in taps.aux)
        pack = Pack(batch, plan, aux, embeds, final, teacher_head.detach(), self.objective, denominator)
        with _weights_kept(self.draft):
            opened = self.draft.open(pack)
            grads = [torch.zeros_like(x) for x in opened.rows]
            sinks = tuple(x.detach().requires_grad_() for x in opened.sinks)  # gather the units' gradients
            parts = [self._run(unit, opened, sinks, grads, pack) for unit in units]
            if roots := [*opened.rows, *opened.sinks]:
                torch.autograd.backward(roots, [*grads, *(x.grad for x in sinks)])
        return sum(parts[1:], start=parts[0])

    def _run(
        self, unit: Unit, opened: Opened, sinks: tuple[Tensor, ...], grads: list[Tensor], pack: Pack
    ) -> DraftStats:
        """Forward and backward of one unit; its rows of `grads` are filled in."""
        rows = tuple(x.detach()[unit.rows].requires_grad_() for x in opened.rows)
        losses = self.draft(unit, Opened(rows, sinks, opened.state), pack)
        losses.loss.backward()
        for grad, part in zip(grads, rows):
            assert part.grad is not None
            grad[unit.rows] = part.grad
        return DraftStats(loss=losses.loss.detach().double(), counts=losses.counts, sums=losses.sums)


@contextmanager
def _weights_kept(draft: DraftModel) -> Generator[None]:
    """Under FSDP: gather weights once and reduce gradients once, for all forwards and backwards within.

    In between ranks need not be at the same unit. Gradients add up in fp32, as FSDP2 keeps them while it
    does not reduce. The backward that reduces comes after all of them, on its own: FSDP2 cannot reduce
    gradients of which only some were kept.
    """
    if not isinstance(draft, FSDPModule):
        yield
        return

    def keep(kept: bool) -> None:
        draft.set_reshard_after_forward(not kept)
        draft.set_reshard_after_backward(not kept)
        draft.set_requires_gradient_sync(not kept)

    keep(True)
    yield
    zero = draft.zero()  # while the weights are still here
    keep(False)
    zero.backward()
