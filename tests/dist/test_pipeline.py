"""Pipelines against one rank: losses, gradients, taps and weights do not depend on the layout."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.dist.learning import build, fixed_rollouts, make_base, small_config
from tests.dist.worlds import run_world
from torchspec.config import Config, Parallel, TinyModel
from torchspec.mesh import Mesh
from torchspec.metrics import Meter

pytestmark = pytest.mark.dist

TINY = TinyModel(dim=32, layers=8, heads=4, kv_heads=2, head_dim=8, ffn_dim=48, tied=False)


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return make_base(tmp_path_factory.mktemp("base") / "tiny", TINY)


def config_of(parallel: Parallel, **overrides) -> Config:
    config = small_config(train__pack_tokens=40, **overrides)
    config.draft.aux_layers = [2, 4, 5]
    config.parallel = parallel
    return config


def one_update(mesh: Mesh, base: Path, config: Config) -> dict:
    learner, seen = build(mesh, base, config)
    mine = [r for r in fixed_rollouts(8) if int(r.problem_id[1:]) % mesh.world_size == mesh.rank]
    mine = mesh.gather_replica(mine)
    meter = Meter()
    learner.reinforce(mine, meter, True)
    return {"metrics": meter.reduce(mesh), **seen}

def test_x(base, tmp_path):
    for i, (world, par) in enumerate([(1, Parallel()), (2, Parallel(pp=2)), (2, Parallel(pp=2, schedule="ZBVZeroBubble"))]):
        (tmp_path / str(i)).mkdir()
        r = run_world(world, one_update, tmp_path / str(i), base, config_of(par), parallel=par, timeout_s=100)
        print({k: v for k, v in r[0]["metrics"].items()})
        if i == 0: single = r[0]
        for rank in r:
            for model in ("policy", "draft"):
                for name, g in rank[model].items():
                    want = single[model][name]
                    err = (g - want).abs().max() / want.abs().max()
                    if err > 1e-5: print(i, model, name, err)
            print(len(rank["policy"]), len(rank["draft"]))
