"""What one `generate` call asks of vLLM and gets from it, answer by answer, so that a dead engine's are kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torchspec.errors import ConfigError, EngineDied, GuardStop
from torchspec.records import Rollout, SpecStats
from torchspec.rollout.engine import Request, Sampling

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
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    """What an engine that died has sampled of it, which the answer begins with."""

    @property
    def id(self) -> str:
        return self.parameters.extra_args["id"]

    @property
    def left(self) -> Any:
        """The parameters of what is not sampled yet."""
        parameters = self.parameters.clone()
        parameters.max_tokens -= len(self.tokens)
        return parameters

    def keep_begun(self, state: Any) -> None:
        """Keep what vLLM's state of this request has.

        Sampled again, unfinished answers would all be long ones that had a second chance to be short. With a seed
        they are sampled again, because it gives the same tokens.
        """
        if self.parameters.seed is None:
            self.tokens += state.detokenizer.output_token_ids
            self.logprobs += state.logprobs_processor.logprobs.logprobs


def sampling_params(request: Request, own_id: str, seed: int | None, sampling: Sampling, max_len: int) -> Any:
    """Return vLLM's SamplingParams of one sample. Raise ConfigError if its prompt leaves no room in `max_len`."""
    from vllm import SamplingParams

    room = max_len - len(request.prompt_tokens)
    if room <= 0:
        raise ConfigError(
            f"problem {request.problem_id}: its prompt of {len(request.prompt_tokens)} tokens leaves no "
            f"room in model.max_len = {max_len}; raise model.max_len or drop the problem"
        )
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=min(sampling.max_new_tokens, room),
        seed=seed,
        logprobs=0,  # of the sampled token alone
        flat_logprobs=True,
        detokenize=False,
        extra_args={"problem_id": request.problem_id, "id": own_id},
    )


def run(llm: LLM, samples: Sequence[Sample], take: Callable[[Sample, RequestOutput], None]) -> None:
    """Let vLLM answer `samples`; `take` gets each answer when it is complete.

    Raises:
        EngineDied: vLLM raised, for whatever reason.
    """
    from vllm import TokensPrompt

    prompts = [TokensPrompt(prompt_token_ids=[*s.request.prompt_tokens, *s.tokens]) for s in samples]
    names = llm.enqueue(prompts, [sample.left for sample in samples], use_tqdm=False)
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
            for state in engine.output_processor.request_states.values():
                asked[state.external_req_id].keep_begun(state)
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
