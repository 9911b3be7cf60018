"""EAGLE-3(.1) as vLLM serves it, and its training by K passes of training-time test (TTT).

One decoder layer predicts tokens from the policy's tapped hidden states. Row i of a document is an anchor:
pass d of TTT plays the draft's d-th step after the policy accepted x_{i+1}. It takes the embedding of x_{i+d}
and the draft's own hidden state of pass d - 1, and predicts x_{i+d+1}. The keys it sees are those a serving
engine would have cached: the trunk (pass 1, rows <= i) and its own anchor's passes 2..d, one diagonal each:

    S=4, K=3         pass 1 (trunk)   pass 2   pass 3
    pass 3, row 2:   A A A .          . . x .  . . x .      (rows counted from 0)

Sources: arXiv 2503.01840 (EAGLE-3, training-time test), arXiv 2609.07108 (branch attention).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torchspec.attention import AttentionCall, Trunk, trunk_attention, trunk_gather
from torchspec.drafts.eagle3.blocks import Block
from torchspec.drafts.loss import soft_cross_entropy
from torchspec.drafts.vocab import build_t2d, target_ids
from torchspec.errors import ConfigError


def output_layer_ids(entering: Iterable[int]) -> list[int]:
    """Ids of taps in the other convention.

    Here, in vLLM and in speculators' files a tap has the id of the layer it *enters*; SGLang, SpecForge and
    ModelOpt (`eagle_config` in config.json) name the layer whose *output* it is, one less; -1: the embeddings.

    Example: output_layer_ids([2, 14, 25]) == [1, 13, 24]
    """
    return [i - 1 for i in entering]


def entering_layer_ids(outputs: Iterable[int]) -> list[int]:
    """The inverse of `output_layer_ids`."""
    return [i + 1 for i in outputs]


_IDS = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True, kw_only=True)
class DraftSpec:
    """Shape of an EAGLE-3 draft. `dim` is the policy's width; `vocab_size` the policy's vocabulary.

    `fc_norm` and `norm_output` make it EAGLE-3.1; both False is EAGLE-3. `aux_layers` as in `Taps.aux`.
    """

    vocab_size: int
    draft_vocab_size: int
    dim: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn_dim: int
    norm_eps: float
    rope_theta: float
    max_len: int
    aux_layers: tuple[int, int, int]
    fc_norm: bool
    norm_output: bool

    def hf_config(self) -> dict[str, Any]:
        """config.json of a checkpoint that vLLM loads as its `eagle3` drafter."""
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "vocab_size": self.vocab_size,
            "draft_vocab_size": self.draft_vocab_size,
            "hidden_size": self.dim,
            "num_hidden_layers": 1,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.ffn_dim,
            "hidden_act": "silu",
            "rms_norm_eps": self.norm_eps,
            "rope_theta": self.rope_theta,
            "max_position_embeddings": self.max_len,
            "tie_word_embeddings": False,
            _IDS: list(self.aux_layers),  # vLLM looks here first, SGLang only below
            "eagle_config": {"use_aux_hidden_state": True, _IDS: output_layer_ids(self.aux_layers)},
            "fc_norm": self.fc_norm,
            "norm_output": self.norm_output,
        }

    @classmethod
    def from_hf_config(cls, config: dict[str, Any]) -> DraftSpec:
        """The inverse of `hf_config`, for any EAGLE-3 config.json whose model this class can express.

        Raises:
            ConfigError: a key is missing, or asks for a variant that is not implemented.
        """
        nested = dict(config.get("eagle_config") or {})
        if _IDS in nested:
            nested[_IDS] = entering_layer_ids(nested[_IDS])
        config = {**nested, **config}
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        rope_type = rope.get("rope_type") or rope.get("type") or "default"
        try:
            only = {**_ONLY_SUPPORTED, "target_hidden_size": config["hidden_size"]}
            for key, found in {**config, "rope_type": rope_type}.items():
                if key in only and found != only[key]:
                    raise ConfigError(
                        f"draft config.json: {key} = {found!r}; only {only[key]!r} is supported"
                    )
            return cls(
                vocab_size=config["vocab_size"],
                draft_vocab_size=config.get("draft_vocab_size") or config["vocab_size"],
                dim=config["hidden_size"],
                heads=config["num_attention_heads"],
                kv_heads=config["num_key_value_heads"],
                head_dim=config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
                ffn_dim=config["intermediate_size"],
                norm_eps=config["rms_norm_eps"],
                rope_theta=float(rope["rope_theta"] if "rope_theta" in rope else config["rope_theta"]),
                max_len=config["max_position_embeddings"],
                aux_layers=tuple(config[_IDS]),
                fc_norm=config.get("fc_norm", False),
                norm_output=config.get("norm_output", False),
            )
        except KeyError as error:
            raise ConfigError(
                f"draft config.json: {error.args[0]} is missing; add it if this is an EAGLE-3 checkpoint"
            ) from None


_ONLY_SUPPORTED: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 1,
    "hidden_act": "silu",
    "attention_bias": False,
    "norm_before_residual": False,
    "norm_before_fc": False,
    "logit_scale": 1.0,
    "use_aux_hidden_state": True,
    "rope_type": "default",
}


class Anchors(NamedTuple):
    """N anchors in training, and what their passes read. Row numbers as in `blocks.Block`.

    `positions` int64 [N]; `embeds` and `final` [T + halo, E], the policy's taps; `teacher_head` [Vd, E];
    `cu_seqlens` and `group` as in `records.Batch`. The tensors are cast to the draft's dtype where used.
    """

    block: Block
    positions: Tensor
    embeds: Tensor
    final: Tensor
    teacher_head: Tensor
    cu_seqlens: Tensor
    group: str


class DraftLosses(NamedTuple):
    """The weighted loss of some anchors, [], and detached sums over the scored rows of each pass, fp64 [4, K].

    The rows of `sums`: number of scored rows; their cross-entropy, overlap and top-1 agreement
    (`SoftCrossEntropy`).
    """

    loss: Tensor
    sums: Tensor


def rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotary embedding in half-split ("neox") order. x [T, heads, D], positions int64 [T].

    Angles are computed from the integers, in fp32 (fp64 for fp64), at any position: no table, no cap.
    """
    acc = torch.promote_types(x.dtype, torch.float32)
    exponents = torch.arange(0, x.shape[-1], 2, device=x.device, dtype=acc) / x.shape[-1]
    angles = positions[:, None, None].to(acc) / theta**exponents  # [T, 1, D / 2]
    cos, sin = angles.cos(), angles.sin()
    first, second = x.to(acc).chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


