"""Defaults < TOML < command line, and one clear line for whatever is wrong."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import tomli_w

from torchspec.config.document import render
from torchspec.config.keys import Bounds, keys
from torchspec.config.load import load, load_recorded
from torchspec.config.schema import Config
from torchspec.errors import ConfigError

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.toml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.name)
def test_every_shipped_config_loads(path) -> None:
    load(path)


def test_the_three_promised_configs_are_shipped() -> None:
    assert {p.stem for p in CONFIGS} >= {"demo_cpu", "qwen3_0.6b_1gpu", "qwen3_8b_8gpu"}


def test_command_line_wins_over_toml_wins_over_defaults(tmp_path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[draft]\nttt_steps = 3\npass_decay = 1\n[draft.optim]\nlr = 1e-3\n")
    config = load(path, ["--draft.ttt-steps", "5", "--draft.optim.clip=0", "--run.name", "on"])
    assert config.draft.ttt_steps == 5
    assert config.draft.optim.lr == 1e-3
    assert config.draft.optim.clip == 0.0
    assert config.draft.pass_decay == 1.0
    assert isinstance(config.draft.pass_decay, float)
    assert config.draft.aux_layers == Config().draft.aux_layers
    assert config.run.name == "on"


def test_values_on_the_command_line_are_toml(tmp_path) -> None:
    argv = ["--draft.aux_layers", "[1, 2, 3]", "--draft.enabled", "false", "--data.task_args", "{ min = 2 }"]
    config = load(None, argv)
    assert config.draft.aux_layers == [1, 2, 3]
    assert config.draft.enabled is False
    assert config.data.task_args == {"min": 2}


def test_the_resolved_config_is_a_config(tmp_path) -> None:
    config = load(CONFIGS[0])
    path = tmp_path / "resolved.toml"
    path.write_text(tomli_w.dumps(dataclasses.asdict(config)))
    assert load(path) == config


BAD_TOML = [
    (
        "[rollout]\ndrafter = 'sufix'",
        "rollout.drafter = 'sufix' is not allowed; did you mean 'suffix'? one of: model",
    ),
    (
        "[budget]\nrule = 'fixed'\nfixed_tokens = 9",
        "budget.fixed_tokens = 9 is beyond the drafter's 4 tokens",
    ),
    (
        "[budget]\nclass_tokens = [8, 0, 24]",
        "budget.class_tokens = [8, 0, 24] must be three ascending numbers",
    ),
    ("[budget]\nfocus = 2", "budget.focus = 2.0 must be in [0, 1]"),
    ("[rollout]\ndrafter = 'suffix'", "would leave the draft unused: set draft.enabled = false, or"),
    ("[draft]\nenabled = false\n[rollout]\ndrafter = 'hybrid'", "'hybrid' needs draft.enabled = true"),
    ("[rollout]\ndrafter = 'hybrid'\n[suffix]\nmax_draft = 200", "a draft of 200 tokens"),
    ("[suffix]\nwindow = -1", "suffix.window = -1 must be at least 0"),
    ("[drafts]\nx = 1", "unknown key drafts; did you mean draft?"),
    ("[draft]\ntt_steps = 1", "unknown key draft.tt_steps; did you mean draft.ttt_steps?"),
    ("[draft]\nzzz = 1", "unknown key draft.zzz; valid keys here: arch, aux_layers"),
    ("draft = 1", "draft is a section, write [draft]"),
    ("[draft]\nttt_steps = 1.5", "draft.ttt_steps must be int, got float 1.5"),
    ("[draft]\nttt_steps = true", "draft.ttt_steps must be int, got bool True"),
    ("[draft]\nenabled = 1", "draft.enabled must be bool, got int 1"),
    ("[draft]\naux_layers = 3", "draft.aux_layers must be a list of int"),
    ("[draft]\naux_layers = [1, 2, 'x']", "draft.aux_layers[2] must be int, got str 'x'"),
    ("[model]\ndtype = 'fp8'", "model.dtype = 'fp8' is not allowed; one of: float32, bfloat16"),
    ("[data]\ntask_args = 3", "data.task_args must be dict, got int 3"),
    ("[draft\n", "not valid TOML"),
]


@pytest.mark.parametrize(("text", "message"), BAD_TOML, ids=lambda x: x.replace("\n", " ")[:40])
def test_a_bad_file_is_named_with_key_and_remedy(tmp_path, text, message) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        load(path)
    assert str(error.value).startswith(f"{path}: ")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


BAD_ARGUMENTS = [
    (["--draft.tt_steps", "1"], "command line: unknown key draft.tt_steps; did you mean draft.ttt_steps?"),
    (["--darft.ttt_steps", "1"], "command line: unknown section darft; did you mean draft?"),
    (["--draft.optm.lr", "1"], "command line: unknown section draft.optm; did you mean draft.optim?"),
    (["--draft", "1"], "command line: draft is a section"),
    (["ttt_steps=1"], "command line: unexpected 'ttt_steps=1'"),
    (["--run.steps"], "command line: --run.steps needs a value"),
    (["--run.steps", "many"], "command line: run.steps must be int, got str 'many'"),
    (["--run.steps", "0"], "run.steps = 0 must be at least 1"),
    (["--draft.ttt_steps", "0"], "draft.ttt_steps = 0 must be at least 1"),
    (["--rollout.samples_per_problem", "1"], "rollout.samples_per_problem = 1 must be at least 2"),
    (["--rollout.temperature", "0"], "rollout.temperature = 0.0 must be above 0"),
    (["--rollout.top_p", "0"], "rollout.top_p = 0.0 must be in (0, 1]"),
    (["--rollout.max_new_tokens", "512"], "leaves no room for a prompt in model.max_len = 512"),
    (["--rollout.gpu_memory_utilization", "1"], "must be in (0, 1)"),
    (["--draft.pass_decay", "0"], "draft.pass_decay = 0.0 must be in (0, 1]"),
    (["--draft.aux_layers", "[1, 3, 2]"], "must be ascending layer ids"),
    (["--draft.aux_layers", "[1, 1]"], "must be ascending layer ids"),
    (["--draft.heads", "4", "--draft.kv_heads", "3"], "must be a multiple of draft.kv_heads = 3"),
    (["--model.tiny.kv_heads", "4"], "must be a multiple of model.tiny.kv_heads = 4"),
    (["--model.tiny.head_dim", "31"], "model.tiny.head_dim = 31 must be even"),
    (["--optim.beta1", "1"], "optim.beta1 = 1.0 must be in [0, 1)"),
    (["--draft.optim.lr=-1"], "draft.optim.lr = -1.0 must be at least 0"),
    (["--rl.clip_low", "1"], "rl.clip_low = 1.0 must be in [0, 1)"),
    (["--rl.minibatches", "17"], "rl.minibatches = 17 cannot exceed"),
    (["--warmup.draft_steps", "1"], "warmup.draft_steps = 1 cannot exceed warmup.steps = 0"),
    (["--eval.frozen_draft", "true"], "eval.frozen_draft = true needs eval.every > 0"),
    (["--eval.every", "1", "--data.eval_size", "0"], "eval.every > 0 needs data.eval_size > 0"),
    (["--data.source", "jsonl"], "data.source = 'jsonl' needs data.path"),
    (["--data.size", "4"], "data.size = 4 must be 0 or at least rollout.problems_per_step"),
    (["--run.name", "a/b"], "run.name = 'a/b' must be a plain folder name"),
    (["--run.name", "cache"], "and not 'cache'"),
    (["--parallel.dp_shard", "0"], "parallel.dp_shard = 0 must be -1 or at least 1"),
    (["--model.source", ""], "model.source is empty"),
]


@pytest.mark.parametrize(("argv", "message"), BAD_ARGUMENTS, ids=lambda x: " ".join(x)[:50])
def test_a_bad_argument_is_named_with_what_is_allowed(argv, message) -> None:
    with pytest.raises(ConfigError) as error:
        load(None, argv)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_no_draft_refuses_what_needs_one() -> None:
    for argv in (["--warmup.steps", "1", "--warmup.draft_steps", "1"], ["--eval.frozen_draft", "true"]):
        with pytest.raises(ConfigError, match=r"needs draft\.enabled = true"):
            load(None, ["--draft.enabled", "false", *argv])


def test_a_missing_file_says_where_the_shipped_ones_are() -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.toml: no such config file .*configs/"):
        load("nowhere.toml")


OLD_NAMES = [
    ("[tap]\ntimeout_s = 5", ["--tap.timeout_s=5"], "tap.timeout_s is called parallel.tap_timeout_s"),
    ("[balance]\ntail_weight = 2", ["--balance.tail-weight", "2"], "is called rollout.tail_weight since"),
    ("[draft]\nmin_tau = 1", ["--draft.min_tau=1"], "draft.min_tau is called guards.min_tau since"),
    ("[draft]\nplacement = 'last'", ["--draft.placement=last"], "is called parallel.draft_placement since"),
    ("[budget]\npolicy = 'das'", ["--budget.policy", "das"], "budget.policy is called budget.rule since"),
    (
        "[parallel]\nattention = 'passq'",
        ["--parallel.attention='passq'"],
        'parallel.attention = "passq" is called "query_ring" since',
    ),
    (
        "[rollout]\ndrafter = 'eagle3'",
        ["--rollout.drafter=eagle3"],
        'rollout.drafter = "eagle3" is called "model" since',
    ),
]


@pytest.mark.parametrize(("text", "argv", "message"), OLD_NAMES, ids=lambda x: str(x)[:30])
def test_an_old_name_is_refused_with_the_new_one(tmp_path, text, argv, message) -> None:
    path = tmp_path / "old.toml"
    path.write_text(text)
    for where, arguments in ((f"{path}: ", (path,)), ("command line: ", (None, argv))):
        with pytest.raises(ConfigError) as error:
            load(*arguments)
        assert str(error.value).startswith(where)
        assert message in str(error.value)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", [case[0] for case in OLD_NAMES], ids=lambda x: x[:30])
def test_a_run_of_before_is_read_with_its_old_names(tmp_path, text) -> None:
    path = tmp_path / "config.toml"
    path.write_text(text)
    old, default = load_recorded(path), Config()
    if "tap" in text:
        assert old.parallel.tap_timeout_s == 5.0
    changed = [a.name for a, b in zip(keys(old), keys(default)) if a.value != b.value]
    assert len(changed) == (text.partition("= ")[2] not in ("'last'", "'eagle3'"))  # those are the defaults


def test_the_reference_of_keys_is_current() -> None:
    text = (Path(__file__).parents[2] / "docs" / "config.md").read_text()
    assert text == render(), "the schema has changed: make docs"


def test_every_key_has_a_meaning_in_the_reference() -> None:
    assert [line for line in render().splitlines() if line.endswith("|  |")] == []


def test_bounds_read_and_hold_as_they_are_written() -> None:
    for bounds, text, inside, outside in (
        (Bounds(low=1), "at least 1", (1, 9), (0,)),
        (Bounds(above=0), "above 0", (0.1,), (0, -1)),
        (Bounds(above=0, high=1), "in (0, 1]", (0.1, 1), (0, 1.1)),
        (Bounds(low=0, below=1), "in [0, 1)", (0, 0.9), (1, -0.1)),
        (Bounds(low=0, high=1), "in [0, 1]", (0, 1), (-1, 2)),
        (Bounds(above=0, below=1), "in (0, 1)", (0.5,), (0, 1)),
    ):
        assert str(bounds) == text
        assert all(map(bounds.allow, inside))
        assert not any(map(bounds.allow, outside))


def test_every_default_is_within_its_bounds() -> None:
    assert [key.name for key in keys(Config()) if key.bounds and not key.bounds.allow(key.value)] == []


def test_what_may_change_on_resume_says_where_or_how_fast_not_what() -> None:
    free = {key.name for key in keys(Config()) if key.may_change}
    assert {name.partition(".")[0] for name in free} == {
        "run", "draft", "rollout", "train", "checkpoint", "guards", "parallel",
    }  # fmt: skip
    assert {name for name in free if name.startswith(("run", "draft", "rollout"))} == {
        "run.dir",
        "run.overwrite",
        "draft.loss_rows",
        "draft.row_block",
        "rollout.max_num_seqs",
        "rollout.kv_cache_gb",
        "rollout.gpu_memory_utilization",
        "rollout.sleep",
        "rollout.enforce_eager",
    }
