"""Whole steps of the real policy and draft over pipelines: equal to one rank's in fp64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.dist.learning import make_base, reinforce, small_config
from tests.dist.worlds import run_world
from torchspec.config.schema import Config, Parallel, TinyModel

pytestmark = pytest.mark.dist
TOL = 1e-10
TINY = TinyModel(dim=32, layers=8, heads=4, kv_heads=2, head_dim=8, ffn_dim=48, tied=False)
Update = dict[str, dict[str, Any]]


def exact(schedule: str = "1F1B", placement: str = "last", **overrides: Any) -> Config:
    config = small_config(
        model__dtype="float64",
        parallel__schedule=schedule,
        parallel__draft_placement=placement,
        **{"train__pack_tokens": 60, "draft__aux_layers": [2, 4, 7], **overrides},
    )
    config.train.logprob_rows = 16
    return config


BOTH = {
    "last": (exact(), True),
    "spread": (exact(placement="spread"), True),
}
SCHEDULES = {
    "interleaved": (exact("Interleaved1F1B", "spread"), True),
    "GPipe": (exact("GPipe"), True),
    "ZBV": (exact("ZBVZeroBubble", "spread"), True),
    "two updates": (exact("ZBVZeroBubble", rl__minibatches=2), True),
    "recomputed": (exact(train__activation_checkpointing=True), True),
}
LAYOUTS = {  # ranks, layout, cases
    "pp 2": (2, Parallel(pp=2), BOTH | SCHEDULES),
    "pp 4": (4, Parallel(pp=4), BOTH),
    "pp 4, schedules": (4, Parallel(pp=4), {name: SCHEDULES[name] for name in ("interleaved", "ZBV")}),
    "pp 2, cp 2": (4, Parallel(pp=2, cp=2), BOTH),
    "pp 2, dp 2": (4, Parallel(pp=2, dp_shard=2), BOTH),
}
QUICK = ("pp 2", "pp 4")


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return make_base(tmp_path_factory.mktemp("base") / "tiny", TINY)


@pytest.fixture(scope="module")
def single(base, tmp_path_factory) -> dict[str, Update]:
    """One rank; one update and two."""
    cases = {"one": BOTH["last"], "two updates": SCHEDULES["two updates"]}
    return run_world(1, reinforce, tmp_path_factory.mktemp("world"), base, cases)[0]


def assert_equal_updates(found: list[Update], expected: Update) -> None:
    """Metrics of every rank; gradients of the policy from the ranks that have them, the draft's from all."""
    for update in found:
        for name, value in expected["metrics"].items():
            if not name.startswith("perf/"):
                assert update["metrics"][name] == pytest.approx(value, rel=1e-9, abs=1e-12), name
        assert update["draft"].keys() == expected["draft"].keys()
        assert update["policy"].keys() <= expected["policy"].keys()
        for model in ("policy", "draft"):
            for name, gradient in update[model].items():
                scale = expected[model][name].abs().max().item()
                assert scale > 0, name
                torch.testing.assert_close(
                    gradient, expected[model][name], rtol=TOL, atol=TOL * scale, msg=name
                )
    assert set().union(*(update["policy"] for update in found)) == expected["policy"].keys()


@pytest.mark.parametrize(
    "layout", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS]
)
def test_an_update_does_not_depend_on_the_layout(single, base, layout, tmp_path) -> None:
    ranks, parallel, cases = LAYOUTS[layout]
    results = run_world(ranks, reinforce, tmp_path, base, cases, parallel=parallel)
    for name in cases:
        assert_equal_updates([rank[name] for rank in results], single.get(name, single["one"]))
