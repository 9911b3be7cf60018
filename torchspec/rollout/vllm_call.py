"""What one `generate` call asks of vLLM and gets from it, answer by answer, so that a dead engine's are kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torchspec.config import ConfigError
from torchspec.guards import GuardStop
from torchspec.records import Rollout, SpecStats
from torchspec.rollout.engine import EngineDied, Request

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput


@dataclass(slots=True)
class Sample:
    """One answer to a request: a request of vLLM's."""

    request: Request
    index: int
    parameters: Any
    """vLLM's SamplingParams, with its seed and our id of it."""
    rollout: Rollout | None = None
    """None: not finished."""

    @property
    def id(self) -> str:
        return self.parameters.extra_args["id"]


def run(llm: LLM, samples: Sequence[Sample], take: Callable[[Sample, RequestOutput], None]) -> None:
    """Let vLLM answer `samples`; `take` gets each answer when it is complete.

    Raises:
        EngineDied: vLLM raised, for whatever reason.
    """
    from vllm import TokensPrompt

    prompts = [TokensPrompt(prompt_token_ids=sample.request.prompt_tokens) for sample in samples]
    names = llm.enqueue(prompts, [sample.parameters for sample in samples], use_tqdm=False)
    # It answers under the name without the random letters at its end.
    asked = {name.partition("-")[0]: sample for name, sample in zip(names, samples, strict=True)}
    engine: Any = llm.llm_engine
    while engine.has_unfinished_requests():
        try:
            outputs = engine.step()
        except (ConfigError, GuardStop):  # our own word, from the drafters inside
            raise
        # The border to vLLM and the device: nobody knows what it can raise, and what it leaves behind is no engine
        # any more. Signals and interrupts are no Exceptions, and what it refuses is refused before, by `enqueue`.
        except Exception as error:
            done = sum(sample.rollout is not None for sample in samples)
            what = f"{type(error).__name__}: {error} (complete were {done} of {len(samples)} answers)"
            raise EngineDied(what) from error
        for output in outputs:
            if output.finished:
                take(asked[output.request_id], output)


def spec_stats(metrics: Any) -> SpecStats | None:
    """vLLM's lists per verify step -> counts per draft position."""
    if metrics is None:
        return None
    steps = [
        (drafted, accepted)
        for drafted, accepted in zip(metrics.per_step_drafted, metrics.per_step_accepted, strict=True)
        if drafted
    ]
    return SpecStats(
        steps=len(steps),
        drafted=[sum(d > j for d, _ in steps) for j in range(metrics.num_spec_tokens)],
        accepted=[sum(a > j for _, a in steps) for j in range(metrics.num_spec_tokens)],
    )
