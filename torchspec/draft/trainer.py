"""Draft training: forward and backward of one microbatch, with denominators of the whole global batch."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from torchspec.draft.eagle3 import Eagle3, pass_mask
from torchspec.records import Batch, Taps


def pass_counts(batch: Batch, passes: int) -> Tensor:
    """Valid rows of each pass of a pack, int64 [K]: sum them over microbatches and ranks before training."""
    return pass_mask(batch, passes).sum(1)


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
        """Valid rows per pass, [K]."""
        return self.sums[0]

    @property
    def ce(self) -> Tensor:
        """Mean cross-entropy per pass in nats, [K]; 0 where no row is valid, as the two below."""
        return self._mean(1)

    @property
    def overlap(self) -> Tensor:
        """Mean sum_v min(p_v, t_v) per pass, [K]: the chance that its token is accepted at temperature 1."""
        return self._mean(2)

    @property
    def top1(self) -> Tensor:
        """Share of rows per pass where draft and policy agree on the likeliest token, [K]."""
        return self._mean(3)

    @property
    def tau(self) -> float:
        """Simulated acceptance length of chains of K tokens: 1 + sum_d prod_{p<=d} overlap_p."""
        return 1.0 + self.overlap.cumprod(0).sum().item()

    def _mean(self, row: int) -> Tensor:
        return self.sums[row] / self.sums[0].clamp(min=1)


class DraftTrainer:
    """Trains an `Eagle3`, which may be wrapped by FSDP.

    Pass d = 1..K weighs a_d = pass_decay ** (d - 1); with M(d, i) marking the valid rows the loss is
        sum_d a_d sum_i M(d, i) CE(d, i) / sum_d a_d sum_i M(d, i),
    both sums over the global batch. Gradients add up over microbatches, and must be summed (not averaged)
    over ranks.

    Args:
        draft: the model.
        passes: K, the passes of training-time test.
        pass_decay: ratio of the weights of consecutive passes.
        loss_rows: rows whose logits exist at a time.
    """

    def __init__(self, draft: Eagle3, *, passes: int, pass_decay: float, loss_rows: int) -> None:
        self.draft = draft
        self.loss_rows = loss_rows
        self.pass_weights = [pass_decay**d for d in range(passes)]

    def denominator(self, counts: Tensor) -> float:
        """sum_d a_d counts_d, at least 1, for the global batch's `pass_counts` [K]."""
        return max(sum(a * n for a, n in zip(self.pass_weights, counts.tolist(), strict=True)), 1.0)

    def backward(self, batch: Batch, taps: Taps, head_weight: Tensor, denominator: float) -> DraftStats:
        """Add one microbatch's gradients to the draft's parameters.

        Args:
            batch: the pack, possibly without any valid row (it still takes part in FSDP's collectives).
            taps: the policy's activations for it.
            head_weight: [V, E], the policy's full head.
            denominator: `self.denominator` of the global counts.
        """
        weights = [a / denominator for a in self.pass_weights]
        losses = self.draft(taps, batch, head_weight, pass_weights=weights, loss_rows=self.loss_rows)
        losses.loss.backward()
        return DraftStats(loss=losses.loss.detach().double(), sums=losses.sums)
