"""A checkpoint of one layout goes on in another: more or fewer ranks, a pipeline."""

from __future__ import annotations

import dataclasses
import itertools
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.dist.learning import TINY, build, fixed_rollouts, full, make_base, small_config
from tests.dist.worlds import run_world
from torchspec.checkpoint.checkpoint import Checkpoints, newest, restore, tensors_of
from torchspec.config.schema import Checkpoint, Parallel
from torchspec.distributed.mesh import Mesh
from torchspec.metrics.meter import Meter

pytestmark = pytest.mark.dist

COMMON = torch.arange(5000)


class Owner:
    """A component whose state differs from rank to rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def state_dict(self) -> dict[str, Any]:
        return {"rank": self.rank, "window": torch.arange(self.rank + 3), "common": COMMON}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rank = state["rank"]
        assert torch.equal(state["window"], torch.arange(self.rank + 3))
        assert torch.equal(state["common"], COMMON)


def resume(mesh: Mesh, base: Path, folder: Path, steps: int) -> dict[str, Any]:
    """Resume from `folder` if there is something, make steps, save; metrics by step and all tensors at the end."""
    config = small_config(train__pack_tokens=60)
    config.optim.lr, config.draft.optim.lr = 1e-3, 5e-2
    learner, _ = build(mesh, base, config)
    for optimizer in learner.optimizers.values():
        del optimizer.clip, optimizer.step  # doubles that make no step
    saved, owner = newest(folder), Owner(mesh.rank)
    done = 0
    if saved:
        restore(saved, mesh, learner.optimizers, {"owner": owner})
        done = saved.step
    checkpoints = Checkpoints(folder, mesh, Checkpoint())
    mine = [r for r in fixed_rollouts() if int(r.problem_id[1:]) % mesh.world_size == mesh.rank]
    metrics = {}
    for step in range(done + 1, done + steps + 1):
        meter = Meter()
        learner.reinforce(mine, meter, train_draft=True)
        metrics[step] = {k: v for k, v in meter.reduce(mesh).items() if not k.startswith("perf/")}
    checkpoints.save({"step": done + steps}, learner.optimizers, {"owner": Owner(mesh.rank).state_dict()})
    checkpoints.close()
    tensors = {name: full(x) for name, x in tensors_of(learner.optimizers).items()}
    return {"metrics": metrics, "tensors": tensors, "owner": owner.rank}


def two_ranks(mesh: Mesh, base: Path, root: Path) -> list[dict[str, Any]]:
    """Five steps without a break; two; and, once others have made the third and the fourth, the fifth."""
    whole, first = resume(mesh, base, root / "whole", 5), resume(mesh, base, root / "parts", 2)
    wait_for(root / "parts" / "step-000004")
    return [whole, first, resume(mesh, base, root / "parts", 1)]


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 300
    while not path.exists():
        assert time.monotonic() < deadline, f"no {path}"
        time.sleep(0.1)


def test_two_ranks_one_a_pipeline_and_two_again_are_two_all_along(tmp_path) -> None:
    base = make_base(tmp_path / "base", dataclasses.replace(TINY, tied=False, layers=4))
    world, stages, root = tmp_path / "world", tmp_path / "stages", tmp_path / "checkpoints"
    world.mkdir()
    stages.mkdir()
    with ThreadPoolExecutor() as pool:
        pair = pool.submit(run_world, 2, two_ranks, world, base, root)
        while not (root / "parts" / "step-000002").exists() and not pair.done():
            time.sleep(0.1)
        alone = Mesh(Parallel(), device="cpu")
        second = resume(alone, base, root / "parts", 1)
        alone.close()
        piped, _ = run_world(2, resume, stages, base, root / "parts", 1, parallel=Parallel(pp=2))
        (whole, first, third), (_, other_first, other_third) = pair.result()
    found = first["metrics"] | second["metrics"] | piped["metrics"] | third["metrics"]
    assert found.keys() == whole["metrics"].keys() == {1, 2, 3, 4, 5}
    for step, metrics in whole["metrics"].items():
        assert found[step].keys() == metrics.keys()
        for name, value in metrics.items():
            tolerance = {"rel": 1e-6, "abs": 0.0} if name.endswith("/loss") else {"rel": 1e-5, "abs": 1e-6}
            assert found[step][name] == pytest.approx(value, **tolerance), (step, name)
    losses = [metrics["draft/loss"] for metrics in whole["metrics"].values()]
    assert all(abs(a - b) > 1e-4 for a, b in itertools.pairwise(losses)), losses
    assert third["tensors"].keys() == whole["tensors"].keys()
    for name, want in whole["tensors"].items():
        torch.testing.assert_close(third["tensors"][name], want, rtol=1e-4, atol=1e-5, msg=name)
    sizes = [(root / "whole" / "step-000005" / f"rank-0000{r}.safetensors").stat().st_size for r in (0, 1)]
    assert sizes[0] > COMMON.nbytes > sizes[1], "what all ranks hold is written once"
    # A rank takes the state of its own number, or of that modulo the earlier number of ranks.
    owners = [r["owner"] for r in (first, other_first, second, piped, third, other_third)]
    assert owners == [0, 1, 0, 0, 0, 1]
