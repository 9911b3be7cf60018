"""What becomes of an earlier run of the same name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from torchspec.checkpoint.run_folder import create_run_folder, dependencies, find_run, note, note_resumption
from torchspec.config.schema import Config
from torchspec.errors import ConfigError


@pytest.fixture
def config(tmp_path) -> Config:
    config = Config()
    config.run.dir = str(tmp_path)
    return config


def make(config: Config, finished: bool = False) -> Path:
    folder, resumes = find_run(config)
    assert not resumes
    create_run_folder(config, folder)
    if finished:
        note(folder, finished="now")
    return folder


def test_a_new_run_gets_a_folder_that_says_what_was_asked(config) -> None:
    folder = make(config)
    assert {p.name for p in folder.iterdir()} == {"config.toml", "run.json"}
    facts = json.loads((folder / "run.json").read_text())
    assert {"argv", "started", "commit", "python", "versions"} == facts.keys()


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_stopped_run_goes_on_with_the_same_command(config, overwrite) -> None:
    config.run.overwrite = overwrite
    folder = make(config)
    assert find_run(config) == (folder, True)
    config.checkpoint.every = 7
    config.parallel.dp_shard = 4
    config.train.pack_tokens = 99
    config.rollout.max_num_seqs = 3
    assert find_run(config) == (folder, True)
    note_resumption(config, folder, 40)
    assert json.loads((folder / "run.json").read_text())["resumed"][0]["step"] == 40
    assert "pack_tokens = 99" in (folder / "config.toml").read_text()


def test_another_config_is_refused_with_the_keys_that_differ(config) -> None:
    folder = make(config)
    config.optim.lr, config.data.task_args, config.data.size = 3e-4, {"min": 2}, 64
    with pytest.raises(ConfigError) as error:
        find_run(config)
    message = str(error.value)
    assert message.startswith(f"{folder} exists, and its config differs in ")
    assert "optim.lr (1e-06 then, 0.0003 now)" in message
    assert "data.task_args ({} then, {'min': 2} now)" in message
    assert "data.size (1024 then, 64 now)" in message
    assert message.endswith("choose another run.name, or set run.overwrite = true to replace it")
    config.run.overwrite = True
    assert find_run(config) == (folder, False)
    assert (folder / "config.toml").exists()  # until the new run can start


def test_more_steps_are_possible_unless_a_schedule_depends_on_their_number(config) -> None:
    folder = make(config, finished=True)
    (folder / "checkpoints" / "step-000100").mkdir(parents=True)
    with pytest.raises(ConfigError, match="its run is finished"):
        find_run(config)
    config.run.steps += 1
    assert find_run(config) == (folder, True)
    note_resumption(config, folder, 100)
    assert find_run(config) == (folder, True)
    config.draft.optim.schedule = "cosine"
    with pytest.raises(ConfigError, match=r"differs in draft\.optim\.schedule"):
        find_run(config)


def test_the_number_of_steps_is_part_of_a_cosine_schedule(config) -> None:
    config.optim.schedule = "cosine"
    make(config)
    config.run.steps += 1
    with pytest.raises(ConfigError, match=r"differs in run\.steps \(100 then, 101 now\)"):
        find_run(config)


def test_a_folder_that_is_no_run_is_left_alone(config, tmp_path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "precious").touch()
    with pytest.raises(ConfigError, match="it holds no run that could be resumed"):
        find_run(config)
    config.run.overwrite = True
    folder, resumes = find_run(config)
    assert not resumes
    create_run_folder(config, folder)
    assert not (folder / "precious").exists()


def test_what_a_run_without_a_checkpoint_has_made_is_not_replaced_unasked(config) -> None:
    folder = make(config)
    assert find_run(config) == (folder, True)  # killed before its first checkpoint: nothing to lose
    (folder / "failed").mkdir()
    with pytest.raises(ConfigError, match="no checkpoint to go on from, but the rollouts of a failed step"):
        find_run(config)
    (folder / "failed").rmdir()
    config.checkpoint.every = 0
    with pytest.raises(ConfigError, match="the steps of a run that saves none"):
        find_run(config)
    note(folder, finished="now")
    config.run.steps += 1
    with pytest.raises(ConfigError, match="what its finished run has exported"):
        find_run(config)
    (folder / "checkpoints" / "step-000100").mkdir(parents=True)
    assert find_run(config) == (folder, True)
    config.run.overwrite = True
    assert find_run(config) == (folder, True)


def depend(tmp_path, monkeypatch, source: str = "def f(problem, response): return 1.0") -> dict[str, str]:
    (tmp_path / "my_judge.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    return dependencies({"a": [1, 2], "b": [3]}, ["exact", "my_judge.f"])


JUDGE = r'the file of reward\.functions = "my_judge'
TOKENS = r"the tokens of the prompts \(data, tokenizer, chat template\)"
CHANGED = [
    ("a token", {"a": [1, 9], "b": [3]}, "my_judge.f", None, TOKENS),
    ("a longer prompt", {"a": [1, 2], "b": [3, 3]}, "my_judge.f", None, TOKENS),
    ("a border", {"a": [1], "b": [2, 3]}, "my_judge.f", None, TOKENS),
    ("a problem less", {"a": [1, 2]}, "my_judge.f", None, TOKENS),
    ("another id", {"a": [1, 2], "c": [3]}, "my_judge.f", None, TOKENS),
    ("the reward", {"a": [1, 2], "b": [3]}, "my_judge.f", "def f(problem, response): return 2.0", JUDGE),
    ("a comment", {"a": [1, 2], "b": [3]}, "my_judge.f", "def f(problem, response): return 1.0  # x", JUDGE),
]


@pytest.mark.parametrize(
    ("prompts", "function", "source", "message"), [c[1:] for c in CHANGED], ids=[c[0] for c in CHANGED]
)
def test_what_a_run_depends_on_is_compared(
    config, tmp_path, monkeypatch, prompts, function, source, message
) -> None:
    depends = depend(tmp_path, monkeypatch)
    assert len(depends) == 2
    folder, _ = find_run(config, depends)
    create_run_folder(config, folder, depends)
    assert find_run(config, dependencies({"b": [3], "a": [1, 2]}, ["exact", "my_judge.f"])) == (folder, True)
    if source:
        (tmp_path / "my_judge.py").write_text(source)
    with pytest.raises(ConfigError, match=f"what it depends on has changed since: {message}") as error:
        find_run(config, dependencies(prompts, ["exact", function]))
    assert "\n" not in str(error.value)
    config.run.overwrite = True
    assert find_run(config, dependencies(prompts, ["exact", function])) == (folder, False)


def test_a_run_that_recorded_no_dependencies_goes_on_and_records_them(config, tmp_path, monkeypatch) -> None:
    folder, depends = make(config), depend(tmp_path, monkeypatch)
    assert find_run(config, depends) == (folder, True)
    note_resumption(config, folder, 3, depends)
    with pytest.raises(ConfigError, match="tokens of the prompts"):
        find_run(config, dependencies({"a": [7]}, ["exact", "my_judge:f"]))
