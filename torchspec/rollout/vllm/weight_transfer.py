"""A vLLM weight-transfer backend for an engine in the trainer's own process: tensors go by reference.

Imports vLLM: only `engine.py` imports this, after it has prepared the environment. The update runs
inside vLLM's layerwise-reload bracket, which is the only way that works where weights were repacked at load
(CPU) and keeps storage in place where CUDA graphs point at it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from torchspec.drafts import registry

BACKEND = "torchspec"


@dataclass
class NoInit(WeightTransferInitInfo):
    """There is nothing to connect to."""


@dataclass
class Weights(WeightTransferUpdateInfo):
    weights: Iterable[tuple[str, torch.Tensor]]
    """The whole model as pairs (Hugging Face name, full tensor), pulled one by one, layer by layer."""


class ByReference(WeightTransferEngine[NoInit, Weights]):
    """Loads named tensors into the policy, or into the draft between `start_draft_weight_update` and finish.

    Raises:
        RuntimeError: a weight of the model did not come. vLLM itself would only warn, and keep the old one.
    """

    init_info_cls = NoInit
    update_info_cls = Weights
    model: Any

    def init_transfer_engine(self, init_info: NoInit) -> None:
        pass

    def start_weight_update(self) -> None:
        self._tied = _tied_modules(self.model)
        self._updated = self.model  # vLLM points `model` back to the policy when an update ends
        self._sent: dict[str, list[Sent]] = {}
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: Weights) -> None:
        self.model.load_weights(self._noting(update_info.weights))
        if missing := self._missing():
            self.finish_weight_update()  # close the bracket: the next update starts afresh
            raise RuntimeError(f"weight update is incomplete, too little came for: {', '.join(missing)}")

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        for module in self._tied:
            # A tied head got nothing itself, so vLLM left its repacked copy (CPU) as it was.
            module.quant_method.process_weights_after_loading(module)

    def shutdown(self) -> None:
        pass

    def _noting(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Take a checksum of each tensor on its way."""
        engine_name = self._engine_name()
        for name, tensor in weights:
            place, part = _place(engine_name(name))
            cast = tensor.detach().to(self.model_config.dtype) if tensor.is_floating_point() else tensor
            self._sent.setdefault(place, []).append(Sent(part, len(tensor), checksum(cast)))
            yield name, tensor

    def _engine_name(self) -> Callable[[str], str]:
        """What turns the sender's name of a tensor into the engine's."""
        if self.model is self._default_model:
            return str
        served: Any = self.model_config.hf_config  # the draft's, while it is the target
        arch = registry.served_as(served.architectures[0])
        assert arch is not None  # else `check_draft` had refused it
        return arch.engine_name

    def compare(self) -> int:
        """Compare the engine's own tensors with checksums of what the last update sent.

        It says of as many as it holds in a readable form; on CPU linear layers are repacked, and embeddings,
        norms and heads remain. Returns how many.

        Raises:
            RuntimeError: one is not what was sent.
        """
        parameters, compared = dict(self._updated.named_parameters()), 0
        for place, parts in self._sent.items():
            held, rows = parameters.get(place), 0
            # Repacked, not a parameter (the map of a reduced vocabulary), or kept in another precision.
            if held is None or not held.numel() or held.dtype != self.model_config.dtype:
                continue
            for sent in sorted(parts):
                here = checksum(held.detach()[rows : rows + sent.rows])
                if here != sent.checksum:
                    raise RuntimeError(
                        f"refit: {place} in the engine is not what the trainer sent (checksum {here:x}, "
                        f"{sent.checksum:x} was sent)"
                    )
                rows += sent.rows
                compared += 1
        return compared

    def _missing(self) -> list[str]:
        shared = () if self.model is self._default_model else set(self._default_model.modules())
        return [
            name
            for name, module in self.model.named_modules()
            # The draft's map of a reduced vocabulary sits on the root and never changes: it need not come.
            if name and module not in shared and module not in self._tied and _is_unfilled(module)
        ]


class Sent(NamedTuple):
    """One tensor that was sent: its rank among those fused into a parameter of the engine, rows, checksum."""

    part: int
    rows: int
    checksum: int


def checksum(tensor: torch.Tensor) -> int:
    """XOR of all elements, as 64-bit floats: where two tensors agree, so does this; computed where they are."""
    return int(torch.hash_tensor(tensor).view(torch.int64)) if tensor.numel() else 0


_FUSED = {
    "q_proj": ("qkv_proj", 0),
    "k_proj": ("qkv_proj", 1),
    "v_proj": ("qkv_proj", 2),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}


def _place(name: str) -> tuple[str, int]:
    """The engine's parameter that a tensor goes to, and its rank among those fused there."""
    *path, module, kind = name.split(".")
    module, part = _FUSED.get(module, (module, 0))
    return ".".join([*path, module, kind]), part


def _tied_modules(model: torch.nn.Module) -> list[Any]:
    """Modules whose weight is another, earlier module's parameter."""
    seen, tied = set(), []
    for module in model.modules():
        if (weight := module._parameters.get("weight")) is not None:
            if id(weight) in seen:
                tied.append(module)
            seen.add(id(weight))
    return tied


def _is_unfilled(module: torch.nn.Module) -> bool:
    """True for a module in the bracket that lacks (a part of) its parameters."""
    info: Any = get_layerwise_info(module)
    if not info.can_load() or not module._parameters:
        return False
    # Vocabulary layers are padded and so never full; linear layers may be fused from several weights.
    return info.load_numel == 0 or (
        isinstance(module, LinearBase) and info.load_numel < info.load_numel_total
    )


WeightTransferEngineFactory.register_engine(BACKEND, ByReference)
# It warns of each module that got no weights, such as rotary tables; `_missing` tells the real ones apart.
logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)
