"""What the dry run foretells against what a learner takes, on each rank of the CPU examples and their variants.

Measured is the training phase alone: how far the resident set of a process rises, from before models and
optimizers are built to the highest point of two updates of policy and draft. There is no engine in the process,
and a small update before has loaded code, thread pools and connections, which are no part of the estimate. Every
response is as long as `model.max_len` allows, as the estimate takes it. The pipeline's example is too small for
that (its own 17 MB are mostly the allocator's and gloo's noise): it is measured with wider models and longer packs.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.dist.worlds import run_world
from torchspec.build import build_learner, build_policy
from torchspec.commands.dry_run import MB, estimate, policy_spec
from torchspec.config.load import load
from torchspec.config.schema import Config
from torchspec.distributed.mesh import Mesh
from torchspec.drafts.build import build_draft, draft_spec, draft_trainer
from torchspec.metrics.meter import Meter
from torchspec.models.spec import PolicySpec
from torchspec.models.tiny import make_tiny
from torchspec.records import Rollout
from torchspec.training.learner import DraftLearner, Learner
from torchspec.training.optim import ModelOptimizer

pytestmark = pytest.mark.dist

CONFIGS = Path(__file__).parents[2] / "configs"
FEW = "--train.pack_tokens 2048 --rollout.problems_per_step 4"
SAVING = "--train.activation_checkpointing true --draft.row_block 512"
WIDE = "--model.tiny.dim 128 --model.tiny.ffn_dim 256 --model.max_len 512 --train.pack_tokens 1024"
EVEN = "--parallel.layers_per_stage [] --model.tiny.layers 8"

CASES = {
    # name: (ranks, config, overrides); the first ones take seconds
    "row blocks, recomputation": (1, "demo_cpu", f"{FEW} {SAVING}"),
    "kl": (1, "demo_cpu", f"{FEW} --rl.kl_coef 0.1"),
    "cp 2": (2, "demo_cpu", f"{FEW} --parallel.cp 2"),
    "1F1B": (2, "pipeline_cpu", f"{WIDE} --rollout.samples_per_problem 2"),
    "GPipe": (2, "pipeline_cpu", f"{WIDE} --rollout.samples_per_problem 2 --parallel.schedule GPipe"),
    "1F1B, many packs": (2, "pipeline_cpu", f"{WIDE} --rollout.problems_per_step 16"),
    "demo": (1, "demo_cpu", ""),
    "demo on two ranks": (2, "demo_cpu", ""),
    "hybrid": (2, "hybrid_cpu", ""),
    "cp 2, ring": (2, "demo_cpu", "--parallel.cp 2 --parallel.attention ring"),
    "cp 2, gather": (2, "demo_cpu", "--parallel.cp 2 --parallel.attention gather --model.tiny.kv_heads 6"),
    "cp 2, query_ring": (2, "demo_cpu", "--parallel.cp 2 --parallel.attention query_ring"),
    "cp 2, kl, row blocks": (2, "demo_cpu", f"--parallel.cp 2 --rl.kl_coef 0.1 {SAVING}"),
    "draft on the last stage": (2, "pipeline_cpu", f"{WIDE} --parallel.draft_placement last"),
    "1F1B, kl, row blocks": (2, "pipeline_cpu", f"{WIDE} {SAVING} --rl.kl_coef 0.1"),
    "Interleaved1F1B": (2, "pipeline_cpu", f"{WIDE} {EVEN} --parallel.schedule Interleaved1F1B"),
    "ZBV": (2, "pipeline_cpu", f"{WIDE} {EVEN} --parallel.schedule ZBVZeroBubble"),
    "pp 2, cp 2": (4, "pipeline_cpu", f"{WIDE} --parallel.cp 2 --train.pack_tokens 2048"),
}
QUICK = list(CASES)[:5]


def status(name: str) -> float:
    (line,) = [x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(name)]
    return int(line.split()[1]) / 1024


def rollouts(rank: int, count: int, length: int) -> list[Rollout]:
    """Documents that are nearly all response."""
    draw = random.Random(rank)
    return [
        Rollout(
            problem_id=f"r{rank}p{i // 2}",
            sample=i % 2,
            prompt_tokens=[5, 6],
            tokens=[draw.randrange(3, 90) for _ in range(length - 2)],
            logprobs=[-4.0] * (length - 2),
            finish="stop",
            policy_version=0,
            draft_version=0,
            advantage=draw.uniform(-1, 1),
        )
        for i in range(count)
    ]


def build(mesh: Mesh, config: Config, base: Path) -> Learner:
    spec = PolicySpec.from_hf(base, config.model.max_len)
    policy = build_policy(config, mesh, base, spec)
    draft = build_draft(config, mesh, draft_spec(config, spec), {}, [])
    reference = build_policy(config, mesh, base, spec).requires_grad_(False) if config.rl.kl_coef else None
    trainer = draft_trainer(config.draft, draft)
    side = DraftLearner(trainer, ModelOptimizer("draft", draft, config.draft.optim, 10))
    sum_over_stages = mesh.sum_over_pp_ if mesh.pp_size > 1 else None
    optimizer = ModelOptimizer("policy", policy, config.optim, 10, sum_over_stages)
    return build_learner(config, mesh, policy, optimizer, side, reference)


def measure(mesh: Mesh, config: Config, base: Path) -> float:
    """MB of this rank."""
    count = config.rollout.problems_per_step * config.rollout.samples_per_problem // mesh.world_size
    full = rollouts(mesh.rank, count, config.model.max_len)
    build(mesh, config, base).reinforce(rollouts(mesh.rank, 2, 64), Meter(), train_draft=True)
    mesh.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts here
    before = status("VmRSS")
    learner = build(mesh, config, base)
    for _ in range(2):
        learner.reinforce(full, Meter(), train_draft=True)
    return status("VmHWM") - before


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_the_estimate_is_within_a_tenth_of_the_measured_peak(tmp_path, monkeypatch, name) -> None:
    ranks, file, overrides = CASES[name]
    config = load(CONFIGS / f"{file}.toml", overrides.split())
    spec = policy_spec(config)
    make_tiny(tmp_path / "base", config.model.tiny, config.model.max_len, seed=0)
    # glibc otherwise keeps what was freed, and what it keeps is in the resident set.
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "65536")
    measured = run_world(ranks, measure, tmp_path, config, tmp_path / "base", parallel=config.parallel)
    each = ranks // config.parallel.pp
    expected = [estimate(config, spec, ranks, rank // each).training_peak / MB for rank in range(ranks)]
    print(f"{name}: measured", *(f"{x:.1f}" for x in measured), "foretold", *(f"{x:.1f}" for x in expected))
    assert measured == pytest.approx(expected, rel=0.1)
