"""The supervised warm-up that teaches a policy the answer format before RL; it runs once and is cached."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from torchspec.checkpoint.cache import (
    cache_folder,
    contents,
    fingerprint,
    private_name,
    publish,
    remove_folder,
)
from torchspec.checkpoint.export import export_draft, export_policy
from torchspec.checkpoint.run_folder import all_ranks_see
from torchspec.config.schema import Config
from torchspec.data.prompts import encode_prompt
from torchspec.data.sampler import ProblemOrder
from torchspec.data.sources import data_files
from torchspec.distributed.mesh import Mesh
from torchspec.drafts.build import load_draft
from torchspec.errors import ConfigError
from torchspec.metrics.meter import Meter
from torchspec.models.hf import load_hf
from torchspec.records import Problem, Rollout
from torchspec.training.learner import Learner
from torchspec.training.task import Task

if TYPE_CHECKING:  # importing transformers takes seconds
    from transformers import PreTrainedTokenizerBase


def check(config: Config, problems: list[Problem], tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse problems that cannot be taught, before weights load.

    Raises:
        ConfigError: a problem has no answer, or its prompt and response exceed model.max_len.
    """
    for problem in problems if config.warmup.steps else ():
        if not problem.answer:
            raise ConfigError(
                f"problem {problem.id}: no answer to teach in the warm-up; set warmup.steps = 0"
            )
        taught = example(problem, config.warmup.template, tokenizer)
        if (length := len(taught.prompt_tokens) + len(taught.tokens)) > config.model.max_len:
            raise ConfigError(
                f"problem {problem.id}: prompt and warmup.template have {length} tokens, "
                f"model.max_len is {config.model.max_len}; raise it"
            )


def warm_up(
    config: Config, mesh: Mesh, learner: Learner, task: Task, base: Path, say: Callable[[str], None]
) -> tuple[Path, Path | None]:
    """Teach the answer format, or load the result of an earlier warm-up with equal settings. Collective.

    Args:
        base: the checkpoint that the policy was loaded from.

    Returns:
        The folders of policy and draft that an engine starts from; None without a draft.
    """
    cached = cache_folder(config) / f"start-{mesh.from_main(_key(config, base))}"
    policy, draft = cached / "policy", cached / "draft"
    model = learner.draft.model if learner.draft else None
    if not config.warmup.steps:
        draft = cached.with_name(f"draft-{config.run.name}")  # this run's own, as its lock is
        if model:
            remove_folder(draft, mesh)
            export_draft(model, draft, mesh)
        return base, draft if model else None
    if all_ranks_see(policy, mesh):
        say(f"warm-up: taken from {cached}")
        load_hf(learner.policy, policy)
        if model:
            load_draft(model, draft)
        return policy, draft if model else None
    train(config, mesh, learner, task.problems, task.tokenizer, say)
    private = private_name(cached, mesh)
    if model:
        export_draft(model, private / "draft", mesh)
    export_policy(learner.policy, private / "policy", base, mesh)
    if not publish(
        private, cached, mesh
    ):  # another run with this warm-up was faster: both start from the same
        return warm_up(config, mesh, learner, task, base, say)
    return policy, draft if model else None


def _key(config: Config, base: Path) -> str:
    """Return the main rank's key in the cache: on other nodes the same files have other times."""
    # An option of the draft that no warm-up reads must not start another warm-up.
    options = dataclasses.replace(config.draft, train_every=1)
    problem_files = data_files(config.data) if config.data.path else []
    files = contents(base, *problem_files, config.draft.init)
    return fingerprint(config.model, options, config.data, config.warmup, config.run.seed, files)


def train(
    config: Config,
    mesh: Mesh,
    learner: Learner,
    problems: list[Problem],
    tokenizer: PreTrainedTokenizerBase,
    say: Callable[[str], None],
) -> None:
    """Make warmup.steps updates on warmup.template; the draft takes part in the last warmup.draft_steps."""
    warmup = config.warmup
    order = ProblemOrder(problems, config.run.seed)
    for step in range(1, warmup.steps + 1):
        mine = order.next(warmup.problems_per_step)[mesh.rank :: mesh.world_size]
        examples = [example(problem, warmup.template, tokenizer) for problem in mine]
        meter = Meter()
        learner.supervise(examples, meter, train_draft=step > warmup.steps - warmup.draft_steps)
        values = meter.reduce(mesh)
        if step % max(1, warmup.steps // 8) == 0:
            parts = [f"warm-up {step}/{warmup.steps}", f"policy {values['policy/loss']:.3f}"]
            parts += [f"draft {values['draft/loss']:.3f}"] if "draft/loss" in values else []
            say(" | ".join(parts))


def example(problem: Problem, template: str, tokenizer: PreTrainedTokenizerBase) -> Rollout:
    """Return the response that is taught for one problem, as a rollout."""
    response = template.replace("{question}", problem.messages[-1]["content"])
    response = response.replace("{answer}", problem.answer or "")
    tokens = [*tokenizer.encode(response, add_special_tokens=False), tokenizer.eos_token_id]
    return Rollout(
        problem_id=problem.id,
        sample=0,
        prompt_tokens=encode_prompt(tokenizer, problem.messages),
        tokens=tokens,
        logprobs=[0.0] * len(tokens),
        finish="stop",
        policy_version=0,
        draft_version=0,
        text=response,
    )
