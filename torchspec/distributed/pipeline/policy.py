"""The policy over a pipeline of ranks, run by the schedules of torch.distributed.pipelining.

Every rank holds some layers of a `Policy`, under the names they have in the whole one. All ranks of a
pipeline hold the same packs, so a stage only needs a microbatch's number and the hidden states from below.
Packs differ in length, a schedule's messages do not: hidden states are padded to the longest pack's rows when
they leave a stage, and cut when they enter the next. No pack is padded, so nothing is computed twice or for
nothing, and results are those of a run without a pipeline.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class
from torch.distributed.tensor import DTensor

from torchspec.distributed.fsdp import shard
from torchspec.distributed.mesh import Mesh
from torchspec.distributed.pipeline.schedule import (
    happens_before,
    read_order,
    ring_depth,
    run_order,
    stage_ranks,
)
from torchspec.distributed.pipeline.split import tap_names
from torchspec.distributed.pipeline.stage import ScheduledStage, Stage, StageOutput
from torchspec.distributed.pipeline.tap_channel import MicrobatchInfo, TapChannel, connect, poison_groups
from torchspec.models import titan
from torchspec.models.policy import LossOfPack, Policy, PolicyOutput, full_weight
from torchspec.models.spec import PolicySpec
from torchspec.records import Batch, SamplingLaw, Taps


@dataclass(kw_only=True)
class _Update:
    """What the stages need to know while one update's microbatches pass through them."""

    packs: Sequence[Batch]
    law: SamplingLaw
    logprob_rows: int
    rows: int = 0
    """Rows of a message between stages; 0: as many as the pack has."""
    aux_layers: tuple[int, ...] = ()
    channel: TapChannel | None = None
    draft_ranks: list[int] = field(default_factory=list)
    draft_step: Callable[[Batch, Taps], None] | None = None
    waiting: deque[tuple[int, Taps]] = field(default_factory=deque)
    """Microbatches whose taps are here, but the draft has not been trained on them."""


