"""The example of a draft architecture from outside the package: it learns, whatever the size of its units."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from torchspec.config.schema import Draft
from torchspec.data.packing import make_batch
from torchspec.drafts.trainer import DraftTrainer
from torchspec.models.spec import PolicySpec
from torchspec.records import Batch, Rollout, Taps

PATH = Path(__file__).parents[2] / "examples" / "custom_draft" / "mlp_draft.py"
POLICY = PolicySpec(
    arch="qwen3", vocab_size=24, dim=16, layers=4, heads=2, kv_heads=1, head_dim=8, ffn_dim=32, norm_eps=1e-6,
    rope_theta=1e4, rope_scaling=None, tied=False, max_len=64,
)  # fmt: skip
SETTINGS = {"ttt_steps": 3, "loss_rows": 16, "aux_layers": [1, 3]}


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("mlp_draft", PATH)
    assert spec is not None
    assert spec.loader is not None
    sys.modules["mlp_draft"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make_data() -> tuple[Batch, Taps, torch.Tensor]:
    """Return a pack, the taps of a policy whose next token depends on the newest one alone, and its head."""
    draw = torch.Generator().manual_seed(0)

    def document(index: int) -> Rollout:
        tokens = torch.randint(POLICY.vocab_size, (12,), generator=draw).tolist()
        versions = {"policy_version": 0, "draft_version": 0}
        logprobs = [-1.0] * (len(tokens) - 4)
        return Rollout(
            problem_id=str(index), sample=0, prompt_tokens=tokens[:4], tokens=tokens[4:], logprobs=logprobs,
            finish="stop", **versions,
        )  # fmt: skip

    batch = make_batch([document(i) for i in range(8)])
    sizes = (POLICY.vocab_size, POLICY.dim, POLICY.vocab_size)
    table, mix, head = (torch.randn(n, POLICY.dim, generator=draw) for n in sizes)
    embeds = table[batch.tokens]
    return batch, Taps(embeds=embeds, aux=(embeds, embeds.tanh()), final=embeds @ mix / 4), head


def trainer(example: ModuleType, **settings: int) -> DraftTrainer:
    from torchspec.drafts import registry

    arch, draft = registry.get("mlp"), Draft(**SETTINGS, **settings)
    spec = arch.make_spec(draft, POLICY)
    torch.manual_seed(1)
    return DraftTrainer(arch.model(spec, None), arch.objective(draft, spec))


def test_it_learns(example) -> None:
    batch, taps, head = make_data()
    learner = trainer(example)
    optimizer = torch.optim.Adam(learner.draft.parameters(), lr=1e-2)
    denominator = learner.denominator(learner.counts(batch))
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        losses.append(float(learner.backward(batch, taps, head, denominator).loss))
        optimizer.step()
    assert losses[-1] < 0.6 * losses[0]


def test_gradients_do_not_depend_on_the_units(example) -> None:
    batch, taps, head = make_data()
    gradients = []
    for row_block in (0, 7):
        learner = trainer(example, row_block=row_block)
        learner.backward(batch, taps, head, learner.denominator(learner.counts(batch)))
        gradients.append([x.grad for x in learner.draft.parameters()])
    for whole, parts in zip(*gradients, strict=True):
        torch.testing.assert_close(whole, parts)


def test_its_checkpoint_says_its_shape(example) -> None:
    from torchspec.drafts import registry

    arch = registry.get("mlp")
    spec = arch.make_spec(Draft(**SETTINGS), POLICY)
    config = arch.config_json(spec, arch.layouts[0], None)
    assert arch.spec_from_json(config) == spec
    assert registry.of_checkpoint(config) is arch
    assert {name for name, _ in arch.model(spec, None).hf_weights()} == arch.required_names(spec)
