"""Training-time test (TTT): which rows of a pack are trained, block by block, where their inputs lie, what a
pass weighs. Integers only."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from torchspec.attention import Plan
from torchspec.config.schema import Draft
from torchspec.records import Batch


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """N anchors that go through their K passes together; the rest of the pack is only trunk to them.

    `ahead` counts this rank's rows, then those `attention.with_halo` appends. All are int64, on the device
    that trains, but `ranges`.

    Attributes:
        rows: [N], ascending: the anchors among this rank's rows.
        ranges: int32 [R, 2] on the CPU, the same anchors as ranges, for the attention op.
        newest: of each pass d, [N]: where in `ahead` the row d further on in the anchor's document is. Some
            row or other beyond the document's end: such anchors are not scored in that pass, nor later.
        scored: of each pass, [n_d]: which of the N anchors have a loss.
        teacher: of each pass, [n_d]: `newest` of those.
    """

    rows: Tensor
    ranges: Tensor
    newest: list[Tensor]
    scored: list[Tensor]
    teacher: list[Tensor]


def make_blocks(batch: Batch, plan: Plan, passes: int, row_block: int) -> list[Block]:
    """The anchors with a loss in some pass, at most `row_block` of them (0: all) in a block.

    There is always one block, be it empty: under FSDP every rank must touch every parameter.
    """
    chain = batch.chain.numpy()
    trained = np.flatnonzero(chain > 0)
    shifts = [plan.shift(d, passes) for d in range(1, passes + 1)]
    size = row_block or max(1, len(trained))
    device = batch.tokens.device

    def to_device(x: np.ndarray) -> Tensor:
        return torch.from_numpy(x).to(device, non_blocking=True)

    blocks = []
    for start in range(0, max(1, len(trained)), size):
        rows = trained[start : start + size]
        newest = [shift[rows] for shift in shifts]
        scored = [np.flatnonzero(chain[rows] >= d) for d in range(1, passes + 1)]
        blocks.append(
            Block(
                rows=to_device(rows),
                ranges=torch.from_numpy(_ranges(rows)),
                newest=[to_device(x) for x in newest],
                scored=[to_device(x) for x in scored],
                teacher=[to_device(x[s]) for x, s in zip(newest, scored)],
            )
        )
    return blocks


@dataclass(frozen=True, kw_only=True)
class TrainingTimeTest:
    """EAGLE-3's objective, a `drafts.base.Objective`: K passes over every anchor with a loss in some pass.

    Attributes:
        passes: K.
        pass_decay: pass d = 1..K weighs pass_decay ** (d - 1).
        loss_rows: rows whose logits exist at a time.
        row_block: most anchors in a unit; 0: all of a pack.
    """

    passes: int
    pass_decay: float
    loss_rows: int
    row_block: int = 0

    @property
    def weights(self) -> list[float]:
        return [self.pass_decay**d for d in range(self.passes)]

    @property
    def reach(self) -> int:
        return self.passes

    def counts(self, batch: Batch) -> Tensor:
        return (batch.chain >= torch.arange(1, self.passes + 1)[:, None]).sum(1)

    def units(self, batch: Batch, plan: Plan) -> list[Block]:
        return make_blocks(batch, plan, self.passes, self.row_block)

    def most_scored(self, rows: int) -> int:
        return min(self.row_block or rows, rows) * self.passes


def training_time_test(settings: Draft, spec: object) -> TrainingTimeTest:
    """Return the objective that [draft] describes; it is the same for every shape."""
    return TrainingTimeTest(
        passes=settings.ttt_steps,
        pass_decay=settings.pass_decay,
        loss_rows=settings.loss_rows,
        row_block=settings.row_block,
    )


def _ranges(rows: np.ndarray) -> np.ndarray:
    """Ascending `rows` as int32 [R, 2] of consecutive ones, end excluded."""
    gaps = np.flatnonzero(np.diff(rows) != 1) + 1
    parts = [part for part in np.split(rows, gaps) if len(part)]
    return np.array([(part[0], part[-1] + 1) for part in parts], np.int32).reshape(-1, 2)
