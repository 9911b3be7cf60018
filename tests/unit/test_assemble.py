"""What a run is built from: the draft's shape, the tokenizer, the warm-up's examples."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from torchspec.checkpoint.cache import contents, fingerprint
from torchspec.checkpoint.export import export_draft
from torchspec.config.schema import Config, Parallel, TinyModel
from torchspec.data.tokenizer import load_tokenizer, special_ids
from torchspec.distributed.mesh import Mesh
from torchspec.drafts.build import build_draft, draft_spec
from torchspec.drafts.vocab import target_ids
from torchspec.errors import ConfigError
from torchspec.models.spec import PolicySpec
from torchspec.models.tiny import make_tiny
from torchspec.records import Problem
from torchspec.rewards.scoring import decode
from torchspec.training.warmup import check, example


@pytest.fixture(scope="module")
def mesh():
    mesh = Mesh(Parallel(), device="cpu")
    yield mesh
    mesh.close()


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("base") / "tiny"
    make_tiny(folder, TinyModel(dim=32, layers=7, heads=4, kv_heads=2, head_dim=8, ffn_dim=48), 64, seed=0)
    return folder


@pytest.fixture(scope="module")
def policy(base) -> PolicySpec:
    return PolicySpec.from_hf(base, 64)


def test_the_draft_takes_the_policys_shape_but_for_what_is_configured(policy) -> None:
    config = Config()
    spec = draft_spec(config, policy)
    assert (spec.dim, spec.heads, spec.kv_heads, spec.head_dim, spec.ffn_dim) == (32, 4, 2, 8, 48)
    assert spec.draft_vocab_size == spec.vocab_size == policy.vocab_size
    assert spec.aux_layers == (2, 3, 4)
    assert (spec.fc_norm, spec.norm_output) == (True, True)
    config.draft.aux_layers, config.draft.heads, config.draft.ffn_dim = [1, 3, 7], 8, 16
    config.draft.vocab_size, config.draft.fc_norm = 40, False
    spec = draft_spec(config, policy)
    assert (spec.aux_layers, spec.heads, spec.ffn_dim) == ((1, 3, 7), 8, 16)
    assert (spec.draft_vocab_size, spec.fc_norm) == (40, False)


def test_a_reduced_vocabulary_is_the_frequent_tokens_and_the_kept_ones(policy, mesh) -> None:
    config = Config()
    config.draft.vocab_size = 4
    draft = build_draft(config, mesh, draft_spec(config, policy), Counter({7: 3, 9: 5, 50: 4, 11: 1}), [2])
    assert target_ids(draft.d2t).tolist() == [2, 7, 9, 50]


def test_a_draft_starts_from_a_checkpoint_and_its_shape(policy, mesh, tmp_path) -> None:
    config = Config()
    config.draft.vocab_size, config.draft.norm_output = 40, False
    first = build_draft(config, mesh, draft_spec(config, policy), Counter(range(20, 70)), [2])
    export_draft(first, tmp_path / "draft", mesh)
    again = Config()
    again.draft.init = str(tmp_path / "draft")
    spec = draft_spec(again, policy)
    assert spec == first.spec
    second = build_draft(again, mesh, spec, Counter(), [2])
    ours, theirs = dict(first.hf_weights()), dict(second.hf_weights())
    assert ours.keys() == theirs.keys()
    assert all(bool((weight == theirs[name]).all()) for name, weight in ours.items())


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("vocab_size", 96, "has vocab_size 96, the policy 104"),
        ("hidden_size", 48, "has dim 48, the policy 32"),
        ("max_position_embeddings", 32, "has 32 positions, model.max_len is 64"),
        ("eagle_aux_hidden_state_layer_ids", [1, 2, 9], "three ascending ids from 0 to 7"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_with_both_values(
    policy, tmp_path, key, value, message
) -> None:
    config = Config()
    (tmp_path / "config.json").write_text(json.dumps(draft_spec(config, policy).hf_config() | {key: value}))
    config.draft.init = str(tmp_path)
    with pytest.raises(ConfigError, match=message):
        draft_spec(config, policy)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("aux_layers", [1, 2, 9], "three ascending ids from 0 to 7"),
        ("aux_layers", [1, 2], "three ascending ids from 0 to 7"),
        ("arch", "eagle9", "draft.arch = 'eagle9' is not allowed; one of: eagle3"),
        ("vocab_size", 9999, "exceeds the policy's vocabulary of 104"),
        ("kv_heads", 3, "4 heads are not a multiple of 3 kv_heads"),
        ("init", "nowhere", "nowhere/config.json is missing"),
    ],
)
def test_a_draft_that_cannot_be_is_refused(policy, key, value, message) -> None:
    config = Config()
    setattr(config.draft, key, value)
    with pytest.raises(ConfigError, match=message):
        draft_spec(config, policy)


def test_the_default_layers_need_a_deep_enough_policy(tmp_path) -> None:
    make_tiny(tmp_path / "tiny", TinyModel(dim=16, layers=6, heads=2, kv_heads=1, head_dim=8), 64, seed=0)
    with pytest.raises(ConfigError, match="needs a policy of at least 7"):
        draft_spec(Config(), PolicySpec.from_hf(tmp_path / "tiny"))


def test_a_folder_without_a_tokenizer_is_named(policy, tmp_path) -> None:
    with pytest.raises(ConfigError, match=f"{tmp_path}: no usable tokenizer"):
        load_tokenizer(tmp_path, policy)


def test_the_warm_up_teaches_the_template_and_the_end(base, policy) -> None:
    tokenizer = load_tokenizer(base, policy)
    problem = Problem(id="p", messages=[{"role": "user", "content": "2+2"}], answer="4")
    taught = example(problem, "{question}=<answer>{answer}</answer>", tokenizer)
    assert decode(tokenizer, taught.tokens) == taught.text == "2+2=<answer>4</answer>"
    assert taught.tokens[-1] == tokenizer.eos_token_id
    assert decode(tokenizer, taught.prompt_tokens).endswith("2+2a")


def test_a_fingerprint_changes_with_every_part() -> None:
    one = fingerprint(Config().draft, 1)
    other = Config()
    other.draft.optim.lr = 2e-4
    assert one == fingerprint(Config().draft, 1)
    assert len({one, fingerprint(Config().draft, 2), fingerprint(other.draft, 1)}) == 3


def test_a_cache_depends_on_what_the_files_hold(tmp_path) -> None:
    (tmp_path / "model").mkdir()
    weights = tmp_path / "model" / "weights"
    weights.write_bytes(b"one")
    before = contents(tmp_path / "model", "", "random")
    assert [name for name, _, _ in before] == [str(weights)]
    weights.write_bytes(b"other")
    assert contents(tmp_path / "model", "", "random") != before


def test_special_tokens_are_kept(base, policy) -> None:
    assert special_ids(load_tokenizer(base, policy)) == [0, 1, 2]


def test_what_cannot_be_taught_is_refused_before_weights_load(base, policy) -> None:
    config = Config()
    tokenizer = load_tokenizer(base, policy)
    problem = Problem(id="p7", messages=[{"role": "user", "content": "x" * 60}], answer="4")
    nameless = Problem(id="p8", messages=problem.messages)
    check(config, [nameless], tokenizer)  # no warm-up, nothing to teach
    config.warmup.steps, config.model.max_len = 1, 64
    with pytest.raises(ConfigError, match="problem p8: no answer to teach"):
        check(config, [nameless], tokenizer)
    with pytest.raises(ConfigError, match=r"problem p7: prompt and warmup.template have \d+ tokens"):
        check(config, [problem], tokenizer)
