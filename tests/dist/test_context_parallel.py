"""Whole steps of the real policy and draft under context parallelism and row blocks: equal in fp64."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.dist.learning import fixed_rollouts, make_base, reinforce, small_config
from tests.dist.worlds import run_world
from torchspec.attention import local_plan, with_halo
from torchspec.attention.plan import Plan
from torchspec.config.schema import Config, Parallel
from torchspec.data import packing
from torchspec.distributed.context_parallel import local_rows
from torchspec.distributed.mesh import Mesh
from torchspec.records import Batch
from torchspec.training import learner

pytestmark = pytest.mark.dist
TOL = 1e-10
Update = dict[str, dict[str, Any]]


def exact(**overrides: Any) -> Config:
    return small_config(model__dtype="float64", **overrides)


WHOLE = {"whole": (exact(), True)}
SPLIT = {
    "ring": (exact(parallel__attention="ring"), True),
    "gather, packs of 60": (exact(parallel__attention="gather", train__pack_tokens=60), True),
    # fewer tokens than ranks have chunks in the short documents: some ranks own no row of a pack
    "query_ring, packs of 1": (exact(parallel__attention="query_ring", train__pack_tokens=1), True),
    "blocks of 7 rows": (exact(draft__row_block=7), True),
    "blocks of 32 rows, recomputed": (exact(draft__row_block=32, train__activation_checkpointing=True), True),
}
LAYOUTS = {"cp 1": (1, Parallel()), "cp 2": (2, Parallel(cp=2)), "cp 4": (4, Parallel(cp=4))}
LAYOUTS["cp 2, dp 2"] = (4, Parallel(cp=2, dp_shard=2))


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return make_base(tmp_path_factory.mktemp("base") / "tiny")


@pytest.fixture(scope="module")
def whole(base, tmp_path_factory) -> Update:
    """One rank, one pack, one block."""
    return run_world(1, reinforce, tmp_path_factory.mktemp("world"), base, WHOLE)[0]["whole"]


def assert_equal_updates(found: Update, expected: Update) -> None:
    for name, value in expected["metrics"].items():
        if not name.startswith("perf/"):
            assert found["metrics"][name] == pytest.approx(value, rel=1e-9, abs=1e-12), name
    for model in ("policy", "draft"):
        assert found[model].keys() == expected[model].keys()
        for name, gradient in expected[model].items():
            scale = gradient.abs().max().item()
            assert gradient.dtype == torch.float64
            assert scale > 0, name
            torch.testing.assert_close(found[model][name], gradient, rtol=TOL, atol=TOL * scale, msg=name)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_update_does_not_depend_on_the_layout(whole, base, layout, tmp_path) -> None:
    ranks, parallel = LAYOUTS[layout]
    for rank in run_world(ranks, reinforce, tmp_path, base, SPLIT, parallel=parallel):
        for update in rank.values():
            assert_equal_updates(update, whole)


def halo_one_row_off() -> None:
    shift = Plan.shift
    Plan.shift = lambda plan, distance, passes: shift(plan, max(0, distance - 1), passes)


def two_chunks_swapped() -> None:
    """A rank holds its neighbour's tokens where both have rows, but plans as before."""

    def swapped(batch: Batch, group: str, transport: str) -> Batch:
        plan = local_plan(batch.cu_seqlens, group)
        mine, others = (torch.from_numpy(plan._index(rank)) for rank in (plan.rank, 1 - plan.rank))
        order, common = torch.arange(plan.tokens), min(len(mine), len(others))
        order[mine[:common]] = others[:common]
        rows = {name: getattr(batch, name)[order] for name in ("tokens", "targets", "target_mask")}
        return local_rows(replace(batch, **rows), group, transport)

    learner.local_rows = swapped


def positions_counted_on_the_shard() -> None:
    def counted(batch: Batch, group: str, transport: str) -> Batch:
        local = local_rows(batch, group, transport)
        return replace(local, positions=torch.arange(len(local.positions)) % 128)

    learner.local_rows = counted


MUTANTS = [halo_one_row_off, two_chunks_swapped, positions_counted_on_the_shard]


def mutated(mesh: Mesh, base: Path) -> dict[str, Update]:
    kept = Plan.shift, learner.local_rows
    results = {}
    for mutant in MUTANTS:
        mutant()
        results |= reinforce(mesh, base, {mutant.__name__: SPLIT["ring"]})
        Plan.shift, learner.local_rows = kept
    return results | reinforce(mesh, base, {"none": SPLIT["ring"]})


def test_the_comparison_catches_planted_bugs(whole, base, tmp_path) -> None:
    results = run_world(2, mutated, tmp_path, base, parallel=Parallel(cp=2))[0]
    assert_equal_updates(results.pop("none"), whole)
    assert len(results) == len(MUTANTS)
    for result in results.values():
        with pytest.raises(AssertionError):
            assert_equal_updates(result, whole)


def halos(mesh: Mesh, passes: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """For every distance: where the shifted rows say they are in the pack, and where they should be."""
    batch = packing.pack(fixed_rollouts(groups=2), 4096)[0]
    plan = local_plan(batch.cu_seqlens, mesh.cp_group)
    place = torch.arange(plan.tokens)[plan.index][:, None]
    everything = with_halo(place, plan, mesh.cp_group, passes)
    found = []
    for distance in range(passes + 1):
        where = torch.from_numpy(plan.shift(distance, passes))
        inside = where >= 0
        found.append((everything[where[inside], 0], place[inside, 0] + distance))
        ends = batch.cu_seqlens[1:].long()
        document_end = ends[torch.searchsorted(ends, place[:, 0], right=True)]
        assert torch.equal(inside, place[:, 0] + distance < document_end)
    return found


def test_halo_rows_arrive_where_the_plan_says(tmp_path) -> None:
    for result in run_world(3, halos, tmp_path, 7, parallel=Parallel(cp=3)):
        for arrived, expected in result:
            assert torch.equal(arrived, expected)
