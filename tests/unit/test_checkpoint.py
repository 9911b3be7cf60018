"""Checkpoints: complete or not there, and everything in them comes back."""

from __future__ import annotations

import errno
import json
import logging
import random
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from torchspec.checkpoint.checkpoint import Checkpoints, Saved, damage, newest, restore, tensors_of
from torchspec.config.schema import Checkpoint, Optim, Parallel
from torchspec.distributed.mesh import Mesh
from torchspec.errors import ConfigError, GuardStop
from torchspec.rollout.seeding import reseed
from torchspec.training.optim import ModelOptimizer

LRS = {"policy": 1e-3, "draft": 5e-2}


class Bag:
    """A component."""

    def __init__(self, **state: Any) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


@pytest.fixture
def mesh() -> Iterator[Mesh]:
    mesh = Mesh(Parallel(), device="cpu")
    yield mesh
    mesh.close()


def models(seed: int, width: int = 6) -> dict[str, ModelOptimizer]:
    """Two small models; the draft has a buffer."""
    torch.manual_seed(seed)
    found = {}
    for name, lr in LRS.items():
        model = nn.Sequential(nn.Linear(width, 4), nn.LayerNorm(4))
        if name == "draft":
            model.register_buffer("d2t", torch.randint(0, 99, (4,)))
        optim = Optim(lr=lr, schedule="linear", warmup_steps=2, weight_decay=0.1)
        found[name] = ModelOptimizer(name, model, optim, total_steps=20)
    return found


def learn(optimizers: dict[str, ModelOptimizer], steps: range) -> None:
    for step in steps:
        for optimizer in optimizers.values():
            generator = torch.Generator().manual_seed(step)
            width = next(optimizer.model.parameters()).shape[1]
            optimizer.model(torch.randn(8, width, generator=generator)).pow(2)[:, 1:].sum().backward()
            optimizer.step()


def content(optimizers: dict[str, ModelOptimizer]) -> dict[str, torch.Tensor]:
    return {name: x.detach().clone() for name, x in tensors_of(optimizers).items()}


def save(folder: Path, mesh: Mesh, steps: list[int], bag: Bag | None = None, **settings: Any) -> None:
    """Checkpoints of the first of `models` after each of `steps`; step n scores n % 5."""
    checkpoints = Checkpoints(folder, mesh, Checkpoint(**settings))
    optimizers = models(seed=1)
    done = 0
    for step in steps:
        learn(optimizers, range(done, step))
        done = step
        facts = {"step": step, "scores": {"reward": step % 5, "tau": None}}
        checkpoints.save(facts, optimizers, {"bag": (bag or Bag(step=step)).state_dict()})
    checkpoints.close()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def found(folder: Path) -> Saved:
    saved = newest(folder)
    assert saved
    return saved


@pytest.mark.parametrize("background", [True, False])
def test_going_on_from_a_checkpoint_is_never_having_stopped(tmp_path, mesh, background) -> None:
    """Bitwise; what the models do while a checkpoint is written in the background is not in it."""
    whole = models(seed=1)
    checkpoints = Checkpoints(tmp_path, mesh, Checkpoint(background=background))
    learn(whole, range(5))
    state = {"a": [1, 2.5, None], "t": torch.arange(3), "n": {"x": np.arange(4, dtype=np.int32), "s": "é"}}
    checkpoints.save({"step": 5}, whole, {"bag": Bag(**state).state_dict()})
    learn(whole, range(5, 10))
    checkpoints.close()

    resumed, bag = models(seed=2), Bag()
    restore(found(tmp_path), mesh, resumed, {"bag": bag})
    assert {name: o.updates for name, o in resumed.items()} == {"policy": 5, "draft": 5}
    learn(resumed, range(5, 10))
    want, got = content(whole), content(resumed)
    assert got.keys() == want.keys()
    assert len(got) == 4 + 8 + 4 + 8 + 1
    assert all(torch.equal(got[name], want[name]) for name in want)
    assert bag.state["a"] == [1, 2.5, None]
    assert bag.state["n"]["s"] == "é"
    assert torch.equal(bag.state["t"], state["t"])
    assert bag.state["n"]["x"].tolist() == [0, 1, 2, 3]


def test_each_model_goes_on_at_its_own_learning_rate(tmp_path, mesh) -> None:
    save(tmp_path, mesh, [7])
    resumed = models(seed=2)
    restore(found(tmp_path), mesh, resumed, {"bag": Bag()})
    for name, optimizer in resumed.items():
        want = LRS[name] * (1 - 5 / 18)  # step 7 of 20, 2 of them warm-up
        assert optimizer.lr == pytest.approx(want)
        assert [group["lr"] for group in optimizer.optimizer.param_groups] == [pytest.approx(want)]


