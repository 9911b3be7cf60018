"""Refit: push the trainer's weights into the rollout engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from torchspec.rollout.engine import Engine, NamedWeights


class HasWeights(Protocol):
    def hf_weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Pairs (Hugging Face name, full tensor), layer by layer; a collective under FSDP.

        Weights come as `dtype`, cast before they are gathered; None: as stored.
        """
        ...


class FrozenCopy:
    """A copy of a model's weights, e.g. for measuring what co-training the draft is worth."""

    def __init__(self, model: HasWeights) -> None:
        self._weights = [(name, weight.cpu().clone()) for name, weight in model.hf_weights()]

    def hf_weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        # A map of a vocabulary holds integers.
        return ((name, x.to(dtype) if dtype and x.is_floating_point() else x) for name, x in self._weights)


class ServedWeights:
    """The models that are trained, as this rank's engine serves them.

    `policy_version` and `draft_version` are the steps of the last update of each model.
    """

    def __init__(
        self, engine: Engine, policy: HasWeights, draft: HasWeights | None, dtype: torch.dtype
    ) -> None:
        self._engine, self._policy, self.draft, self._dtype = engine, policy, draft, dtype
        self.policy_version = self.draft_version = 0

    def send(self) -> None:
        """Send policy and draft, also a draft that did not change: engines lose it in their sleep. Collective."""
        self._refit(self._policy, self.draft, self.draft_version)

    def send_draft(self, draft: HasWeights | None, version: int | None = None) -> None:
        """Send a draft alone; `version` None: that of the trained draft. Collective.

        None sends no weights, and only empties the engine's prefix cache.
        """
        self._refit(None, draft, self.draft_version if version is None else version)

    def _refit(self, policy: HasWeights | None, draft: HasWeights | None, draft_version: int) -> None:
        refit(
            self._engine,
            policy,
            draft,
            policy_version=self.policy_version,
            draft_version=draft_version,
            dtype=self._dtype,
        )


def refit(
    engine: Engine,
    policy: HasWeights | None,
    draft: HasWeights | None,
    *,
    policy_version: int,
    draft_version: int,
    dtype: torch.dtype | None = None,
) -> None:
    """Stream the policy's, then the draft's weights into this rank's engine, and stamp the versions.

    Collective: every rank calls it with the same models, so that each one's `hf_weights` gathers as often
    everywhere. One layer's full tensors exist at a time. None leaves that model as it is.

    Args:
        dtype: the engine's: in it weights travel, so that of fp32 masters half the bytes are gathered for a
            bf16 engine. None: as stored; the engine casts.
    """
    engine.update(
        policy.hf_weights(dtype) if policy is not None else None,
        _without(draft.hf_weights(dtype), engine.shared_names()) if draft is not None else None,
        policy_version=policy_version,
        draft_version=draft_version,
    )


def _without(weights: NamedWeights, names: frozenset[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """All but `names`: those modules are the policy's in this engine, and follow it by themselves."""
    return ((name, tensor) for name, tensor in weights if name not in names)
