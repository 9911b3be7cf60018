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

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchspec.attention import AttentionCall, Trunk, trunk_attention, trunk_gather
from torchspec.drafts.base import DraftLosses, DraftModel, Opened, Pack
from torchspec.drafts.eagle3.blocks import Block
from torchspec.drafts.eagle3.spec import Eagle3Spec
from torchspec.drafts.loss import soft_cross_entropy
from torchspec.models.config_json import LLAMA3_SCALING


def rotate(x: Tensor, positions: Tensor, spec: Eagle3Spec) -> Tensor:
    """Rotary embedding in half-split ("neox") order. x [T, heads, D], positions int64 [T].

    Angles are computed from the integers, in fp32 (fp64 for fp64), at any position: no table, no cap.
    """
    acc, size = torch.promote_types(x.dtype, torch.float32), spec.rotary_dim
    exponents = torch.arange(0, size, 2, device=x.device, dtype=acc) / size
    if spec.rope_scaling is None:
        angles = positions[:, None, None].to(acc) / spec.rope_theta**exponents  # [T, 1, size / 2]
    else:
        angles = positions[:, None, None].to(acc) * _scaled(spec.rope_theta**-exponents, spec.rope_scaling)
    cos, sin = angles.cos(), angles.sin()
    first, second = x[..., :size].to(acc).chunk(2, dim=-1)
    turned = [first * cos - second * sin, second * cos + first * sin]
    return torch.cat([*turned, x[..., size:].to(acc)], dim=-1).to(x.dtype)


def _scaled(speeds: Tensor, scaling: dict[str, float]) -> Tensor:
    """Llama 3.1's scaling: fast angles stay, slow ones are divided by the factor, those between are mixed."""
    factor, low, high, length = (scaling[name] for name in LLAMA3_SCALING)
    share = (length * speeds / (2 * math.pi) - low) / (high - low) if high != low else speeds.new_zeros(())
    turns = length * speeds / (2 * math.pi)  # within the length the model was first trained at
    mixed = (1 - share) * speeds / factor + share * speeds
    return torch.where(turns > high, speeds, torch.where(turns < low, speeds / factor, mixed))


KeyValue = tuple[Tensor, Tensor]
"""Keys (rotated) and values of one pass, [T, G, D] each."""


