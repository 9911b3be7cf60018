"""One optimizer update of the policy and its draft, on this rank's share of the data.

The draft learns from the policy's own forward pass, through detached taps, in a backward of its own:
policy gradients are bitwise what they are without a draft.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchspec.config.schema import Config
from torchspec.data import packing
from torchspec.distributed.context_parallel import local_rows
from torchspec.distributed.mesh import Mesh
from torchspec.drafts.base import DraftModel
from torchspec.drafts.trainer import DraftTrainer
from torchspec.errors import NonFinite
from torchspec.metrics.meter import Meter
from torchspec.metrics.stopwatch import Stopwatch
from torchspec.models.policy import LossOfPack, Policy, PolicyOutput
from torchspec.records import Batch, Rollout, SamplingLaw, Taps
from torchspec.training.optim import ModelOptimizer
from torchspec.training.policy_loss import policy_loss, supervised_loss


class DraftLearner(NamedTuple):
    """The draft's side of a learner."""

    trainer: DraftTrainer
    optimizer: ModelOptimizer

    @property
    def model(self) -> DraftModel:
        return self.trainer.draft


class Learner:
    """Owns the forward and backward passes; knows nothing of engines or problems.

    Args:
        policy, policy_optimizer: sharded model and its optimizer.
        draft: None trains the policy alone.
        reference: frozen policy for the KL term; None where rl.kl_coef is 0.
        dtype: compute dtype, of the head that teaches the draft.
        transport: how the policy's keys and values cross context-parallel ranks.
    """

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        policy: Policy,
        policy_optimizer: ModelOptimizer,
        draft: DraftLearner | None = None,
        reference: Policy | None = None,
        *,
        dtype: torch.dtype,
        transport: str = "ring",
    ) -> None:
        self.config = config
        self.mesh = mesh
        self.policy = policy
        self.policy_optimizer = policy_optimizer
        self.draft = draft
        self.reference = reference
        self.dtype, self.transport = dtype, transport
        self._check: Callable[[], None] = lambda: None
        self._watch = Stopwatch(mesh.device)

    @property
    def optimizers(self) -> dict[str, ModelOptimizer]:
        """Those of the models that learn, by the models' names."""
        drafts = {"draft": self.draft.optimizer} if self.draft else {}
        return {"policy": self.policy_optimizer, **drafts}

    def reinforce(
        self,
        rollouts: Sequence[Rollout],
        meter: Meter,
        train_draft: bool,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """rl.minibatches GRPO updates on this rank's rollouts; the draft takes part if `train_draft`.

        `check` is called before every pack's loss (in a pipeline: before every pass over all packs) until the
        first update is made: if it raises, nothing has changed.
        """
        self._check = check
        count = self.config.rl.minibatches
        rollouts = self.mesh.gather_replica(list(rollouts))
        parts = [self._packs(part) for part in packing.minibatches(rollouts, count)]
        # With a single update the policy of the ratio's denominator is the one being trained.
        old = [self._score(self.policy, packs) if count > 1 else None for packs in parts]
        for packs, old_logprobs in zip(parts, old):
            ref_logprobs = self._score(self.reference, packs) if self.reference else None
            loss = self._grpo_loss(packs, old_logprobs, ref_logprobs, meter)
            self._update(packs, loss, self.config.rollout.law, meter, train_draft)
        seconds = self._watch.read()
        for model in ("policy", "draft"):
            meter.maximum(f"perf/train_{model}_s", seconds.get(model, 0.0))

    def supervise(self, examples: Sequence[Rollout], meter: Meter, train_draft: bool) -> None:
        """One maximum-likelihood update on given responses."""
        packs = self._packs(self.mesh.gather_replica(list(examples)))
        tokens = self._global_tokens(packs)

        def loss(index: int, output: PolicyOutput, batch: Batch) -> Tensor:
            value = supervised_loss(output.logprobs, batch, tokens)
            meter.total("policy/loss", value.detach())
            return value

        self._update(packs, loss, SamplingLaw(), meter, train_draft)
        self._watch.read()  # nobody wants these times

    def _grpo_loss(
        self, packs: list[Batch], old: list[Tensor] | None, ref: list[Tensor] | None, meter: Meter
    ) -> LossOfPack:
        tokens = self._global_tokens(packs)

        def loss(index: int, output: PolicyOutput, batch: Batch) -> Tensor:
            result = policy_loss(
                output.logprobs,
                output.entropy,
                batch,
                self.config.rl,
                tokens,
                old[index] if old else None,
                ref[index] if ref else None,
            )
            for name, total in result.sums.items():
                meter.mean(name, total, result.tokens)
            meter.maximum("policy/ratio_max", result.max_ratio)
            return result.loss

        return loss

    def _packs(self, rollouts: Sequence[Rollout]) -> list[Batch]:
        """This rank's rows of its replica's packs, as many on every rank: each forward is a collective.

        Args:
            rollouts: the replica's, in the same order on all of its ranks.
        """
        size = self.config.train.pack_tokens
        lengths = [len(r.prompt_tokens) + len(r.tokens) for r in rollouts]
        needed = packing.num_packs_needed(lengths, size)
        count = int(self.mesh.max_over_world(torch.tensor([needed])).item())
        count += -count % self.policy.microbatch_multiple
        group = self.mesh.cp_group
        return [
            local_rows(batch, group, self.transport).to(self.mesh.device)
            for batch in packing.pack(rollouts, size, count)
        ]

    def _global_tokens(self, packs: list[Batch]) -> float:
        valid = torch.stack([batch.target_mask.sum() for batch in packs]).sum()
        return max(1.0, float(self.mesh.sum_over_fsdp(valid)))

    def _score(self, policy: Policy, packs: list[Batch]) -> list[Tensor]:
        """Log-probabilities of every pack's targets, without gradients; where the loss is computed."""
        self._check()
        return policy.score(packs, **self._forward_kwargs(self.config.rollout.law))

    def _forward_kwargs(self, law: SamplingLaw) -> dict[str, Any]:
        return {"law": law, "logprob_rows": self.config.train.logprob_rows}

    def _update(
        self, packs: list[Batch], loss: LossOfPack, law: SamplingLaw, meter: Meter, train_draft: bool
    ) -> None:
        """Forward and backward of every pack, then one step of each optimizer."""
        draft = self.draft if train_draft else None
        draft_step = self._draft_pass(draft.trainer, packs, meter) if draft else None
        aux_layers = draft.trainer.aux_layers if draft else ()
        started = time.perf_counter()
        self._check()
        worst = torch.zeros((), device=self.mesh.device)

        def checked(index: int, output: PolicyOutput, batch: Batch) -> Tensor:
            if self.policy.can_interrupt:
                self._check()
            value = loss(index, output, batch)
            worst.add_((~value.detach().isfinite()).float())
            return value

        with self._watch.time("policy"):
            self.policy.forward_backward(
                packs,
                checked,
                aux_layers=aux_layers,
                draft_step=draft_step,
                **self._forward_kwargs(law),
            )
        self._check = lambda: None
        if self.mesh.max_over_world(worst).item():
            raise NonFinite("the policy's loss is not finite; no update was made")
        if draft:
            with self._watch.time("draft"):
                self.policy.finish_draft(draft.trainer.draft)
        self._step({n: o for n, o in self.optimizers.items() if n == "policy" or draft}, meter)
        if draft and (waited := self.policy.seconds_waited) is not None:
            meter.maximum("perf/tap_wait", waited / (time.perf_counter() - started))

    def _draft_pass(
        self, draft: DraftTrainer, packs: list[Batch], meter: Meter
    ) -> Callable[[Batch, Taps], None]:
        """What trains the draft on one pack, given the pack's taps and the update's global denominators."""
        counts = torch.stack([draft.counts(batch) for batch in packs]).sum(0)
        denominator = draft.denominator(self.mesh.sum_over_fsdp(counts))
        head = self.policy.head_weight(self.dtype, draft.draft.teacher_rows)
        # A pack's loss is a share of the update's: over packs and ranks the counts add up to one.
        meter.mean("draft/loss", 0.0, 1 / self.mesh.world_size)

        def draft_step(batch: Batch, taps: Taps) -> None:
            with self._watch.time("draft", within="policy"):
                stats = draft.backward(batch, taps, head, denominator)
            meter.mean("draft/loss", stats.loss, 0.0)
            for name, totals in stats.sums.items():
                for d, (total, count) in enumerate(zip(totals, stats.counts)):
                    meter.mean(f"draft/{name}_{d}", total, count)

        return draft_step

    def _step(self, optimizers: dict[str, ModelOptimizer], meter: Meter) -> None:
        """One step of each optimizer, once all gradients are known to be finite."""
        for name, optimizer in optimizers.items():
            meter.maximum(f"{name}/lr", optimizer.lr)
            with self._watch.time(name):
                try:
                    norm = optimizer.clip()
                except FloatingPointError as error:
                    raise NonFinite(str(error)) from error
            meter.maximum(f"{name}/grad_norm", norm)
        for name, optimizer in optimizers.items():
            with self._watch.time(name):
                optimizer.step()