KeyValue = tuple[Tensor, Tensor]
"""Keys (rotated) and values of one pass, [T, G, D] each."""


class Attention(nn.Module):
    def __init__(self, spec: DraftSpec) -> None:
        super().__init__()
        self.head_dim, self.rope_theta = spec.head_dim, spec.rope_theta
        self.q_proj = nn.Linear(2 * spec.dim, spec.heads * spec.head_dim, bias=False)
        self.k_proj = nn.Linear(2 * spec.dim, spec.kv_heads * spec.head_dim, bias=False)
        self.v_proj = nn.Linear(2 * spec.dim, spec.kv_heads * spec.head_dim, bias=False)
        self.o_proj = nn.Linear(spec.heads * spec.head_dim, spec.dim, bias=False)

    def queries(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [N, 2E] -> [N, H, D], rotated."""
        return rotate(self._heads(self.q_proj, x), positions, self.rope_theta)

    def keys(self, x: Tensor, positions: Tensor) -> KeyValue:
        """x [N, 2E] -> what these rows add to the cache."""
        k = rotate(self._heads(self.k_proj, x), positions, self.rope_theta)
        return k, self._heads(self.v_proj, x)

    def _heads(self, project: nn.Linear, x: Tensor) -> Tensor:
        return project(x).unflatten(-1, (-1, self.head_dim))


class FeedForward(nn.Module):
    def __init__(self, spec: DraftSpec) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(spec.dim, spec.ffn_dim, bias=False)
        self.up_proj = nn.Linear(spec.dim, spec.ffn_dim, bias=False)
        self.down_proj = nn.Linear(spec.ffn_dim, spec.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    def __init__(self, spec: DraftSpec) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(spec.dim, eps=spec.norm_eps)
        self.hidden_norm = nn.RMSNorm(spec.dim, eps=spec.norm_eps)
        self.self_attn = Attention(spec)
        self.post_attention_layernorm = nn.RMSNorm(spec.dim, eps=spec.norm_eps)
        self.mlp = FeedForward(spec)

    def inputs(self, embeds: Tensor, hidden: Tensor) -> Tensor:
        """embeds, hidden [N, E] -> what attention reads, [N, 2E]."""
        return torch.cat([self.input_layernorm(embeds), self.hidden_norm(hidden)], dim=-1)

    def outputs(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """hidden [N, E], before its norm, starts the residual stream; attended [N, H, D] -> [N, E]."""
        hidden = hidden + self.self_attn.o_proj(attended.flatten(1))
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


FSDP_METHODS = ("trunk", "zero")
"""Methods of `Eagle3` besides forward that need its weights, for `parallel.fsdp.shard`."""


class Eagle3(nn.Module):
    """The draft. Parameters and buffers carry vLLM's checkpoint names; it owns its head and no embedding.

    Built with random weights from torch's global generator: normal(0, 0.02), norms at one.

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
        self.spec = spec
        if spec.fc_norm:
            self.fc_norm = nn.ModuleList(nn.RMSNorm(spec.dim, eps=spec.norm_eps) for _ in spec.aux_layers)
        self.fc = nn.Linear(len(spec.aux_layers) * spec.dim, spec.dim, bias=False)
        self.midlayer = DecoderLayer(spec)
        self.norm = nn.RMSNorm(spec.dim, eps=spec.norm_eps)
        self.lm_head = nn.Linear(spec.dim, spec.draft_vocab_size, bias=False)
        if d2t is not None:
            self.register_buffer("d2t", d2t.clone())
            self.register_buffer("t2d", build_t2d(d2t, spec.vocab_size))
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)

    def trunk(
        self, aux: tuple[Tensor, ...], newest: Tensor, positions: Tensor, cu_seqlens: Tensor, group: str
    ) -> tuple[Tensor, Trunk]:
        """What every anchor starts from, and what it sees of its document: the first part of pass 1.

        A collective of `group`.

        Args:
            aux: of this rank's rows, [T, E] each.
            newest: [T, E], embeddings of the tokens after them.
            positions: int64 [T] of the rows.
            cu_seqlens, group: as in `records.Batch`.

        Returns:
            The hidden state of pass 0, [T, E], and keys and values of pass 1 of the whole pack.
        """
        dtype = self.lm_head.weight.dtype
        hidden = self._project([x.detach().to(dtype) for x in aux])
        layer = self.midlayer
        k, v = layer.self_attn.keys(layer.inputs(newest.detach().to(dtype), hidden), positions)
        return hidden, trunk_gather(k, v, cu_seqlens, group=group)

    def forward(
        self, hidden: Tensor, trunk: Trunk, anchors: Anchors, *, pass_weights: list[float], loss_rows: int
    ) -> DraftLosses:
        """Run K = len(pass_weights) passes of TTT over N anchors and score them against the policy.

        Anchor i of pass d is scored against softmax(teacher_head @ final[i + d]), without temperature. With a
        reduced vocabulary the teacher is renormalised over it: rows whose teacher has little mass there are
        trained all the same, and `overlap` is then an upper bound of the acceptance.

        Every parameter that `trunk` does not use gets a gradient in here, of zeros if no row is scored:
        under FSDP all ranks make the same collectives, whatever their data.

        Args:
            hidden: [N, E], the anchors' rows of what `self.trunk` returned.
            trunk: the other thing it returned.
            anchors: where they are, and their inputs.
            pass_weights: weight in the loss of a scored row of each pass, normalisation included.
            loss_rows: rows whose logits exist at a time.
        """
        layer, block, dtype = self.midlayer, anchors.block, self.lm_head.weight.dtype
        branch: list[KeyValue] = []
        student = []
        for d, (newest, scored) in enumerate(zip(block.newest, block.scored, strict=True), start=1):
            x = layer.inputs(anchors.embeds[newest].to(dtype), hidden)
            positions = anchors.positions + (d - 1)
            if d > 1:  # pass 1's are the trunk
                branch = [*branch, layer.self_attn.keys(x, positions)]
            attended, _ = trunk_attention(
                layer.self_attn.queries(x, positions),
                trunk,
                [k for k, _ in branch],
                [v for _, v in branch],
                anchors.cu_seqlens,
                AttentionCall(anchors.group),
                block.ranges,
            )
            hidden = layer.outputs(hidden, attended)
            normed = self.norm(hidden)
            student.append(normed[scored])
            if self.spec.norm_output:
                hidden = normed

        sizes = [len(scored) for scored in block.scored]
        weights = torch.tensor(pass_weights, dtype=torch.float64).repeat_interleave(torch.tensor(sizes))
        result = soft_cross_entropy(
            torch.cat(student),
            self.lm_head.weight,
            anchors.final[torch.cat(block.teacher)].to(dtype),
            anchors.teacher_head.to(dtype),
            weights.to(hidden.device),
            loss_rows,
        )
        per_row = torch.stack([torch.ones_like(result.ce), result.ce, result.overlap, result.top1])
        sums = [rows.sum(1, dtype=torch.float64) for rows in per_row.split(sizes, dim=1)]
        return DraftLosses(result.loss, torch.stack(sums, dim=1))

    def zero(self) -> Tensor:
        """A zero with a graph to a parameter: for a backward that adds nothing, but makes FSDP reduce."""
        return self.norm(self.norm.weight.new_empty(0, self.spec.dim)).sum()

    @property
    def teacher_rows(self) -> Tensor | None:
        """Which rows of the policy's head are this draft's vocabulary, int64 [Vd]; None: all."""
        return target_ids(self.d2t) if "d2t" in self._buffers else None

    def _project(self, aux: list[Tensor]) -> Tensor:
        """The taps [T, E] each -> the hidden state of pass 0, [T, E]."""
        if self.spec.fc_norm:
            aux = [norm(x) for norm, x in zip(self.fc_norm, aux, strict=True)]
        return self.fc(torch.cat(aux, dim=-1))

    def hf_weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Names and full tensors of a checkpoint for vLLM, d2t and t2d included. A collective under FSDP.

        Args:
            dtype: of the weights; None: as stored. The maps stay as they are.
        """
        for name, x in self.state_dict().items():
            x = x.to(dtype) if dtype and x.is_floating_point() else x
            yield name, x.full_tensor() if isinstance(x, DTensor) else x
