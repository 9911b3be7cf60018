"""The contract of a draft: all that trainer, learner, dry run, refit, engine set-up and export know of one.

A draft architecture is one folder of this package, or a module of somebody else's. It brings a shape
(`DraftSpec`), a model (`DraftModel`), what the model is trained on (`Objective`) and the names and files of its
checkpoints, tied together in a `DraftArchitecture` that `registry.register` enters by name. `drafts/eagle3` is
the example.

The trainer cuts a pack into units: anchors that are run, differentiated and forgotten together. `open` computes
once what all units start from; `forward` computes the losses of one unit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torchspec.attention import Plan
from torchspec.config.schema import Draft
from torchspec.drafts.vocab import build_t2d, target_ids
from torchspec.models.spec import PolicySpec
from torchspec.records import Batch


class DraftSpec(Protocol):
    """Shape of a draft; implementations are frozen dataclasses, so that specs can be compared."""

    arch: ClassVar[str]
    """Name of the architecture in the registry."""

    @property
    def vocab_size(self) -> int:
        """The policy's vocabulary."""
        ...

    @property
    def draft_vocab_size(self) -> int:
        """Tokens the draft can propose; below `vocab_size` the vocabulary is reduced."""
        ...

    @property
    def dim(self) -> int:
        """Width of the policy's hidden states."""
        ...

    @property
    def max_len(self) -> int:
        """Positions the draft was made for."""
        ...

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Ids of the tapped layers, any number of them, as in `Taps.aux`."""
        ...

    @property
    def trunk_width(self) -> int:
        """Elements per row of a pack that `open` leaves for all units: keys and values of the draft's layers."""
        ...


class Unit(Protocol):
    """Anchors that go through the draft together."""

    @property
    def rows(self) -> Tensor:
        """int64 [N]: the anchors among this rank's rows; no row is in two units of a pack."""
        ...


class Objective(Protocol):
    """What a draft is trained on: which rows, how many predictions of each, and what each weighs in the loss."""

    @property
    def weights(self) -> Sequence[float]:
        """Of a scored row in each prediction, before normalisation; as many as there are predictions."""
        ...

    @property
    def reach(self) -> int:
        """How many rows further on in an anchor's document its inputs and labels lie at most."""
        ...

    @property
    def loss_rows(self) -> int:
        """Rows whose logits exist at a time."""
        ...

    def counts(self, batch: Batch) -> Tensor:
        """Return the number of scored rows of each prediction in these rows of a pack, int64 [K] on the CPU."""
        ...

    def units(self, batch: Batch, plan: Plan) -> Sequence[Unit]:
        """Cut the rows that are trained into units: at least one, which may have no row."""
        ...

    def most_scored(self, rows: int) -> int:
        """Return the most rows that one unit scores in a pack of `rows` rows, for the dry run."""
        ...


class Pack(NamedTuple):
    """What a draft reads of one microbatch. No tensor in it has a graph.

    Attributes:
        batch: the pack, or this rank's T rows of it.
        plan: where the rows of the pack are; `plan.shift(d, objective.reach)` indexes `embeds` and `final`.
        aux: the taps, [T, E] each.
        embeds: [T + halo, E], the policy's embeddings.
        final: [T + halo, E], the policy's last hidden states.
        head: [Vd, E], the rows `teacher_rows` of the policy's head.
        objective: what is trained.
        denominator: of the loss, for the whole global batch.
    """

    batch: Batch
    plan: Plan
    aux: tuple[Tensor, ...]
    embeds: Tensor
    final: Tensor
    head: Tensor
    objective: Objective
    denominator: float

    @property
    def weights(self) -> list[float]:
        """Weight in the loss of a scored row of each prediction."""
        return [a / self.denominator for a in self.objective.weights]


class Opened(NamedTuple):
    """What the units of a pack start from.

    `open` returns it with graph and for all rows. `forward` gets a unit's part of it, cut off from that graph.

    Attributes:
        rows: [T, ...] each, for `forward` the unit's rows [N, ...] of them.
        sinks: tensors that every unit reads as a whole; the gradients of all units add up.
        state: whatever else `forward` needs. No gradient reaches it.
    """

    rows: tuple[Tensor, ...] = ()
    sinks: tuple[Tensor, ...] = ()
    state: Any = None


class DraftLosses(NamedTuple):
    """The weighted loss of some anchors, and sums over their scored rows.

    Attributes:
        loss: [], with graph.
        counts: fp64 [K], scored rows of each prediction.
        sums: fp64 [K] for each metric, by its name; logged as the mean draft/NAME_k.
    """

    loss: Tensor
    counts: Tensor
    sums: dict[str, Tensor]


