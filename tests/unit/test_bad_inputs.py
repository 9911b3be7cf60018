"""Whatever a user can get wrong: one line that names the place and the remedy, and nothing left behind."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from torchspec.checkpoint.checkpoint import Checkpoints, newest, restore
from torchspec.checkpoint.run_folder import create_run_folder, find_run
from torchspec.commands.dry_run import report
from torchspec.commands.export import export_run
from torchspec.commands.main import main
from torchspec.config.load import load
from torchspec.config.schema import Checkpoint, Config, Data, Optim, Parallel, TinyModel
from torchspec.data.problems import load_problems
from torchspec.data.prompts import encode_prompts
from torchspec.data.sampler import ProblemOrder
from torchspec.data.tokenizer import load_tokenizer
from torchspec.distributed.mesh import Mesh
from torchspec.drafts.base import Verifier
from torchspec.drafts.build import check_draft, draft_spec, load_draft
from torchspec.drafts.eagle3.checkpoint import config_json
from torchspec.drafts.eagle3.model import Eagle3
from torchspec.errors import ConfigError
from torchspec.models.hf import load_hf
from torchspec.models.policy import Policy
from torchspec.models.spec import PolicySpec
from torchspec.models.tiny import make_tiny
from torchspec.records import Problem, Rollout
from torchspec.rewards.scorer import build_scorer
from torchspec.rollout.files import read_rollouts
from torchspec.rollout.vllm.cpu_patches import check_head_dim
from torchspec.training.optim import ModelOptimizer

SHAPE = TinyModel(dim=64, layers=3, heads=2, kv_heads=1, head_dim=32, ffn_dim=64)


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """A policy folder."""
    folder = tmp_path_factory.mktemp("base") / "policy"
    make_tiny(folder, SHAPE, max_len=64, seed=0)
    return folder


@pytest.fixture(scope="module")
def draft(tmp_path_factory, base) -> Path:
    """A draft for it, in the eagle3 layout."""
    folder = tmp_path_factory.mktemp("draft")
    spec = draft_spec(with_draft("random"), PolicySpec.from_hf(base))
    save_file(dict(Eagle3(spec).hf_weights()), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(spec.hf_config()))
    return folder


def with_draft(init: str | Path) -> Config:
    config = Config()
    config.draft.init, config.draft.aux_layers = str(init), [1, 2, 3]
    config.model.max_len = 64
    return config


@dataclasses.dataclass
class Place:
    """What a case has to spoil."""

    root: Path
    base: Path
    draft: Path

    def file(self, content: str | bytes, name: str = "data.jsonl") -> Path:
        path = self.root / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    def copy(self, which: str, **changes: Any) -> Path:
        """A copy of the policy or the draft, with changes to config.json; None removes a key."""
        folder = self.root / which
        shutil.copytree(getattr(self, which), folder)
        path = folder / "config.json"
        config = json.loads(path.read_text()) | changes
        path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
        return folder

    def weights(self, which: str, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
        folder = self.copy(which)
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")
        return folder


@pytest.fixture
def place(tmp_path, base, draft) -> Place:
    return Place(tmp_path, base, draft)


def arguments(*argv: str) -> Callable[[Place], object]:
    return lambda _: load(None, argv)


def toml(text: str) -> Callable[[Place], object]:
    return lambda place: load(place.file(text, "run.toml"))


def data(content: str | bytes, **options: Any) -> Callable[[Place], object]:
    def read(place: Place) -> object:
        path = place.file(content)
        return load_problems(Data(**{"source": "jsonl", "path": str(path), "eval_size": 0, **options}))

    return read


def generated(**options: Any) -> Callable[[Place], object]:
    return lambda _: load_problems(Data(**{"size": 4, "eval_size": 0, **options}))


def policy(**changes: Any) -> Callable[[Place], object]:
    return lambda place: PolicySpec.from_hf(place.copy("base", **changes))


def policy_weights(change: Callable[[dict[str, torch.Tensor]], None]) -> Callable[[Place], object]:
    return lambda p: load_hf(Policy(PolicySpec.from_hf(p.base)), p.weights("base", change))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:100])


def unreadable_policy(place: Place) -> None:
    folder = place.copy("base")
    cut(folder / "model.safetensors")
    load_hf(Policy(PolicySpec.from_hf(folder)), folder)


def broken_json(place: Place) -> None:
    folder = place.copy("base")
    cut(folder / "config.json")
    PolicySpec.from_hf(folder)


def tokenizer(spoil: Callable[[dict[str, Any]], None], file: str = "tokenizer_config.json") -> Callable:
    def read(place: Place) -> None:
        folder = place.copy("base")
        path = folder / file
        content = json.loads(path.read_text())
        spoil(content)
        path.write_text(json.dumps(content))
        encoder = load_tokenizer(folder, PolicySpec.from_hf(folder))
        encode_prompts(encoder, [Problem(id="p1", messages=[{"role": "user", "content": "x"}])], 9)

    return read


def no_template(place: Place) -> None:
    folder = place.copy("base")
    (folder / "chat_template.jinja").unlink()
    tokenizer_ = load_tokenizer(folder, PolicySpec.from_hf(folder))
    encode_prompts(tokenizer_, [Problem(id="p1", messages=[{"role": "user", "content": "x"}])], 9)


def prompts(text: str) -> Callable[[Place], object]:
    def encode(place: Place) -> None:
        encoder = load_tokenizer(place.base, PolicySpec.from_hf(place.base))
        encode_prompts(encoder, [Problem(id="p7", messages=[{"role": "user", "content": text}])], 20)

    return encode


def draft_config(**changes: Any) -> Callable[[Place], object]:
    return lambda p: draft_spec(with_draft(p.copy("draft", **changes)), PolicySpec.from_hf(p.base))


def speculators(**changes: Any) -> Callable[[Place], object]:
    def read(place: Place) -> None:
        spec = draft_spec(with_draft("random"), PolicySpec.from_hf(place.base))
        config = (
            config_json(spec, "speculators", Verifier("p", "Qwen3ForCausalLM", 4, torch.zeros(0))) | changes
        )
        config = {key: value for key, value in config.items() if value is not None}
        (place.root / "config.json").write_text(json.dumps(config))
        draft_spec(with_draft(place.root), PolicySpec.from_hf(place.base))

    return read


def draft_weights(change: Callable[[dict[str, torch.Tensor]], None]) -> Callable[[Place], object]:
    def read(place: Place) -> None:
        folder = place.weights("draft", change)
        config = with_draft(folder)
        spec = draft_spec(config, PolicySpec.from_hf(place.base))
        check_draft(config, place.base)
        load_draft(Eagle3(spec), folder)

    return read


def reward(value: float) -> Callable[[Place], object]:
    def score(place: Place) -> None:
        module = f"bad_reward_{abs(hash(str(value)))}"
        (place.root / f"{module}.py").write_text(f"def f(problem, response):\n    return {value!r}\n")
        sys.path.insert(0, str(place.root))
        config = Config()
        config.reward.functions = [f"{module}.f"]
        try:
            source = (place.root / f"{module}.py").read_text().replace("nan", "float('nan')")
            (place.root / f"{module}.py").write_text(source.replace("return inf", "return float('inf')"))
            scorer = build_scorer(config.reward, config.data)
            scorer.score(Problem(id="p3", messages=[]), "x")
        finally:
            sys.path.remove(str(place.root))

    return score


def rewards(**options: Any) -> Callable[[Place], object]:
    def build(_: Place) -> None:
        config = Config()
        for name, value in options.items():
            setattr(config.reward, name, value)
        scorer = build_scorer(config.reward, config.data)
        scorer.check_answers([Problem(id="p3", messages=[])])

    return build


def saved(spoil: Callable[[Path], object], width: int = 4) -> Callable[[Place], object]:
    """Two checkpoints, both spoiled, and loaded into models of `width`."""

    def models(size: int) -> dict[str, ModelOptimizer]:
        return {"policy": ModelOptimizer("policy", torch.nn.Linear(size, 3), Optim(), 9)}

    def resume(place: Place) -> None:
        mesh = Mesh(Parallel(), device="cpu")
        try:
            checkpoints = Checkpoints(place.root, mesh, Checkpoint())
            for step in (1, 2):
                checkpoints.save({"step": step}, models(4), {})
            checkpoints.close()
            for folder in place.root.glob("step-*"):
                spoil(folder)
            found = newest(place.root)
            assert found
            restore(found, mesh, models(width), {})
        finally:
            mesh.close()

    return resume


def flip(folder: Path) -> None:
    (path,) = folder.glob("shard-*")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def other_problems(_: Place) -> None:
    def order(text: str) -> ProblemOrder:
        return ProblemOrder([Problem(id="p", messages=[{"role": "user", "content": text}])], seed=0)

    order("b").load_state_dict(order("a").state_dict())


def other_config(place: Place) -> None:
    config = Config()
    config.run.dir = str(place.root)
    create_run_folder(config, place.root / "run")
    config.rollout.temperature = 0.5
    find_run(config)


def export(name: str = "run", layout: str = "speculators", exists: bool = False) -> Callable[[Place], object]:
    def run(place: Place) -> None:
        config = Config()
        config.run.dir = str(place.root)
        create_run_folder(config, place.root / "run")
        config.run.name = name
        if exists:
            (place.root / "out").mkdir()
        export_run(config, place.root / "out", layout)

    return run


def recorded(**changes: Any) -> Callable[[Place], object]:
    def read(place: Place) -> None:
        rollout = Rollout(
            problem_id="p",
            sample=0,
            prompt_tokens=[1],
            tokens=[2],
            logprobs=[-1.0],
            finish="stop",
            policy_version=0,
            draft_version=0,
        )
        read_rollouts(place.file(json.dumps(dataclasses.asdict(rollout) | changes)))

    return read


def head_dim(_: Place) -> None:
    check_head_dim(16)


def drop(*names: str) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda tensors: [tensors.pop(name) for name in names] and None


def set_to(name: str, *shape: int) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda tensors: tensors.update({name: torch.zeros(shape)})


LINE = json.dumps({"prompt": "q", "answer": "a"})
CASES: list[tuple[str, Callable[[Place], object], str]] = [
    # config: keys, types, values, combinations
    (
        "key",
        toml("[optim]\nlearning_rate = 1"),
        r"run\.toml: unknown key optim\.learning_rate; valid keys here",
    ),
    ("section", toml("[guard]\nmax_kl = 1"), r"unknown key guard; did you mean guards\?"),
    ("not toml", toml("[run\n"), r"run\.toml: not valid TOML"),
    ("not utf-8", lambda p: load(p.file(b"\xff\xfe", "run.toml")), r"run\.toml: not valid TOML"),
    ("no file", lambda p: load(p.root / "x.toml"), r"x\.toml: no such config file .*configs/"),
    ("type", toml("[run]\nsteps = '9'"), r"run\.steps must be int, got str '9'"),
    ("choice", arguments("--checkpoint.best=loss"), r"checkpoint\.best = 'loss' .*one of: reward, tau"),
    ("keep none", arguments("--checkpoint.keep_last=0"), r"checkpoint\.keep_last = 0 must be at least 1"),
    ("every", arguments("--checkpoint.every=-1"), r"checkpoint\.every = -1 must be at least 0"),
    ("patience", arguments("--guards.patience=0"), r"guards\.patience = 0 must be at least 1"),
    ("max_kl", arguments("--guards.max_kl=-1"), r"guards\.max_kl = -1\.0 must be at least 0"),
    ("min_tau", arguments("--guards.min_tau=-1"), r"guards\.min_tau = -1\.0 must be at least 0"),
    ("nan", arguments("--optim.lr=nan"), r"optim\.lr = nan must be a finite number"),
    ("inf", arguments("--draft.optim.lr=inf"), r"draft\.optim\.lr = inf must be a finite number"),
    ("inf weight", arguments("--reward.weights=[inf]"), r"reward\.weights = inf must be a finite number"),
    ("eps", arguments("--optim.eps=0"), r"optim\.eps = 0\.0 must be above 0"),
    ("tau needs draft", arguments("--draft.enabled=false", "--checkpoint.best=tau"), r"needs draft\.enabled"),
    ("run.name", arguments("--run.name=a/b"), r"run\.name = 'a/b' must be a plain folder name"),
    ("no value", arguments("--run.steps"), r"--run\.steps needs a value"),
    ("greedy", arguments("--rollout.temperature=0"), r"rollout\.temperature = 0\.0 must be above 0"),
    ("no room", arguments("--rollout.max_new_tokens=512"), r"leaves no room for a prompt in model\.max_len"),
    (
        "world",
        lambda _: report(load(None, ["--parallel.cp=3"]), "4"),
        r"need a multiple of 3 ranks.*\[parallel\]",
    ),
    ("head_dim", head_dim, r"head_dim = 16 .*32, 64"),
    # data
    (
        "missing file",
        lambda p: load_problems(Data(source="jsonl", path=f"{p.root}/x")),
        r"no such file \(data\.path",
    ),
    ("no problems", data("\n\n"), r"data\.jsonl: no problems in it"),
    ("not json", data(LINE + "\n{'a': 1}"), r"data\.jsonl:2: not a JSON line"),
    ("bad bytes", data(LINE.encode() + b"\n\xff"), r"data\.jsonl:2: not a JSON line"),
    ("no object", data("[1]"), r"data\.jsonl:1: must be a JSON object, got list"),
    (
        "no field",
        data('{"q": "x"}'),
        r'data\.jsonl:1: no field "prompt" \(data\.prompt_key\); fields here: q',
    ),
    ("empty prompt", data('{"prompt": ""}'), r'data\.jsonl:1: "prompt" must be a text .* not empty'),
    (
        "role",
        data('{"prompt": [{"role": "bot", "content": "x"}]}'),
        r'"prompt"\[0\] must be .*system \| user',
    ),
    ("answer", data('{"prompt": "x", "answer": [1]}'), r'"answer" must be a string or a number, got \[1\]'),
    (
        "ids",
        data('{"prompt": "x", "i": 1}\n{"prompt": "y", "i": 1}', id_key="i"),
        r":2: id '1' is taken by .*:1",
    ),
    ("all held out", data(LINE, eval_size=1), r"data\.eval_size = 1 leaves nothing to train on.*lower it"),
    (
        "two systems",
        data('{"prompt": [{"role": "system", "content": "x"}]}', system_prompt="y"),
        r"set data\.system_p",
    ),
    ("parquet", data("PAR1", source="parquet"), r"data\.jsonl: not a Parquet file"),
    (
        "hf",
        lambda p: load_problems(Data(source="hf", path=f"{p.root}/x")),
        r"no data set folder \(data\.path\); write",
    ),
    ("task", generated(task="spel_backward"), r'is not a reasoning-gym task; did you mean "spell_backward"'),
    ("task_args", generated(task_args={"words": 3}), r"takes no 'words' here; it takes: "),
    (
        "impossible",
        generated(task_args={"min_word_len": 9, "max_word_len": 3}),
        r"data\.task_args: .*refuses",
    ),
    ("endless", generated(size=0), r"data\.size = 0 .*set a number"),
    (
        "long prompt",
        prompts("x" * 60),
        r"problem p7: its prompt has \d+ tokens, at most 20 fit; raise model\.max_len",
    ),
    ("odd text", prompts("é"), r"problem p7: the tokenizer refuses it"),
    # policy and tokenizer
    (
        "no config",
        lambda p: PolicySpec.from_hf(p.root),
        r"config\.json is missing; give a folder in Hugging Face",
    ),
    ("broken config", broken_json, r"config\.json: not valid JSON"),
    ("architecture", policy(architectures=["GPT2"]), r"architecture GPT2 is not supported; supported: Qwen3"),
    ("incomplete", policy(hidden_size=None), r"key 'hidden_size' is missing; is this a full checkpoint"),
    ("rope", policy(rope_parameters={"rope_type": "yarn", "rope_theta": 1e4}), r"RoPE scaling 'yarn' is not"),
    (
        "max_len",
        lambda p: PolicySpec.from_hf(p.base, 65),
        r"max_len = 65 .* 64 positions.*lower model\.max_len",
    ),
    ("lacking", policy_weights(drop("model.norm.weight")), r"the weights lack model\.norm\.weight"),
    ("unknown", policy_weights(set_to("model.x", 2)), r"the weights have unknown model\.x"),
    ("shape", policy_weights(set_to("model.norm.weight", 9)), r"norm\.weight has shape \[9\], but \[64\]"),
    ("cut", unreadable_policy, r"unreadable safetensors .*copy the checkpoint again"),
    (
        "no end",
        tokenizer(lambda c: c.pop("eos_token")),
        r"no end token; set eos_token in tokenizer_config\.json",
    ),
    ("vocabulary", policy(vocab_size=None), r"key 'vocab_size' is missing"),
    ("template", no_template, r"no chat template; use an instruction-tuned model"),
    # drafts
    (
        "draft folder",
        lambda p: draft_spec(with_draft("x"), PolicySpec.from_hf(p.base)),
        r"draft\.init: x/config\.json",
    ),
    ("other vocabulary", draft_config(vocab_size=200), r"vocab_size 200, the policy 104.*another policy"),
    ("width", draft_config(hidden_size=32, target_hidden_size=32), r"dim 32, the policy 64"),
    (
        "rope length",
        draft_config(max_position_embeddings=32),
        r"has 32 positions, model\.max_len is 64; lower it",
    ),
    ("layer ids", draft_config(eagle_aux_hidden_state_layer_ids=[1, 2, 9]), r"\[1, 2, 9\] .* from 0 to 3"),
    ("two layers", draft_config(num_hidden_layers=2), r"num_hidden_layers = 2; only 1 is supported"),
    ("no width", draft_config(intermediate_size=None), r"'intermediate_size' is missing"),
    ("algorithm", speculators(speculators_model_type="dflash"), r"= 'dflash'; only 'eagle3' is supported"),
    ("first norm", speculators(norm_before_fc=True), r"norm_before_fc = True; only False"),
    (
        "no layer",
        speculators(transformer_layer_config=None),
        r"transformer_layer_config is missing; is it a whole",
    ),
    ("draft lacks", draft_weights(drop("fc.weight")), r"the weights lack fc\.weight"),
    ("draft shape", draft_weights(set_to("norm.weight", 3)), r"norm\.weight has shape \[3\], but \[64\]"),
    (
        "embeddings",
        draft_weights(set_to("embed_tokens.weight", 104, 64)),
        r"embed_tokens\.weight .* not the policy's",
    ),
    # rewards
    ("nan reward", reward(math.nan), r"returned nan for problem p3; it must return a finite number"),
    ("inf reward", reward(math.inf), r"returned inf for problem p3; it must return a finite number"),
    ("unknown reward", rewards(functions=["exakt"]), r'reward\.functions: "exakt" is not one of exact'),
    ("no module", rewards(functions=["nowhere.f"]), r'cannot import "nowhere\.f".*PYTHONPATH'),
    ("no function", rewards(functions=["json.nothing"]), r"json has no function nothing"),
    ("pattern", rewards(answer_pattern="(x"), r"reward\.answer_pattern"),
    ("no group", rewards(answer_pattern="x"), r"reward\.answer_pattern needs a group"),
    ("weights", rewards(functions=["exact"], weights=[1.0, 2.0]), r"reward\.weights"),
    ("no answer", rewards(functions=["exact"]), r"problem p3: no answer, .*set data\.answer_key"),
    # checkpoints and what resumes from them
    ("flipped byte", saved(flip), r"no checkpoint is intact .*another checksum.*run\.name"),
    ("missing shard", saved(lambda f: next(f.glob("shard-*")).unlink()), r"shard-00001-.* is missing"),
    ("missing state", saved(lambda f: (f / "rank-00000.safetensors").unlink()), r"rank-00000.* is missing"),
    ("no manifest", saved(lambda f: (f / "manifest.json").unlink()), r"no usable manifest\.json"),
    (
        "other policy",
        saved(lambda _: None, width=5),
        r"shape \[3, 4\], this run's model \[3, 5\]; restore \[model\]",
    ),
    ("other problems", other_problems, r"cannot resume .*restore the \[data\] settings and files"),
    ("other config", other_config, r"rollout\.temperature \(1\.0 then, 0\.5 now\).*choose another run\.name"),
    # export and recorded rollouts
    ("no run", export(name="x"), r"--export: .*/x holds no run; give its run\.dir and run\.name"),
    ("no checkpoint", export(), r"has no checkpoint; set checkpoint\.every above 0"),
    ("layout", export(layout="onnx"), r"--export\.format 'onnx' is not allowed; one of: eagle3, speculators"),
    ("exists", export(exists=True), r"out exists already; remove it or choose another folder"),
    ("logprobs", recorded(logprobs=[]), r"data\.jsonl:1: 0 logprobs for 1 tokens"),
    ("tokens", recorded(tokens=["a"]), r"data\.jsonl:1: tokens is not a list of token ids"),
    ("finish", recorded(finish="eof"), r"finish is neither 'stop' nor 'length'"),
]


@pytest.mark.parametrize(("name", "run", "message"), CASES, ids=[case[0] for case in CASES])
def test_a_bad_input_is_named_with_place_and_remedy(place, capsys, name, run, message) -> None:
    before = {path for path in place.root.rglob("*") if path.name in ("policy", "out", "model.safetensors")}

    def command(_argv: list[str]) -> None:
        run(place)

    assert main(command, ["x"], "") == 2, "no ConfigError"
    said = capsys.readouterr().err
    (line,) = [line for line in said.splitlines() if line.startswith("error: ")]
    assert "Traceback" not in said
    assert re.search(message, line), line
    assert not (place.root / "out" / "policy").exists()
    assert before <= set(place.root.rglob("*"))


def test_there_are_enough_cases() -> None:
    assert len(CASES) >= 60
    assert len({case[0] for case in CASES}) == len(CASES)


def test_a_draft_and_a_policy_that_are_right_are_accepted(place) -> None:
    """The cases spoil something that works."""
    config, spec = with_draft(place.draft), PolicySpec.from_hf(place.base)
    check_draft(config, place.base)
    load_draft(Eagle3(draft_spec(config, spec)), place.draft)
    load_tokenizer(place.base, spec)
    read_rollouts_ok = recorded()
    read_rollouts_ok(place)
    with pytest.raises(ConfigError):
        data("")(place)