class PipelinedPolicy(Policy):
    """This rank's part of a policy. Training and scoring are collectives of all ranks of the pipeline.

    Args:
        split: the layers of each stage.
        schedule: 1F1B, GPipe, Interleaved1F1B or ZBVZeroBubble.
        placement: where the draft is trained: on the rank of the last stage, or microbatch m on rank m mod P
            ("spread"). Either way `finish_draft` adds up its gradients over the pipeline.
        timeout_s: longest wait for a tap.
    """

    can_interrupt = False

    def __init__(
        self,
        spec: PolicySpec,
        mesh: Mesh,
        *,
        split: list[range],
        schedule: str,
        placement: str,
        timeout_s: float,
        activation_checkpointing: bool = False,
    ) -> None:
        self.split = split
        self.where = stage_ranks(schedule, mesh.pp_size, len(split))
        mine = [stage for stage, rank in enumerate(self.where) if rank == mesh.pp_rank]
        held = {i for stage in mine for i in split[stage]}
        super().__init__(spec, activation_checkpointing=activation_checkpointing, held=held)
        self.mesh = mesh
        self.microbatch_multiple = mesh.pp_size
        self.sum_over_stages = mesh.sum_over_pp_
        self.schedule, self.placement, self.timeout_s = schedule, placement, timeout_s
        self.stages = {
            index: Stage(self.decoder, index, split[index], index == len(split) - 1, self.run_stage)
            for index in mine
        }  # a dict: names stay the decoder's
        self.compute_dtype = torch.float32
        self._channels: dict[tuple[int, ...], TapChannel] = {}
        self._update: _Update | None = None

    def shard(self, compute_dtype: torch.dtype) -> None:
        """Shard every stage over dp_shard and cp."""
        self.compute_dtype = compute_dtype
        for stage in self.stages.values():
            shard(stage, stage.layers, self.mesh, compute_dtype, keep_gathered=True)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PipelinedPolicy:
        for stage in self.stages.values():  # FSDP2's roots, which hold all there is
            stage._apply(fn, recurse)
        titan.fill_rope_cache(self.decoder)
        return self

    # What the learner calls

    def score(self, packs: Sequence[Batch], *, law: SamplingLaw, logprob_rows: int) -> list[Tensor]:
        """As `Policy.score`; the list is empty on all ranks but the last stage's."""
        self._update = _Update(packs=packs, law=law, logprob_rows=logprob_rows)
        group, scores, local, sends = self.mesh.pp_group, [], {}, []
        with self._stopping_all(), torch.no_grad():
            for index, stage in self.stages.items():
                # All receives before the first send: NCCL does a pair's messages in the order they are posted.
                arriving = self._post_arrivals(index, packs)
                for m in range(len(packs)):
                    stage.microbatch = m
                    h, works = arriving[m] if arriving else (local.pop(m, None), [])
                    for work in works:
                        work.wait()
                    out = stage(h)
                    if stage.is_last:
                        scores.append(out[0])
                    elif self.where[index + 1] == self.mesh.pp_rank:
                        local[m] = out
                    elif out.numel():
                        to = self.where[index + 1]
                        sends.append((dist.isend(out, group=group, group_dst=to), out))
                stage.free_weights()
            for work, _ in sends:
                work.wait()
        self._update = None
        return scores

    def _post_arrivals(self, index: int, packs: Sequence[Batch]) -> list[tuple[Tensor, list[dist.Work]]]:
        """Hidden states that come to a stage from another rank, under way; [] where none do."""
        if index == 0 or self.where[index - 1] == self.mesh.pp_rank:
            return []
        arriving = []
        for batch in packs:
            shape = 1, len(batch.tokens), self.spec.dim
            h = torch.empty(shape, dtype=self.compute_dtype, device=self.mesh.device)
            source = self.where[index - 1]
            work = dist.irecv(h, group=self.mesh.pp_group, group_src=source) if h.numel() else None
            arriving.append((h, [work] if work else []))
        return arriving

    def forward_backward(
        self,
        packs: Sequence[Batch],
        loss: LossOfPack,
        *,
        law: SamplingLaw,
        logprob_rows: int,
        aux_layers: tuple[int, ...] = (),
        draft_step: Callable[[Batch, Taps], None] | None = None,
    ) -> None:
        """As `Policy.forward_backward`, by the schedule.

        `loss` is called on the rank of the last stage, `draft_step` on the rank that `placement` says: before
        a forward of this rank while more than P microbatches wait, and on what is left after its last
        backward (all of them under GPipe).

        Raises:
            RuntimeError: there are gradients already; a schedule's first step would drop them.
        """
        if any(parameter.grad is not None for parameter in self.parameters()):
            raise RuntimeError("a pipeline cannot add to gradients; step or clear them first")
        update = self._update = _Update(
            packs=packs,
            law=law,
            logprob_rows=logprob_rows,
            rows=max(1, *(len(batch.tokens) for batch in packs)),
            aux_layers=aux_layers if draft_step else (),
            draft_step=draft_step,
        )
        schedule = self._make_schedule(update, loss)
        with self._stopping_all():
            if draft_step:
                self._open_channel(update, schedule)
            # Stages look their microbatches up: the schedule only needs something to count by.
            schedule.step(target=torch.arange(len(packs)), return_outputs=False)
            if update.channel:
                self._train_draft(most_waiting=0)
                update.channel.finish()
                self.seconds_waited = update.channel.seconds_waited
        self._update = None

    def finish_draft(self, draft: nn.Module) -> None:
        """Sum the gradients of the draft, which every rank has a copy of; a missing gradient counts as zeros."""
        for parameter in draft.parameters():
            if parameter.requires_grad:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                grad = parameter.grad
                self.mesh.sum_over_pp_(grad.to_local() if isinstance(grad, DTensor) else grad)

    def _make_schedule(self, update: _Update, loss: LossOfPack) -> Any:
        def loss_of(output: tuple[Tensor, Tensor], microbatch: Tensor) -> Tensor:
            m = int(microbatch)
            return loss(m, PolicyOutput(*output, None), update.packs[m])

        hidden = torch.empty(
            1, update.rows, self.spec.dim, dtype=self.compute_dtype, device="meta", requires_grad=True
        )
        stages = []
        for index, module in self.stages.items():
            # Shapes are given, so that no stage is run on made-up inputs to find them out.
            stage = ScheduledStage(
                module,
                index,
                len(self.split),
                self.mesh.device,
                input_args=hidden if index else (),
                output_args=(hidden, hidden) if module.is_last else hidden,
                group=self.mesh.pp_group,
            )
            stage.before_forward, stage.after_backward = self.before_forward, self.after_backward
            stages.append(stage)
        kind = get_schedule_class(self.schedule)
        given: Any = stages if issubclass(kind, PipelineScheduleMulti) else stages[0]
        return kind(given, len(update.packs), loss_fn=loss_of, scale_grads=False)

    # What a stage does

    def run_stage(self, stage: Stage, h: Tensor | None) -> StageOutput:
        """One stage's part of `Policy.forward` for its current microbatch."""
        update = self._update
        assert update is not None
        batch = update.packs[stage.microbatch]
        rows = len(batch.tokens)
        h = self.embed(batch) if h is None else h[:, :rows]
        taps: dict[int | str, Tensor] = {"embeds": h[0]}
        h, entering = self.run_layers(stage.ids, h, batch, update.aux_layers)
        taps |= entering
        output: StageOutput
        if stage.is_last:
            final, logprobs, entropy = self.predict(h, batch, update.law, update.logprob_rows)
            taps["final"], output = final, (logprobs, entropy)
        else:
            short = update.rows - rows
            output = F.pad(h, (0, 0, 0, short)) if short > 0 else h
        if update.channel and stage.index in update.channel.sources:
            names = tap_names(self.split, update.aux_layers)[stage.index]
            update.channel.send(stage.index, stage.microbatch, [taps[name] for name in names])
        return output

    def before_forward(self) -> None:
        """Train the draft on what has waited too long."""
        self._train_draft(most_waiting=self.mesh.pp_size)

    def after_backward(self, stage: int, microbatch: int) -> None:
        """Take the microbatch's taps, if this is the place: see `schedule.take_positions`."""
        update = self._update
        assert update is not None
        if update.channel is None or stage != max(self.stages):
            return
        if update.draft_ranks[microbatch] != self.mesh.pp_rank:
            return
        names = tap_names(self.split, update.aux_layers)
        taken = {
            name: tap
            for source, taps in update.channel.take(microbatch).items()
            for name, tap in zip(names[source], taps, strict=True)
        }
        aux = tuple(taken[layer] for layer in update.aux_layers)
        update.waiting.append((microbatch, Taps(embeds=taken["embeds"], aux=aux, final=taken["final"])))

    def _train_draft(self, most_waiting: int) -> None:
        update = self._update
        assert update is not None
        while len(update.waiting) > most_waiting:
            m, taps = update.waiting.popleft()
            assert update.draft_step is not None
            with torch.enable_grad():
                update.draft_step(update.packs[m], taps)

    def draft_ranks(self, microbatches: int) -> list[int]:
        """The pipeline rank that trains the draft on each microbatch."""
        last = self.placement == "last"
        return [self.where[-1] if last else m % self.mesh.pp_size for m in range(microbatches)]

    def channel(self, aux_layers: tuple[int, ...]) -> TapChannel:
        """The channel for these taps; made on first use, by all ranks together."""
        if aux_layers not in self._channels:
            names = tap_names(self.split, aux_layers)
            groups = self.mesh.pp_groups(len(names), self.timeout_s)
            self._channels[aux_layers] = TapChannel(
                rank=self.mesh.pp_rank,
                stage_ranks=self.where,
                sources={stage: len(made) for stage, made in names.items()},
                groups=dict(zip(names, groups, strict=True)),
                width=self.spec.dim,
                dtype=self.compute_dtype,
                device=self.mesh.device,
                timeout_s=self.timeout_s,
            )
            ranks = range(self.mesh.pp_size)
            for stage, group in zip(names, groups, strict=True):
                source = self.where[stage]
                connect(group, [(source, sink) for sink in ranks], self.mesh.pp_rank, self.mesh.device)
        return self._channels[aux_layers]

    def _open_channel(self, update: _Update, schedule: Any) -> None:
        channel = update.channel = self.channel(update.aux_layers)
        ranks, count = self.mesh.pp_size, len(update.packs)
        draft_ranks = update.draft_ranks = self.draft_ranks(count)
        if isinstance(schedule, PipelineScheduleMulti):
            order = read_order(schedule.pipeline_order)
        else:
            order = run_order(self.schedule, ranks, count)
        known = happens_before(order)
        depths = {
            (source, sink): ring_depth(
                order, known, source, sink, [m for m, rank in enumerate(draft_ranks) if rank == sink]
            )
            for source in channel.sources
            for sink in {*draft_ranks} - {self.where[source]}
        }
        channel.begin([MicrobatchInfo.of(batch) for batch in update.packs], draft_ranks, depths)

    @contextmanager
    def _stopping_all(self) -> Generator[None]:
        """An exception in here reaches every rank of the pipeline, also those that wait for this one."""
        try:
            yield
        except Exception as error:
            for channel in self._channels.values():
                channel.poison(f"{type(error).__name__}: {error}")
            poison_groups([self.mesh.pp_group], self.mesh.device)
            raise

    # Weights

    def parameter_shapes(self) -> dict[str, torch.Size]:
        with torch.device("meta"):
            whole = titan.build_decoder(self.spec)
        return {name: p.shape for name, p in whole.named_parameters()}

    @torch.no_grad()
    def head_weight(self, dtype: torch.dtype | None = None, rows: Tensor | None = None) -> Tensor:
        """As `Policy.head_weight`, on the ranks that train the draft; elsewhere empty, [0, E]."""
        is_owner = self.mesh.pp_rank == self.where[-1]
        height = self.spec.vocab_size if rows is None else len(rows)
        if is_owner:
            weight = super().head_weight(dtype, rows)
        else:
            height = height if self.placement == "spread" else 0
            weight = self._empty((height, self.spec.dim), dtype)
        if self.placement == "spread":
            self.mesh.broadcast_over_pp_(weight, self.where[-1])
        return weight

    @torch.no_grad()
    def hf_weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """As `Policy.hf_weights`, all of them on every rank of the pipeline."""
        shapes = self.parameter_shapes()
        owners = {f"layers.{i}.": rank for ids, rank in zip(self.split, self.where, strict=True) for i in ids}
        last = self.where[-1]
        owners = {"tok_embeddings.": self.where[0], **owners, "norm.": last, "lm_head.": last}
        for prefix, owner in owners.items():
            weights = {
                name: self._broadcast(name, shape, owner, dtype)
                for name, shape in shapes.items()
                if name.startswith(prefix)
            }
            yield from self.adapter.to_hf(weights).items()

    def _broadcast(self, name: str, shape: Sequence[int], owner: int, dtype: torch.dtype | None) -> Tensor:
        if owner == self.mesh.pp_rank:
            weight = full_weight(self.decoder.get_parameter(name), dtype).contiguous()
        else:
            weight = self._empty(shape, dtype)
        return self.mesh.broadcast_over_pp_(weight, owner)

    def _empty(self, shape: Sequence[int], dtype: torch.dtype | None) -> Tensor:
        stored = next(self.parameters()).dtype
        return torch.empty(tuple(shape), dtype=dtype or stored, device=self.mesh.device)
