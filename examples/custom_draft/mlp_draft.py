"""A draft architecture of the user's: a perceptron over the newest token and its own state, without attention.

Importing this module enters it in the registry, as `draft.arch = "mlp"`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from torchspec.config.schema import Draft
from torchspec.drafts import registry
from torchspec.drafts.base import DraftArchitecture, DraftLosses, DraftModel, Opened, Pack, Verifier
from torchspec.drafts.eagle3.blocks import Block, training_time_test
from torchspec.drafts.loss import soft_cross_entropy
from torchspec.errors import ConfigError
from torchspec.models.spec import PolicySpec

SERVED_AS = "MlpDraftForCausalLM"


@dataclass(frozen=True, kw_only=True)
class MlpSpec:
    """Shape of the draft; every field is in its config.json."""

    arch: ClassVar[str] = "mlp"
    vocab_size: int
    draft_vocab_size: int
    dim: int
    ffn_dim: int
    max_len: int
    aux_layers: tuple[int, ...]

    @property
    def trunk_width(self) -> int:
        """Nothing is kept for rows that are not trained: there is no attention."""
        return 0


class MlpDraft(DraftModel):
    """h_d = h_(d-1) + mlp(norm(e_d), norm(h_(d-1))), logits_d = lm_head(norm(h_d)); h_0 = fc(taps).

    e_d is the policy's embedding of the token d further on than the anchor, in pass d = 1..K.
    """

    def __init__(self, spec: MlpSpec, d2t: Tensor | None = None) -> None:
        super().__init__(spec, d2t)
        self.fc = nn.Linear(len(spec.aux_layers) * spec.dim, spec.dim, bias=False)
        self.norm_token, self.norm_state, self.norm = (nn.RMSNorm(spec.dim) for _ in range(3))
        self.up = nn.Linear(2 * spec.dim, spec.ffn_dim, bias=False)
        self.down = nn.Linear(spec.ffn_dim, spec.dim, bias=False)
        self.lm_head = nn.Linear(spec.dim, spec.draft_vocab_size, bias=False)

    def open(self, pack: Pack) -> Opened:
        """Return the state of pass 0, [T, E]: the units take their rows of it."""
        return Opened(rows=(self.fc(torch.cat(pack.aux, dim=-1).to(self.fc.weight.dtype)),))

    def forward(self, unit: Block, opened: Opened, pack: Pack) -> DraftLosses:
        """Run the passes over the unit's N anchors; the loss is taken of all passes at once."""
        (state,), dtype = opened.rows, self.lm_head.weight.dtype
        student = []
        for newest, scored in zip(unit.newest, unit.scored, strict=True):
            token = self.norm_token(pack.embeds[newest].to(dtype))
            x = torch.cat([token, self.norm_state(state)], dim=-1)
            state = state + self.down(nn.functional.silu(self.up(x)))
            student.append(self.norm(state)[scored])
        sizes = [len(rows) for rows in student]
        weights = torch.tensor(pack.weights, dtype=torch.float64).repeat_interleave(torch.tensor(sizes))
        result = soft_cross_entropy(
            torch.cat(student),
            self.lm_head.weight,
            pack.final[torch.cat(unit.teacher)].to(dtype),
            pack.head.to(dtype),
            weights.to(state.device),
            pack.objective.loss_rows,
        )
        metrics = {"ce": result.ce, "overlap": result.overlap, "top1": result.top1}
        return DraftLosses(
            loss=result.loss,
            counts=torch.tensor(sizes, dtype=torch.float64, device=state.device),
            sums={name: _sum_by_pass(x, sizes) for name, x in metrics.items()},
        )

    def zero(self) -> Tensor:
        """Return a zero with a graph."""
        return self.norm(self.norm.weight.new_empty(0, self.spec.dim)).sum()


def _sum_by_pass(per_row: Tensor, sizes: list[int]) -> Tensor:
    return torch.stack([part.sum(dtype=torch.float64) for part in per_row.split(sizes)])


def make_spec(settings: Draft, policy: PolicySpec) -> MlpSpec:
    """Return the shape of a random draft for this policy."""
    return MlpSpec(
        vocab_size=policy.vocab_size,
        draft_vocab_size=settings.vocab_size or policy.vocab_size,
        dim=policy.dim,
        ffn_dim=settings.ffn_dim or policy.ffn_dim,
        max_len=policy.max_len,
        aux_layers=tuple(settings.aux_layers) or (policy.layers - 1,),
    )


def check_spec(spec: MlpSpec, policy: PolicySpec) -> None:
    """Raise a ConfigError if the policy has no layer that is tapped."""
    if not all(0 <= layer < policy.layers for layer in spec.aux_layers):
        raise ConfigError(f"aux_layers {list(spec.aux_layers)} are not layers 0 to {policy.layers - 1}")


def config_json(spec: MlpSpec, layout: str, verifier: Verifier | None = None) -> dict[str, Any]:
    """Return config.json; there is one layout."""
    return {"architectures": [SERVED_AS], **asdict(spec), "aux_layers": list(spec.aux_layers)}


def spec_from_json(config: dict[str, Any]) -> MlpSpec:
    """Return the shape that a config.json has.

    Raises:
        ConfigError: a key is missing.
    """
    try:
        found = {field.name: config[field.name] for field in fields(MlpSpec)}
    except KeyError as error:
        raise ConfigError(f"draft config.json: {error.args[0]} is missing") from None
    return MlpSpec(**found | {"aux_layers": tuple(found["aux_layers"])})


def required_names(spec: MlpSpec) -> set[str]:
    """Return the names of the tensors in a checkpoint."""
    names = {"fc", "norm_token", "norm_state", "norm", "up", "down", "lm_head"}
    maps = {"d2t", "t2d"} if spec.draft_vocab_size != spec.vocab_size else set()
    return {f"{name}.weight" for name in names} | maps


registry.register(
    DraftArchitecture(
        name=MlpSpec.arch,
        method="draft_model",
        served_as=(SERVED_AS,),
        layouts=("own",),
        make_spec=make_spec,
        check_spec=check_spec,
        model=MlpDraft,
        objective=training_time_test,  # the same passes as EAGLE-3; it depends on [draft] alone
        config_json=config_json,
        spec_from_json=spec_from_json,
        layout_of=lambda config: "own",
        renamed=lambda name, layout: name,
        required_names=required_names,
        engine_name=lambda name: name,
    )
)