class Attention(nn.Module):
    def __init__(self, spec: Eagle3Spec) -> None:
        super().__init__()
        self.spec = spec
        self.q_proj = nn.Linear(2 * spec.dim, spec.heads * spec.head_dim, bias=False)
        self.k_proj = nn.Linear(2 * spec.dim, spec.kv_heads * spec.head_dim, bias=False)
        self.v_proj = nn.Linear(2 * spec.dim, spec.kv_heads * spec.head_dim, bias=False)
        self.o_proj = nn.Linear(spec.heads * spec.head_dim, spec.dim, bias=False)

    def queries(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [N, 2E] -> [N, H, D], rotated."""
        return rotate(self._heads(self.q_proj, x), positions, self.spec)

    def keys(self, x: Tensor, positions: Tensor) -> KeyValue:
        """x [N, 2E] -> what these rows add to the cache."""
        k = rotate(self._heads(self.k_proj, x), positions, self.spec)
        return k, self._heads(self.v_proj, x)

    def _heads(self, project: nn.Linear, x: Tensor) -> Tensor:
        return project(x).unflatten(-1, (-1, self.spec.head_dim))


class FeedForward(nn.Module):
    def __init__(self, spec: Eagle3Spec) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(spec.dim, spec.ffn_dim, bias=False)
        self.up_proj = nn.Linear(spec.dim, spec.ffn_dim, bias=False)
        self.down_proj = nn.Linear(spec.ffn_dim, spec.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    def __init__(self, spec: Eagle3Spec) -> None:
        super().__init__()
        self.norm_before_residual = spec.norm_before_residual
        self.input_layernorm = nn.RMSNorm(spec.dim, eps=spec.norm_eps)
        self.hidden_norm = nn.RMSNorm(spec.dim, eps=spec.norm_eps)
        self.self_attn = Attention(spec)
        self.post_attention_layernorm = nn.RMSNorm(spec.dim, eps=spec.norm_eps)
        self.mlp = FeedForward(spec)

    def inputs(self, embeds: Tensor, hidden: Tensor) -> Tensor:
        """embeds, hidden [N, E] -> what attention reads, [N, 2E]."""
        return torch.cat([self.input_layernorm(embeds), self.hidden_norm(hidden)], dim=-1)

    def outputs(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """hidden [N, E] starts the residual stream, normed or not; attended [N, H, D] -> [N, E]."""
        if self.norm_before_residual:
            hidden = self.hidden_norm(hidden)
        hidden = hidden + self.self_attn.o_proj(attended.flatten(1))
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Eagle3(DraftModel):
    """The draft, as `drafts.base.DraftModel` says. It owns its head and no embedding.

    Weights are built as normal(0, 0.02), norms at one.
    """

    def __init__(self, spec: Eagle3Spec, d2t: Tensor | None = None) -> None:
        super().__init__(spec, d2t)
        if spec.fc_norm:
            self.fc_norm = nn.ModuleList(nn.RMSNorm(spec.dim, eps=spec.norm_eps) for _ in spec.aux_layers)
        self.fc = nn.Linear(len(spec.aux_layers) * spec.dim, spec.dim, bias=False)
        self.midlayer = DecoderLayer(spec)
        self.norm = nn.RMSNorm(spec.dim, eps=spec.norm_eps)
        self.lm_head = nn.Linear(spec.dim, spec.draft_vocab_size, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)

    def open(self, pack: Pack) -> Opened:
        """Compute the first part of pass 1: what every anchor starts from, and what it sees of its document.

        Returns:
            As `rows` the hidden state of pass 0, [T, E]; as `sinks` and `state` the trunk, which is keys and
            values of pass 1 of the whole pack.
        """
        dtype, batch = self.lm_head.weight.dtype, pack.batch
        after = torch.from_numpy(pack.plan.shift(1, pack.objective.reach)).to(pack.embeds.device)
        hidden = self._project([x.to(dtype) for x in pack.aux])
        x = self.midlayer.inputs(pack.embeds[after].to(dtype), hidden)
        k, v = self.midlayer.self_attn.keys(x, batch.positions)
        trunk = trunk_gather(k, v, batch.cu_seqlens, group=batch.group)
        return Opened((hidden,), (trunk.grad_accumulator,), trunk.kv)

    def forward(self, unit: Block, opened: Opened, pack: Pack) -> DraftLosses:
        """Run the K passes of TTT over N anchors and score them against the policy.

        Anchor i of pass d is scored against softmax(pack.head @ final[i + d]), without temperature. With a
        reduced vocabulary the teacher is renormalised over it: rows whose teacher has little mass there are
        trained all the same, and `overlap` is then an upper bound of the acceptance.
        """
        layer, batch, dtype = self.midlayer, pack.batch, self.lm_head.weight.dtype
        (hidden,), trunk = opened.rows, Trunk(opened.state, opened.sinks[0])
        start = batch.positions[unit.rows]
        branch: list[KeyValue] = []
        student = []
        for d, (newest, scored) in enumerate(zip(unit.newest, unit.scored, strict=True), start=1):
            x = layer.inputs(pack.embeds[newest].to(dtype), hidden)
            positions = start + (d - 1)
            if d > 1:  # pass 1's are the trunk
                branch = [*branch, layer.self_attn.keys(x, positions)]
            attended, _ = trunk_attention(
                layer.self_attn.queries(x, positions),
                trunk,
                [k for k, _ in branch],
                [v for _, v in branch],
                batch.cu_seqlens,
                AttentionCall(batch.group, window=self.spec.window),
                unit.ranges,
            )
            hidden = layer.outputs(hidden, attended)
            normed = self.norm(hidden)
            student.append(normed[scored])
            if self.spec.norm_output:
                hidden = normed
        return self._score(student, unit, pack)

    def _score(self, student: list[Tensor], unit: Block, pack: Pack) -> DraftLosses:
        """student: the scored rows of each pass, [n_d, E] each."""
        dtype, sizes = self.lm_head.weight.dtype, [len(rows) for rows in student]
        weights = torch.tensor(pack.weights, dtype=torch.float64).repeat_interleave(torch.tensor(sizes))
        result = soft_cross_entropy(
            torch.cat(student),
            self.lm_head.weight,
            pack.final[torch.cat(unit.teacher)].to(dtype),
            pack.head.to(dtype),
            weights.to(student[0].device),
            pack.objective.loss_rows,
        )
        per_row = torch.stack([torch.ones_like(result.ce), result.ce, result.overlap, result.top1])
        sums = torch.stack([rows.sum(1, dtype=torch.float64) for rows in per_row.split(sizes, dim=1)], dim=1)
        names = ("ce", "overlap", "top1")
        return DraftLosses(result.loss, sums[0], dict(zip(names, sums[1:], strict=True)))

    def zero(self) -> Tensor:
        return self.norm(self.norm.weight.new_empty(0, self.spec.dim)).sum()

    def _project(self, aux: list[Tensor]) -> Tensor:
        """The taps [T, E] each -> the hidden state of pass 0, [T, E]."""
        if self.spec.fc_norm:
            aux = [norm(x) for norm, x in zip(self.fc_norm, aux, strict=True)]
        return self.fc(torch.cat(aux, dim=-1))