def test_a_model_that_never_learned_has_no_moments(tmp_path, mesh) -> None:
    optimizers = models(seed=1)
    learn({"policy": optimizers["policy"]}, range(3))
    checkpoints = Checkpoints(tmp_path, mesh, Checkpoint())
    checkpoints.save({"step": 3}, optimizers, {})
    checkpoints.close()
    resumed = models(seed=2)
    restore(found(tmp_path), mesh, resumed, {})
    assert resumed["draft"].updates == 0
    assert not resumed["draft"].moments()


def test_nothing_in_a_checkpoint_is_a_pickle(tmp_path, mesh) -> None:
    save(tmp_path, mesh, [1])
    files = names(tmp_path / "step-000001")
    assert files == [
        "manifest.json",
        "rank-00000.safetensors",
        "shard-00001-model-00001-of-00001.safetensors",
    ]
    assert json.loads((tmp_path / "step-000001" / "manifest.json").read_text())["files"].keys() == set(
        files[1:]
    )


def test_the_newest_and_the_best_are_kept(tmp_path, mesh) -> None:
    save(tmp_path / "last", mesh, list(range(1, 8)), keep_last=3)
    assert names(tmp_path / "last") == ["step-000005", "step-000006", "step-000007"]
    save(tmp_path / "best", mesh, list(range(1, 8)), keep_last=1, keep_best=2)
    assert names(tmp_path / "best") == ["step-000003", "step-000004", "step-000007"]
    save(tmp_path / "tau", mesh, [1, 2, 3], keep_last=1, keep_best=2, best="tau")  # not measured
    assert names(tmp_path / "tau") == ["step-000003"]


def flip_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


SHARD = "shard-00001-model-00001-of-00001.safetensors"
DAMAGES = [
    (SHARD, flip_a_byte, "has another checksum"),
    (SHARD, truncate, r"has \d+ bytes, \d+ were written"),
    (SHARD, Path.unlink, "is missing"),
    ("rank-00000.safetensors", flip_a_byte, "has another checksum"),
    ("rank-00000.safetensors", Path.unlink, "is missing"),
    ("manifest.json", Path.unlink, "no usable manifest.json"),
    ("manifest.json", truncate, "no usable manifest.json"),
    ("manifest.json", lambda path: path.write_text("{}"), "no usable manifest.json"),
]


@pytest.mark.parametrize(("file", "harm", "reason"), DAMAGES, ids=[f"{d[0][:6]} {d[2]}" for d in DAMAGES])
def test_a_damaged_checkpoint_is_passed_over_by_name(tmp_path, mesh, caplog, file, harm, reason) -> None:
    save(tmp_path, mesh, [1, 2])
    harm(tmp_path / "step-000002" / file)
    with caplog.at_level(logging.WARNING):
        assert found(tmp_path).step == 1
    (message,) = [r.getMessage() for r in caplog.records if r.name == "torchspec.checkpoint.checkpoint"]
    assert f"{tmp_path / 'step-000002'} is damaged and not used" in message
    assert damage(tmp_path / "step-000001") is None
    harm(tmp_path / "step-000001" / file)
    with pytest.raises(ConfigError, match=rf"no checkpoint is intact \(step-000002: .*{reason}"):
        newest(tmp_path)
    # A run that goes on from elsewhere replaces it.
    save(tmp_path, mesh, [2])
    assert found(tmp_path).step == 2


def test_a_checkpoint_of_another_version_is_not_passed_over(tmp_path, mesh) -> None:
    save(tmp_path, mesh, [1, 2])
    path = tmp_path / "step-000002" / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 1}))
    with pytest.raises(
        ConfigError, match=r"step-000002 has format 1, this version of torchspec reads format 2; go"
    ):
        newest(tmp_path)


@pytest.mark.parametrize("settings", [{}, {"keep_best": 1}], ids=["keep_last", "keep_best"])
def test_damaged_checkpoints_never_take_the_place_of_a_good_one(tmp_path, mesh, settings) -> None:
    save(tmp_path, mesh, [1, 4, 5], keep_last=3)
    truncate(tmp_path / "step-000004" / "manifest.json")
    truncate(tmp_path / "step-000005" / "manifest.json")
    save(tmp_path, mesh, [2], keep_last=1, **settings)  # a run that went on from step 1
    assert found(tmp_path).step == 2


def test_a_half_written_one_is_never_chosen(tmp_path, mesh, caplog) -> None:
    assert newest(tmp_path / "nothing") is None
    save(tmp_path, mesh, [1, 2])
    (tmp_path / "step-000002").rename(tmp_path / ".step-000002.partial")
    with caplog.at_level(logging.WARNING):
        assert found(tmp_path).step == 1
    assert "never completed" in caplog.text
    save(tmp_path, mesh, [2])
    assert names(tmp_path) == ["step-000001", "step-000002"]


