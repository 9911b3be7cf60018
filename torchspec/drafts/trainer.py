"""Draft training: forward and backward of one microbatch, with denominators of the whole global batch."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from torchspec.attention import Trunk, local_plan, with_halo
from torchspec.drafts.eagle3.blocks import make_blocks
from torchspec.drafts.eagle3.model import Anchors, Eagle3
from torchspec.records import Batch, Taps


@dataclass(kw_only=True, slots=True)
class DraftStats:
    """Sums over the rows trained; add those of microbatches, all-reduce `loss` and `sums` over ranks (SUM).

    `loss` fp64 [] is this part's share of the normalised loss, `sums` fp64 [4, K] as in `DraftLosses`.
    """

    loss: Tensor
    sums: Tensor

    def __add__(self, other: DraftStats) -> DraftStats:
        return DraftStats(loss=self.loss + other.loss, sums=self.sums + other.sums)

    @property
    def counts(self) -> Tensor:
        """Scored rows per pass, [K]."""
        return self.sums[0]


class DraftTrainer:
    """Trains an `Eagle3`, sharded by `parallel.fsdp.shard` or not.

    Pass d = 1..K weighs a_d = pass_decay ** (d - 1); with M(d, i) marking the rows scored the loss is
        sum_d a_d sum_i M(d, i) CE(d, i) / sum_d a_d sum_i M(d, i),
    both sums over the global batch. Gradients add up over microbatches, and must be summed (not averaged)
    over ranks.

    Only rows with a loss in some pass go through the passes; the others are trunk. They go in blocks: an
    anchor's passes read the trunk and the anchor's own earlier passes, nothing of other anchors. So the
    passes of one block are run, differentiated and forgotten before the next block starts: exact, nothing
    is computed twice, and memory beyond the trunk depends on `row_block`, not on the pack (design D3).

    Args:
        draft: the model.
        passes: K, the passes of training-time test.
        pass_decay: ratio of the weights of consecutive passes.
        loss_rows: rows whose logits exist at a time.
        row_block: most rows in a block; 0: all of a pack.
    """

    def __init__(
        self, draft: Eagle3, *, passes: int, pass_decay: float, loss_rows: int, row_block: int = 0
    ) -> None:
        self.draft = draft
        self.loss_rows = loss_rows
        self.row_block = row_block
        self.pass_weights = [pass_decay**d for d in range(passes)]

    @property
    def passes(self) -> int:
        """K."""
        return len(self.pass_weights)

    def denominator(self, counts: Tensor) -> float:
        """sum_d a_d counts_d, at least 1, for the global batch's `pass_counts` [K]."""
        return max(sum(a * n for a, n in zip(self.pass_weights, counts.tolist(), strict=True)), 1.0)

    def backward(self, batch: Batch, taps: Taps, teacher_head: Tensor, denominator: float) -> DraftStats:
        """Add one microbatch's gradients to the draft's parameters.

        A collective of the batch's group, and under FSDP of all ranks the draft is sharded over.

        Args:
            batch: the pack, or this rank's rows of one; possibly without any row to score, or any at all.
            taps: the policy's activations for them.
            teacher_head: [Vd, E], the rows `draft.teacher_rows` of the policy's head.
            denominator: `self.denominator` of the global counts.
        """
        draft, reach = self.draft, self.passes
        plan = local_plan(batch.cu_seqlens, batch.group)
        blocks = make_blocks(batch, plan, reach, self.row_block)
        embeds, final = (with_halo(x.detach(), plan, batch.group, reach) for x in (taps.embeds, taps.final))
        after = torch.from_numpy(plan.shift(1, reach)).to(embeds.device)
        head = teacher_head.detach()
        weights = [a / denominator for a in self.pass_weights]

        with _weights_kept(draft):
            hidden, trunk = draft.trunk(
                taps.aux, embeds[after], batch.positions, batch.cu_seqlens, batch.group
            )
            dhidden = torch.zeros_like(hidden)
            accumulator = trunk.grad_accumulator.detach().requires_grad_()  # sums over the blocks
            parts = []
            for block in blocks:
                start = hidden.detach()[block.rows].requires_grad_()
                anchors = Anchors(
                    block, batch.positions[block.rows], embeds, final, head, batch.cu_seqlens, batch.group
                )
                losses = draft(
                    start,
                    Trunk(trunk.kv, accumulator),
                    anchors,
                    pass_weights=weights,
                    loss_rows=self.loss_rows,
                )
                losses.loss.backward()
                assert start.grad is not None
                dhidden[block.rows] = start.grad
                parts.append(DraftStats(loss=losses.loss.detach().double(), sums=losses.sums))
            torch.autograd.backward([hidden, trunk.grad_accumulator], [dhidden, accumulator.grad])
        return sum(parts[1:], start=parts[0])


@contextmanager
def _weights_kept(draft: Eagle3) -> Generator[None]:
    """Under FSDP: gather weights once and reduce gradients once, for all forwards and backwards within.

    In between ranks need not be at the same block. Gradients add up in fp32, as FSDP2 keeps them while it
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
