"""The supervised warm-up that teaches a policy the answer format before RL; done once, then cached."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torchspec.config.schema import Config
from torchspec.data.prompts import encode_prompt
from torchspec.data.sampler import ProblemOrder
from torchspec.distributed.mesh import Mesh
from torchspec.errors import ConfigError
from torchspec.metrics.meter import Meter
from torchspec.records import Problem, Rollout
from torchspec.training.learner import Learner

if TYPE_CHECKING:  # importing transformers takes seconds
    from transformers import PreTrainedTokenizerBase


def check(config: Config, problems: list[Problem], tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse problems that cannot be taught, before weights load.

    Raises:
        ConfigError: a problem without an answer, or whose taught document exceeds model.max_len.
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


def train(
    config: Config,
    mesh: Mesh,
    learner: Learner,
    problems: list[Problem],
    tokenizer: PreTrainedTokenizerBase,
    say: Callable[[str], None],
) -> None:
    """warmup.steps updates on warmup.template; the draft takes part in the last warmup.draft_steps."""
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
    """The response that is taught for one problem, in the form the learner takes."""
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
