"""Peak memory of one update of policy and draft, as the resident set grows: for the dry run's estimate.

python measure_update.py CONFIG FOLDER [--section.key value ...]        prints MB

Run it with MALLOC_MMAP_THRESHOLD_ and MALLOC_TRIM_THRESHOLD_ at 65536: glibc otherwise keeps what was freed.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

import torch

from torchspec.assemble import build_draft, build_policy, draft_spec
from torchspec.config_load import load
from torchspec.draft.trainer import DraftTrainer
from torchspec.learner import DraftLearner, Learner
from torchspec.mesh import Mesh
from torchspec.metrics import Meter
from torchspec.models.spec import PolicySpec
from torchspec.models.tiny import make_tiny
from torchspec.optim import ModelOptimizer
from torchspec.records import Rollout


def status(name: str) -> float:
    (line,) = [x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(name)]
    return int(line.split()[1]) / 1024


def rollouts(tokens: int, length: int) -> list[Rollout]:
    """Full packs of documents that are nearly all response."""
    draw = random.Random(0)
    return [
        Rollout(
            problem_id=f"p{i}",
            sample=0,
            prompt_tokens=[5, 6],
            tokens=[draw.randrange(3, 90) for _ in range(length - 2)],
            logprobs=[-4.0] * (length - 2),
            finish="stop",
            policy_version=0,
            draft_version=0,
            advantage=draw.uniform(-1, 1),
        )
        for i in range(tokens // length)
    ]


def main(config_path: str, folder: str, *overrides: str) -> None:
    torch.set_num_threads(1)
    config = load(config_path, overrides)
    base = Path(folder) / "base"
    make_tiny(base, config.model.tiny, config.model.max_len, seed=0)
    mesh = Mesh(config.parallel, device="cpu")
    spec = PolicySpec.from_hf(base, config.model.max_len)

    def learner() -> Learner:
        policy = build_policy(config, mesh, base, spec)
        draft = build_draft(config, mesh, draft_spec(config, spec), {}, [])
        settings = config.draft
        trainer = DraftTrainer(
            draft,
            passes=settings.ttt_steps,
            pass_decay=settings.pass_decay,
            loss_rows=settings.loss_rows,
            row_block=settings.row_block,
        )
        side = DraftLearner(trainer, ModelOptimizer("draft", draft, settings.optim, 10))
        return Learner(config, mesh, policy, ModelOptimizer("policy", policy, config.optim, 10), side)

    # A small update first: code and thread pools are no part of the estimate.
    learner().reinforce(rollouts(128, 64), Meter(), train_draft=True)
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts here
    before = status("VmRSS")
    measured = learner()
    full = rollouts(2 * config.train.pack_tokens, config.model.max_len)
    for _ in range(2):
        measured.reinforce(full, Meter(), train_draft=True)
    print(status("VmHWM") - before)


if __name__ == "__main__":
    main(*sys.argv[1:])
