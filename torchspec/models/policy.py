"""The policy: torchtitan's decoder, run layer by layer so that taps are plain lines of code."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from torchspec.attention import Context, save_ops
from torchspec.models import titan
from torchspec.models.logprobs import target_logprobs
from torchspec.models.spec import PolicySpec
from torchspec.records import Batch, SamplingLaw, Taps


class PolicyOutput(NamedTuple):
    """What the policy says about one pack.

    `logprobs` and `entropy` (fp32 [T]; fp64 for an fp64 policy) concern the distribution of each row's next
    token under the sampling law asked for, and are 0 where `target_mask` is False; only `logprobs` carries
    gradients. `taps` is None where none were asked for.
    """

    logprobs: Tensor
    entropy: Tensor
    taps: Taps | None


LossOfPack = Callable[[int, PolicyOutput, Batch], Tensor]
"""The loss of one of an update's packs, given its number."""


class Policy(nn.Module):
    """A policy that the engine serves and the trainer trains.

    Weights are uninitialised until `init_weights` or `hf.load_hf`. Under FSDP2 this module is the root and
    `layers` are the units: everything that needs weights happens inside `forward`.

    Args:
        spec: the shape.
        activation_checkpointing: recompute each layer in the backward pass, all but its attention.
        held: the layers this rank has of a pipelined policy; the embedding comes with the first one, the last
            norm and the head with the last. None: all, and only then can the policy be called.
    """

    microbatch_multiple = 1
    """`forward_backward` and `score` take a multiple of this many packs."""
    can_interrupt = True
    """Whether the loss of a pack may raise: False where other ranks are then in the middle of a schedule."""
    seconds_waited: float | None = None
    """For taps from other ranks, in the last update; None without a pipeline."""
    sum_over_stages: Callable[[Tensor], Tensor] | None = None
    """Adds up, in place, a tensor over the ranks that hold other layers; None: this rank holds all layers."""

    def __init__(
        self,
        spec: PolicySpec,
        *,
        activation_checkpointing: bool = False,
        held: Collection[int] | None = None,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.activation_checkpointing = activation_checkpointing
        self.decoder = titan.build_decoder(spec)
        if held is not None:
            titan.keep_layers(self.decoder, held)
        self.adapter = titan.adapter(spec)

    @property
    def layers(self) -> list[nn.Module]:
        """The transformer layers, in order."""
        return list(self.decoder.layers.values())

    def init_weights(self, seed: int) -> None:
        """Draw random weights; not for a sharded policy, whose ranks would each draw their own."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.decoder.init_states()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Policy:
        super()._apply(fn, recurse)
        titan.fill_rope_cache(self.decoder)
        return self

    def forward(
        self, batch: Batch, *, law: SamplingLaw, logprob_rows: int, aux_layers: tuple[int, ...] = ()
    ) -> PolicyOutput:
        """Log-probabilities of `batch.targets`, and taps.

        Args:
            batch: one pack, or this rank's T rows of one, on the policy's device.
            law: the law that the engine samples with.
            logprob_rows: rows whose logits exist at a time, in forward and backward.
            aux_layers: taps of the hidden states *entering* these layers; the number of layers stands for
                the last layer's output. Taps are detached, in the compute dtype.

        A pack without any valid target, or without any row on this rank, still sends (zero) gradients through
        every parameter, so that all ranks take part in the same collectives.
        """
        h = embeds = self.embed(batch)
        h, entering = self.run_layers(range(self.spec.layers), h, batch, aux_layers)
        final, logprobs, entropy = self.predict(h, batch, law, logprob_rows)
        taps = None
        if aux_layers:
            aux = tuple(entering[i] for i in aux_layers)
            taps = Taps(embeds=embeds[0].detach(), aux=aux, final=final.detach())
        return PolicyOutput(logprobs, entropy, taps)

    def embed(self, batch: Batch) -> Tensor:
        """The hidden state that enters layer 0, [1, T, E]."""
        return self.decoder.tok_embeddings(batch.tokens[None])

    def run_layers(
        self, ids: range, h: Tensor, batch: Batch, aux_layers: Collection[int]
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Layers `ids` on h [1, T, E]; also those of the taps `aux_layers` that arise there, [T, E] each."""
        entering: dict[int, Tensor] = {}
        for i in ids:
            if i in aux_layers:
                entering[i] = h[0].detach()
            h = self.run_layer(self.decoder.layers[str(i)], h, batch)
        if ids.stop == self.spec.layers and ids.stop in aux_layers:
            entering[ids.stop] = h[0].detach()
        return h, entering

    def predict(
        self, h: Tensor, batch: Batch, law: SamplingLaw, logprob_rows: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The last layer's output [1, T, E] -> the normed hidden state [T, E], log-probabilities, entropy."""
        final = self.decoder.norm(h)[0]
        head = self.decoder.lm_head.weight
        return final, *target_logprobs(final, head, batch, law, logprob_rows)

    def score(self, packs: Sequence[Batch], *, law: SamplingLaw, logprob_rows: int) -> list[Tensor]:
        """Log-probabilities of every pack's targets, without gradients."""
        with torch.no_grad():
            return [self(batch, law=law, logprob_rows=logprob_rows).logprobs for batch in packs]

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
        """Add the gradients of every pack's loss to the parameters.

        Args:
            draft_step: what trains the draft on a pack's taps `aux_layers`.
        """
        for index, batch in enumerate(packs):
            output = self(batch, law=law, logprob_rows=logprob_rows, aux_layers=aux_layers)
            loss(index, output, batch).backward()
            if draft_step and output.taps:
                draft_step(batch, output.taps)
            del output  # its taps, before the next pack's forward

    def finish_draft(self, draft: nn.Module) -> None:
        """Complete the draft's gradients after `forward_backward`; a pipeline adds up those of its ranks."""

    def run_layer(self, layer: nn.Module, h: Tensor, batch: Batch) -> Tensor:
        """One layer on h [1, T, E], with its activations recomputed in the backward if that is asked for."""
        inputs = (h, Context(batch.cu_seqlens, batch.group, batch.transport), batch.positions[None])
        if self.activation_checkpointing and torch.is_grad_enabled():
            keep_attention = partial(create_selective_checkpoint_contexts, save_ops())
            return checkpoint(
                layer, *inputs, use_reentrant=False, preserve_rng_state=False, context_fn=keep_attention
            )
        return layer(*inputs)

    @torch.no_grad()
    def head_weight(self, dtype: torch.dtype | None = None, rows: Tensor | None = None) -> Tensor:
        """The head's full weight [V, E], or some rows of it, detached, as `dtype` (None: as stored).

        Collective if sharded.
        """
        weight = full_weight(self.decoder.lm_head.weight, dtype)
        return weight if rows is None else weight[rows]

    @torch.no_grad()
    def hf_weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Full weights by Hugging Face name, as `dtype` (None: as stored); a tied head is not among them.

        One layer at a time exists in full. Collective if sharded: every rank must take every pair.
        """
        for prefix, module in self._parts():
            weights = {f"{prefix}.{name}": full_weight(p, dtype) for name, p in module.named_parameters()}
            yield from self.adapter.to_hf(weights).items()

    def parameter_shapes(self) -> dict[str, torch.Size]:
        """Shapes of all of the decoder's parameters by name, held by this rank or not."""
        return {name: p.shape for name, p in self.decoder.named_parameters()}

    def _parts(self) -> Iterator[tuple[str, nn.Module]]:
        yield "tok_embeddings", self.decoder.tok_embeddings
        for i, layer in enumerate(self.layers):
            yield f"layers.{i}", layer
        yield "norm", self.decoder.norm
        if not self.spec.tied:
            yield "lm_head", self.decoder.lm_head


def full_weight(weight: Tensor, dtype: torch.dtype | None) -> Tensor:
    """A parameter in full, detached, as `dtype` (None: as stored). Collective if sharded."""
    weight = weight.detach()
    if dtype is not None:
        weight = weight.to(dtype)
    return weight.full_tensor() if isinstance(weight, DTensor) else weight