FSDP_METHODS = ("open", "zero")
"""Methods of a `DraftModel` besides forward that need its weights, for `distributed.fsdp.shard`."""


class DraftModel(nn.Module, ABC):
    """A draft. Parameters and buffers carry the names of its checkpoints.

    It is built with random weights from torch's global generator, also on the meta device. A reduced vocabulary
    comes as buffers `d2t` and `t2d`.

    Args:
        spec: the shape.
        d2t: int64 [spec.draft_vocab_size], policy id minus draft id; given exactly if the vocabulary is
            reduced.

    Raises:
        ValueError: d2t does not fit the spec.
    """

    def __init__(self, spec: DraftSpec, d2t: Tensor | None = None) -> None:
        super().__init__()
        given = None if d2t is None else list(d2t.shape)
        wanted = None if spec.draft_vocab_size == spec.vocab_size else [spec.draft_vocab_size]
        if given != wanted:
            raise ValueError(
                f"d2t has shape {given}; with a draft vocabulary of {spec.draft_vocab_size} of "
                f"{spec.vocab_size} tokens it must be {wanted}"
            )
        self.spec: Any = spec
        if d2t is not None:
            self.register_buffer("d2t", d2t.clone())
            self.register_buffer("t2d", build_t2d(d2t, spec.vocab_size))

    @abstractmethod
    def open(self, pack: Pack) -> Opened:
        """Compute what all units start from. A collective of the batch's group."""

    @abstractmethod
    def forward(self, unit: Any, opened: Opened, pack: Pack) -> DraftLosses:
        """Return the losses of one unit, given its part of what `open` returned.

        Every parameter that `open` does not use gets a gradient from this loss, of zeros if no row is scored:
        under FSDP all ranks make the same collectives, whatever their data.
        """

    @abstractmethod
    def zero(self) -> Tensor:
        """Return a zero with a graph to a parameter: its backward adds nothing, but makes FSDP reduce."""

    @property
    def teacher_rows(self) -> Tensor | None:
        """Which rows of the policy's head are this draft's vocabulary, int64 [Vd]; None: all."""
        return target_ids(self.d2t) if "d2t" in self._buffers else None

    def hf_weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield names and full tensors of a checkpoint, d2t and t2d included. A collective under FSDP.

        Args:
            dtype: of the weights; None: as stored. The maps stay as they are.
        """
        for name, x in self.state_dict().items():
            x = x.to(dtype) if dtype and x.is_floating_point() else x
            yield name, x.full_tensor() if isinstance(x, DTensor) else x


class Verifier(NamedTuple):
    """The policy that a draft's checkpoint says it belongs to."""

    path: str
    architecture: str
    draft_tokens: int
    embeddings: Tensor
    """[V, E]: the policy's, for layouts that must have them."""


@dataclass(frozen=True, kw_only=True)
class DraftArchitecture:
    """What an architecture brings. Names of tensors are those of `DraftModel.hf_weights`."""

    name: str
    """The value of draft.arch, and of `DraftSpec.arch`."""
    method: str
    """vLLM's name of the speculative method that serves it."""
    served_as: tuple[str, ...]
    """Values of `architectures` in config.json with which vLLM serves a checkpoint as this."""
    layouts: tuple[str, ...]
    """Forms in which its checkpoints are published; the first is that of exports."""
    layouts_with_embeddings: tuple[str, ...] = ()
    """Those of them whose readers need the policy's embeddings in the file."""
    make_spec: Callable[[Draft, PolicySpec], Any]
    """The shape of a random draft for a policy; a ConfigError if there can be none."""
    check_spec: Callable[[Any, PolicySpec], None]
    """Raise a ConfigError if a checkpoint's shape cannot tap this policy."""
    model: Callable[..., DraftModel]
    """Called with a spec and d2t."""
    objective: Callable[[Draft, Any], Objective]
    """What [draft] says about training a draft of this shape."""
    config_json: Callable[[Any, str, Verifier | None], dict[str, Any]]
    """config.json of a spec in a layout."""
    spec_from_json: Callable[[dict[str, Any], int, object], Any]
    """The inverse, whatever the layout; a ConfigError if the shape is not supported. It gets config.json, the
    number of the policy's layers and the file's name."""
    layout_of: Callable[[dict[str, Any]], str]
    """Which layout a config.json has."""
    renamed: Callable[[str, str], str]
    """The name that a tensor has in a layout."""
    required_names: Callable[[Any], set[str]]
    """Names of the tensors that loaders need of a spec; they know no others."""
    engine_name: Callable[[str], str]
    """The name under which the engine's model has a tensor, before projections are fused."""
