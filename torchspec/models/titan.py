"""Everything adapted from torchtitan, each adaptation with its reason.

The decoder, its layers and the state-dict adapters are torchtitan's own (0.3.0, pre-1.0: pinned exactly).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn
from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.embedding import Embedding
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.models.common.rope import ComplexRoPE, CosSinRoPE, RoPE
from torchtitan.models.llama3.model import Llama3Model, Llama3TransformerBlock
from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter
from torchtitan.models.qwen3.model import Qwen3Model, Qwen3TransformerBlock
from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter
from torchtitan.protocols.module import Module
from torchtitan.protocols.state_dict_adapter import StateDictAdapter

from torchspec.attention import Context, layer_attention
from torchspec.models.spec import PolicySpec

ParamInit = dict[str, Callable[[Tensor], Any]]
_LINEAR: ParamInit = {"weight": partial(nn.init.normal_, std=0.02)}
_NORM: ParamInit = {"weight": nn.init.ones_}


class PackedAttention(Module):
    """Inner attention over one stream of packed documents, whole or spread over context-parallel ranks.

    Why: titan's inner attentions (flex, varlen) have no backward on CPU; policy and draft
    use one attention primitive. titan hands `attention_masks` through to here untouched, so it
    carries our `Context`.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        pass

    def __init__(self, config: Config) -> None:
        super().__init__()

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        attention_masks: Context,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """q [1, T, H, D], k and v [1, T, G, D]; returns [1, T, H, D]."""
        return layer_attention(q[0], k[0], v[0], attention_masks, scale)[None]


def build_decoder(spec: PolicySpec) -> Decoder:
    """titan's decoder for `spec`, with our attention in its `inner_attention` slot.

    Why not titan's own builders (`_build_qwen3_layers`, ...): they are private, fix the norm's eps, take a
    named attention backend, and default to a fused QKV whose keys do not map one to one to Hugging Face's.
    """
    decoder: Decoder = _config(spec).build()
    # titan gives every layer its own RoPE cache: at 32k positions and 36 layers that is 1.2 GB of copies.
    attentions: list[Any] = [layer.attention for layer in decoder.layers.values()]
    for attention in attentions:
        attention.rope = attentions[0].rope
    return decoder


def fill_rope_cache(decoder: Decoder) -> None:
    """Compute the RoPE cache again, on its device.

    Why: leaving the meta device leaves it unfilled, `bfloat16()` rounds it, and `to(dtype)` drops the
    imaginary part of Llama's complex one; titan's own remedy (`init_states`) draws new weights as well.
    """
    first: Any = next(iter(decoder.layers.values()))
    first.attention.rope._init_self_buffers()


def keep_layers(decoder: Decoder, held: Collection[int]) -> None:
    """Drop all layers but `held`, the embedding unless the first is held, norm and head unless the last is.

    Why not titan's own splitting: it is private, copies the whole model for each stage, and makes the stages
    and the schedule too. The names of what is kept stay those of the whole decoder, as there.
    """
    last = len(decoder.layers) - 1
    for i in range(len(decoder.layers)):
        if i not in held:
            del decoder.layers[str(i)]
    if 0 not in held:
        decoder.tok_embeddings = None
    if last not in held:
        decoder.norm = decoder.lm_head = None


def adapter(spec: PolicySpec) -> StateDictAdapter:
    """titan's conversion between its own and Hugging Face's names and layouts.

    Why never tied: with tied weights titan's adapter insists on seeing the embedding in every dict it is
    given, but we stream layer by layer. A tied decoder has no parameter named lm_head.weight anyway.
    """
    config: Any = dataclasses.replace(_config(spec), enable_weight_tying=False)
    kind = Qwen3StateDictAdapter if spec.arch == "qwen3" else Llama3StateDictAdapter
    return kind(config, None)


def _config(spec: PolicySpec) -> Decoder.Config:
    qwen3 = spec.arch == "qwen3"
    model, block = (Qwen3Model, Qwen3TransformerBlock) if qwen3 else (Llama3Model, Llama3TransformerBlock)
    rope = _rope_config(spec)

    def norm(dim: int) -> RMSNorm.Config:
        return RMSNorm.Config(normalized_shape=dim, eps=spec.norm_eps, param_init=_NORM)

    layer = block.Config(
        attention_norm=norm(spec.dim),
        ffn_norm=norm(spec.dim),
        attention=make_gqa_config(
            dim=spec.dim,
            n_heads=spec.heads,
            n_kv_heads=spec.kv_heads,
            head_dim=spec.head_dim,
            wqkv_param_init=_LINEAR,
            wo_param_init=_LINEAR,
            inner_attention=PackedAttention.Config(),
            rope=rope,
            qk_norm=norm(spec.head_dim) if qwen3 else None,
        ),
        feed_forward=make_ffn_config(
            dim=spec.dim, hidden_dim=spec.ffn_dim, w1_param_init=_LINEAR, w2w3_param_init=_LINEAR
        ),
    )
    return model.Config(
        dim=spec.dim,
        vocab_size=spec.vocab_size,
        tok_embeddings=Embedding.Config(
            num_embeddings=spec.vocab_size,
            embedding_dim=spec.dim,
            # A tied embedding is initialised as the head.
            param_init={"weight": skip_param_init} if spec.tied else _LINEAR,
        ),
        norm=norm(spec.dim),
        lm_head=Linear.Config(in_features=spec.dim, out_features=spec.vocab_size, param_init=_LINEAR),
        layers=[layer] * spec.layers,
        enable_weight_tying=spec.tied,
    )


def _rope_config(spec: PolicySpec) -> RoPE.Config:
    if spec.arch == "qwen3":
        return CosSinRoPE.Config(dim=spec.head_dim, max_seq_len=spec.max_len, theta=spec.rope_theta)
    rope = ComplexRoPE.Config(dim=spec.head_dim, max_seq_len=spec.max_len, theta=spec.rope_theta)
    if spec.rope_scaling is None:
        return rope
    scaling = spec.rope_scaling
    return dataclasses.replace(
        rope,
        scaling="llama",
        scaling_factor=scaling["factor"],
        low_freq_factor=scaling["low_freq_factor"],
        high_freq_factor=scaling["high_freq_factor"],
        original_max_position_embeddings=int(scaling["original_max_position_embeddings"]),
    )
