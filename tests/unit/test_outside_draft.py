"""A draft architecture that the package knows nothing of: entered through the registry, and used as any other."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from torchspec.attention import local_plan
from torchspec.build import build_learner, build_policy
from torchspec.checkpoint.export import export_draft
from torchspec.commands.dry_run import estimate
from torchspec.config.schema import Config, Parallel, TinyModel
from torchspec.distributed.mesh import Mesh
from torchspec.drafts import registry
from torchspec.drafts.base import DraftArchitecture, DraftLosses, DraftModel, Opened, Pack
from torchspec.drafts.build import build_draft, check_draft, draft_spec, draft_trainer, load_draft
from torchspec.drafts.loss import soft_cross_entropy
from torchspec.metrics.meter import Meter
from torchspec.models.spec import PolicySpec
from torchspec.models.tiny import make_tiny
from torchspec.records import Rollout, SamplingLaw
from torchspec.rollout.vllm.setup import draft_method
from torchspec.training.learner import DraftLearner
from torchspec.training.optim import ModelOptimizer


@dataclass(frozen=True, kw_only=True)
class LineSpec:
    """One linear layer over two taps."""

    arch: ClassVar[str] = "line"
    trunk_width: ClassVar[int] = 0
    vocab_size: int
    draft_vocab_size: int
    dim: int
    max_len: int
    aux_layers: tuple[int, ...]


@dataclass(frozen=True)
class Rows:
    rows: Tensor


@dataclass(frozen=True)
class NextButOne:
    """One prediction: the token after the newest one."""

    loss_rows: int
    weights: ClassVar[list[float]] = [1.0]
    reach: ClassVar[int] = 1

    def counts(self, batch):
        return (batch.chain > 0).sum()[None]

    def units(self, batch, plan):
        """Two units, of which one may be empty."""
        rows = (batch.chain > 0).nonzero().flatten().to(batch.tokens.device)
        return [Rows(part) for part in rows.tensor_split(2)]

    def most_scored(self, rows):
        return rows


class Line(DraftModel):
    def __init__(self, spec: LineSpec, d2t: Tensor | None = None) -> None:
        super().__init__(spec, d2t)
        self.fuse = nn.Linear(len(spec.aux_layers) * spec.dim, spec.dim, bias=False)
        self.lm_head = nn.Linear(spec.dim, spec.draft_vocab_size, bias=False)

    def open(self, pack: Pack) -> Opened:
        return Opened(rows=(self.fuse(torch.cat(pack.aux, dim=-1)),))

    def forward(self, unit: Rows, opened: Opened, pack: Pack) -> DraftLosses:
        after = torch.from_numpy(pack.plan.shift(1, pack.objective.reach)).to(pack.embeds.device)[unit.rows]
        student = opened.rows[0] + pack.embeds[after]
        weights = torch.full((len(after),), pack.weights[0], device=student.device)
        result = soft_cross_entropy(
            student, self.lm_head.weight, pack.final[after], pack.head, weights, pack.objective.loss_rows
        )
        overlap = result.overlap.sum(dtype=torch.float64)[None]
        return DraftLosses(result.loss, torch.tensor([float(len(after))]), {"overlap": overlap})

    def zero(self) -> Tensor:
        return self.fuse.weight.sum() * 0


LINE = DraftArchitecture(
    name="line",
    method="line_method",
    served_as=("LineModel",),
    layouts=("plain",),
    layouts_with_embeddings=(),
    make_spec=lambda draft, policy: LineSpec(
        vocab_size=policy.vocab_size,
        draft_vocab_size=draft.vocab_size or policy.vocab_size,
        dim=policy.dim,
        max_len=policy.max_len,
        aux_layers=tuple(draft.aux_layers or (1, policy.layers)),
    ),
    check_spec=lambda spec, policy: None,
    model=Line,
    objective=lambda draft, spec: NextButOne(draft.loss_rows),
    config_json=lambda spec, layout, verifier: {"architectures": ["LineModel"], **dataclasses.asdict(spec)},
    spec_from_json=lambda config, layers, where: LineSpec(
        aux_layers=tuple(config["aux_layers"]),
        **{n: config[n] for n in ("vocab_size", "draft_vocab_size", "dim", "max_len")},
    ),
    layout_of=lambda config: "plain",
    renamed=lambda name, layout: name,
    required_names=lambda spec: {"fuse.weight", "lm_head.weight"},
    engine_name=lambda name: name,
)


@pytest.fixture(autouse=True)
def line(monkeypatch) -> None:
    monkeypatch.setattr(registry, "_ARCHITECTURES", dict(registry._ARCHITECTURES))
    registry.register(LINE)


@pytest.fixture
def mesh():
    mesh = Mesh(Parallel(), device="cpu")
    yield mesh
    mesh.close()


def a_config() -> Config:
    config = Config()
    config.draft.arch = "line"
    config.model.tiny = TinyModel(dim=32, layers=2, heads=4, kv_heads=2, head_dim=8, ffn_dim=48)
    config.model.max_len, config.train.pack_tokens = 64, 64
    return config


def rollouts() -> list[Rollout]:
    text = torch.randint(3, 90, (2, 20), generator=torch.Generator().manual_seed(0)).tolist()
    common = {"finish": "stop", "policy_version": 0, "draft_version": 0, "logprobs": [-4.0] * 20}
    return [
        Rollout(problem_id="p", sample=i, prompt_tokens=[2, 5], tokens=t, advantage=1.0 - 2 * i, **common)
        for i, t in enumerate(text)
    ]


def test_it_learns_in_an_update_and_survives_its_export(tmp_path, mesh) -> None:
    config = a_config()
    make_tiny(tmp_path / "policy", config.model.tiny, 64, seed=0)
    policy_spec = PolicySpec.from_hf(tmp_path / "policy", 64)
    policy = build_policy(config, mesh, tmp_path / "policy", policy_spec)
    draft = build_draft(config, mesh, draft_spec(config, policy_spec), Counter(), [])
    assert isinstance(draft, Line)
    before = {name: x.clone() for name, x in draft.hf_weights()}
    side = DraftLearner(
        draft_trainer(config.draft, draft), ModelOptimizer("draft", draft, config.draft.optim, 10)
    )
    learner = build_learner(config, mesh, policy, ModelOptimizer("policy", policy, config.optim, 10), side)
    meter = Meter()
    learner.reinforce(rollouts(), meter, train_draft=True)
    metrics: dict[str, Any] = meter.reduce(mesh)
    assert metrics["draft/loss"] > 0
    assert 0 < metrics["draft/overlap_0"] < 1
    assert {name for name in metrics if name.startswith("draft/")} == {
        "draft/loss",
        "draft/overlap_0",
        "draft/lr",
        "draft/grad_norm",
    }
    trained = dict(draft.hf_weights())
    assert not any(torch.equal(x, before[name]) for name, x in trained.items())

    export_draft(draft, tmp_path / "draft", mesh)
    assert json.loads((tmp_path / "draft/config.json").read_text())["architectures"] == ["LineModel"]
    assert draft_method(tmp_path / "draft") == "line_method"
    config.draft.init = str(tmp_path / "draft")
    check_draft(config, tmp_path / "policy")
    other = build_draft(config, mesh, draft_spec(config, policy_spec), Counter(), [])
    load_draft(other, tmp_path / "draft")
    assert all(torch.equal(x, trained[name]) for name, x in other.hf_weights())


def test_its_gradients_are_those_of_one_unit(tmp_path, mesh) -> None:
    """The trainer's pieces, put together, are the plain loss of all rows."""
    config = a_config()
    make_tiny(tmp_path / "policy", config.model.tiny, 64, seed=0)
    policy_spec = PolicySpec.from_hf(tmp_path / "policy", 64)
    policy = build_policy(config, mesh, tmp_path / "policy", policy_spec)
    draft = build_draft(config, mesh, draft_spec(config, policy_spec), Counter(), [])
    learner = build_learner(config, mesh, policy, ModelOptimizer("policy", policy, config.optim, 10))
    (batch,) = learner._packs(rollouts())
    trainer = draft_trainer(config.draft, draft)
    taps = policy(batch, law=SamplingLaw(), logprob_rows=64, aux_layers=trainer.aux_layers).taps
    head = policy.head_weight(torch.float32).detach()
    denominator = trainer.denominator(trainer.counts(batch))
    stats = trainer.backward(batch, taps, head, denominator)
    got = [p.grad.full_tensor().clone() for p in draft.parameters()]

    plain = Line(draft.spec)
    plain.load_state_dict(dict(draft.hf_weights()))
    rows = (batch.chain > 0).nonzero().flatten()
    after = torch.from_numpy(local_plan(batch.cu_seqlens, "").shift(1, 1))[rows]
    hidden = plain.fuse(torch.cat(taps.aux, dim=-1))[rows] + taps.embeds[after]
    teacher = torch.softmax(taps.final[after] @ head.T, dim=-1)
    loss = -(teacher * torch.log_softmax(plain.lm_head(hidden), dim=-1)).sum() / denominator
    loss.backward()
    torch.testing.assert_close(stats.loss.float(), loss.detach())
    assert stats.counts.tolist() == [len(rows)] == [denominator]
    for grad, p in zip(got, plain.parameters(), strict=True):
        torch.testing.assert_close(grad, p.grad, rtol=1e-4, atol=1e-6)


def test_a_dry_run_counts_it() -> None:
    config = a_config()
    policy = PolicySpec(
        arch="qwen3", vocab_size=104, dim=32, layers=2, heads=4, kv_heads=2, head_dim=8, ffn_dim=48,
        norm_eps=1e-6, rope_theta=1e4, rope_scaling=None, tied=True, max_len=64,
    )  # fmt: skip
    memory = estimate(config, policy, 1)
    assert memory.trunk == 0 < memory.passes
    alone = Config()
    alone.draft.enabled, alone.model, alone.train = False, config.model, config.train
    assert memory.parameters - estimate(alone, policy, 1).parameters == 4 * (64 * 32 + 32 * 104)
