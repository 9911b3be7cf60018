"""Rollouts of any checkpoint, scored and written to a file."""

from __future__ import annotations

from pathlib import Path

from torchspec.build import base_folder
from torchspec.checkpoint.writable import check_writable
from torchspec.config.schema import Config, longest_draft
from torchspec.data.problems import load_problems
from torchspec.data.prompts import prompts_by_id
from torchspec.data.tokenizer import load_tokenizer
from torchspec.distributed.mesh import Mesh
from torchspec.errors import ConfigError, GuardStop, RewardFailed
from torchspec.models.spec import PolicySpec
from torchspec.records import SpecStats
from torchspec.rewards.scorer import build_scorer
from torchspec.rewards.scoring import score
from torchspec.rollout.engine import Request, sampling_of
from torchspec.rollout.files import write_rollouts
from torchspec.rollout.registry import build_engine, check_engine


def generate_file(config: Config, draft: Path | None, split: str, limit: int, out: Path) -> str:
    """Answer the problems of a split with one engine; return one line that sums it up.

    Args:
        draft: folder of a draft; None: no speculation.
        split: "train" or "eval".
        limit: at most so many problems; 0: all.
        out: the JSONL file to write.

    Raises:
        ConfigError: something of this cannot be used; nothing is written then.
    """
    if not out.resolve().parent.is_dir():
        raise ConfigError(f"--out {out}: its folder does not exist")
    if out.is_dir():
        raise ConfigError(f"--out {out}: a folder; give the file to write")
    check_writable(out, "--out")
    train, held_out = load_problems(config.data)
    problems = (held_out if split == "eval" else train)[: limit or None]
    if not problems:
        raise ConfigError(
            f"--split {split}: there are no such problems; set data.eval_size, or --split train"
        )
    scorer = build_scorer(config.reward, config.data)
    problems = scorer.check_answers(problems)
    mesh = Mesh(config.parallel)
    if mesh.world_size > 1:
        raise ConfigError("rollout.py generate runs as one process; start it without torchrun")
    folder = base_folder(config, mesh)
    spec = PolicySpec.from_hf(folder, config.model.max_len)
    check_engine(config, mesh.device.type, spec)
    tokenizer = load_tokenizer(folder, spec)
    settings = config.rollout
    longest = config.model.max_len - settings.max_new_tokens
    prompts = prompts_by_id(tokenizer, problems, longest, config.data.overlong)
    problems = [problem for problem in problems if problem.id in prompts]
    engine = build_engine(
        config,
        policy_folder=folder,
        draft_folder=draft,
        seed=config.run.seed,
        device_type=mesh.device.type,
    )
    rollouts = engine.generate(
        [
            Request(problem_id=key, prompt_tokens=tokens, samples=settings.samples_per_problem)
            for key, tokens in prompts.items()
        ],
        sampling_of(config),
    )
    try:
        score(scorer, tokenizer, problems, rollouts)
    except RewardFailed as error:
        raise GuardStop(f"{error}; the rollouts, not all of them scored, are in {out}") from error
    finally:
        write_rollouts(out, rollouts)
        scorer.close()
    seconds, tokens = engine.counters.seconds, engine.counters.tokens
    engine.close()
    mesh.close()
    reward = sum(r.reward or 0.0 for r in rollouts) / len(rollouts)
    tau = SpecStats.total((r.spec for r in rollouts if r.spec), longest_draft(config)).tau
    return (
        f"{out}: {len(rollouts)} rollouts of {len(problems)} problems | reward {reward:.3f} | tau {tau:.2f} | "
        f"{tokens / seconds:.0f} tok/s"
    )