def test_a_checkpoint_of_other_models_is_refused(tmp_path, mesh) -> None:
    save(tmp_path, mesh, [1])
    saved, bag = found(tmp_path), {"bag": Bag()}
    with pytest.raises(ConfigError, match="holds policy and draft, this run trains policy; restore draft"):
        restore(saved, mesh, {"policy": models(seed=2)["policy"]}, bag)
    with pytest.raises(
        ConfigError, match=r"policy.model.0.weight has shape \[4, 6\], this run's model \[4, 7\]"
    ):
        restore(saved, mesh, models(seed=2, width=7), bag)
    deeper = models(seed=2)
    deeper["policy"].model.append(nn.Linear(4, 4))
    with pytest.raises(ConfigError, match=r"has no policy\.model\.2\.weight"):
        restore(saved, mesh, deeper, bag)
    with pytest.raises(ConfigError, match="has no state of suffix"):
        restore(saved, mesh, models(seed=2), {"suffix": Bag()})


def test_a_failed_save_raises_and_leaves_the_others(tmp_path, mesh, monkeypatch) -> None:
    save(tmp_path, mesh, [1])

    def full_disk(*_args: object, **_kwargs: object) -> None:
        raise OSError("No space left on device")

    checkpoints = Checkpoints(tmp_path, mesh, Checkpoint())
    for part in ("_sums", "write_state"):
        monkeypatch.setattr(f"torchspec.checkpoint.checkpoint.{part}", full_disk)
        checkpoints.save({"step": 2}, models(seed=1), {})
        with pytest.raises(OSError, match="No space left"):
            checkpoints.wait()
        monkeypatch.undo()
    assert found(tmp_path).step == 1


def test_every_generator_follows_from_seed_step_rank_and_use() -> None:
    def draws(*key: Any) -> tuple[float, ...]:
        reseed(*key)
        return random.random(), float(np.random.random()), torch.rand(()).item()

    keys = [
        (0, 1, 0, "rollout"),
        (1, 1, 0, "rollout"),
        (0, 2, 0, "rollout"),
        (0, 1, 1, "rollout"),
        (0, 1, 0, "eval"),
    ]
    first = [draws(*key) for key in keys]
    assert [draws(*key) for key in keys] == first
    assert all(len(set(column)) == len(keys) for column in zip(*first))


INSTANTS = 60


def test_killed_at_any_instant_the_newest_complete_checkpoint_is_found_and_loads(tmp_path, mesh) -> None:
    """kill -9 at 30 random instants and 30 chosen ones of saves that follow each other without pause.

    The killed processes are forks of one that has everything imported; each goes on from what the one before
    left. After each kill all that was announced as complete must be found, and load.
    """
    harness = Path(__file__).with_name("kill_saver.py")
    subprocess.run([sys.executable, harness, tmp_path, str(INSTANTS)], check=True, timeout=120)
    report = json.loads((tmp_path / "report.json").read_text())
    assert len(report) == INSTANTS
    assert all(row["found"] >= row["announced"] for row in report), report
    assert all(row["loads"] for row in report), report
    # The instants were those of saves: many folders were half-written, and the run got on all the same.
    assert sum(row["partial"] for row in report) >= INSTANTS // 4
    assert report[-1]["found"] > INSTANTS // 2


@pytest.mark.parametrize("background", [True, False])
@pytest.mark.parametrize("part", ["write_state", "_sums", "_sync", "_remove", "json.dump", "dcp.async_save"])
def test_a_full_disk_is_one_line_with_the_step_that_is_safe(
    tmp_path, mesh, monkeypatch, part, background
) -> None:
    folder = tmp_path / "run" / "checkpoints"
    save(folder, mesh, [1])
    checkpoints, optimizers = Checkpoints(folder, mesh, Checkpoint(background=background)), models(seed=1)

    def full(*_: Any, **__: Any) -> Any:
        error = CheckpointException("write", {0: (OSError(errno.ENOSPC, "x"), None)})  # pyrefly: ignore
        if part != "dcp.async_save":
            raise OSError(errno.ENOSPC, "x")
        failed: Future[Any] = Future()
        failed.set_exception(error)
        return failed

    def attempt() -> None:
        checkpoints.save({"step": 2}, optimizers, {})
        checkpoints.wait()

    with monkeypatch.context() as patch:
        patch.setattr(f"torchspec.checkpoint.checkpoint.{part}", full)
        with pytest.raises(GuardStop) as stop:
            attempt()
    text = f"{folder}/step-000002: No space left on device; all is safe up to {folder}/step-000001; "
    assert str(stop.value).startswith(text)
    assert "\n" not in str(stop.value)
    assert names(folder) == ["step-000001"]
    checkpoints.save({"step": 2}, optimizers, {})  # there is room again
    checkpoints.close()
    assert found(folder).step == 2
