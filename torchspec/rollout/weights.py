"""A vLLM weight-transfer backend for an engine in the trainer's own process: tensors go by reference.

Imports vLLM: only `rollout/vllm.py` imports this, after it has prepared the environment. The update runs
inside vLLM's layerwise-reload bracket, which is the only way that works where weights were repacked at load
(CPU) and keeps storage in place where CUDA graphs point at it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

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
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: Weights) -> None:
        self.model.load_weights(iter(update_info.weights))
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

    def _missing(self) -> list[str]:
        shared = () if self.model is self._default_model else set(self._default_model.modules())
        return [
            name
            for name, module in self.model.named_modules()
            # The draft's map of a reduced vocabulary sits on the root and never changes: it need not come.
            if name and module not in shared and module not in self._tied and _is_unfilled(module)
        ]


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
