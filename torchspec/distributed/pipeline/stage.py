"""A pipeline stage: some layers of a decoder as the module that a schedule runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import P2POp
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torchtitan.models.common.decoder import Decoder

StageOutput = Tensor | tuple[Tensor, Tensor]
"""Hidden states [1, T, E], or of the last stage log-probabilities and entropy [T]."""


class Stage(nn.Module):
    """One stage, and the root that FSDP2 shards. Its modules are the decoder's own.

    Args:
        ids: the layers it has; the first stage has the embedding too, the last one norm and head.
        run: computes the stage's output from itself and what the stage below gave (None: nothing is below).
    """

    def __init__(
        self,
        decoder: Decoder,
        index: int,
        ids: range,
        is_last: bool,
        run: Callable[[Stage, Tensor | None], StageOutput],
    ) -> None:
        super().__init__()
        self.index, self.ids, self.is_last, self.run = index, ids, is_last, run
        self.layers = nn.ModuleList(decoder.layers[str(i)] for i in ids)
        self.ends = nn.ModuleList([decoder.tok_embeddings] if index == 0 else [])
        if is_last:
            self.ends.extend([decoder.norm, decoder.lm_head])
        self.microbatch = -1
        """Number of the one to compute next, set before each call."""

    def forward(self, h: Tensor | None = None) -> StageOutput:
        return self.run(self, h)

    def free_weights(self) -> None:
        """Free the gathered weights that a forward left."""
        for module in self.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


class ScheduledStage(PipelineStage):
    """A stage in a schedule: says which microbatch it is, and makes room for other work before and after.

    These two methods run once for every microbatch that is trained on, whatever the schedule, and neither in
    the recomputation of activations nor in `PipelinedPolicy.score`.

    A microbatch's buffers for hidden states and their gradients exist from when they are received to the end
    of its backward. torch makes those of all microbatches at the start of a schedule, and keeps them to its
    end: with hundreds of long packs they would be more than the activations.
    """

    before_forward: Callable[[], None]
    after_backward: Callable[[int, int], None]
    """Takes the stage and the microbatch."""

    def _setup_forward_recv_info(self, num_microbatches: int, has_backward: bool) -> None:
        infos = {}
        for m in range(num_microbatches):
            super()._setup_forward_recv_info(1, has_backward)
            infos[m] = _without_buffers(self.args_recv_info[0])
        self.args_recv_info = infos

    def _create_grad_recv_info(self, act_send_info: dict) -> tuple:
        return _without_buffers(super()._create_grad_recv_info(act_send_info))

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[P2POp]:
        self._make_buffers(self.args_recv_info[fwd_chunk_id])
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[P2POp]:
        self._make_buffers(self.grad_recv_info[bwd_chunk_id])
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def _make_buffers(self, infos: tuple) -> None:
        for info in infos:
            if not info.is_root_arg:
                info.buffer = torch.empty(
                    info.tensor_meta.shape, dtype=info.tensor_meta.dtype, device=self.device
                )

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self.before_forward()
        assert isinstance(self.submod, Stage)
        self.submod.microbatch = fwd_chunk_id
        return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Tensor | None = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        if loss is not None and full_backward:
            # The schedule keeps it, and its graph would keep the hidden states it began with. In a split backward
            # torch detaches it itself.
            loss.detach_()
        _without_buffers(self.args_recv_info[bwd_chunk_id])
        _without_buffers(self.grad_recv_info[bwd_chunk_id])
        self.after_backward(self.stage_index, bwd_chunk_id)


def _without_buffers(infos: tuple) -> tuple:
    for info in infos:
        info.buffer = None
    return infos
