"""What the rest of torchspec knows of a rollout engine. Imports neither vLLM nor torch; see rollout/registry.py."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from torchspec.config.schema import Config
from torchspec.records import Rollout

if TYPE_CHECKING:
    import torch

    from torchspec.speculation.cost_table import CostTable
    from torchspec.speculation.speculator import Speculator
    from torchspec.speculation.stats import SpeculationStats

    NamedWeights = Iterable[tuple[str, torch.Tensor]]
    """Pairs (Hugging Face name, full tensor)."""


CPU_KV_CACHE_GB = 0.25
"""What rollout.kv_cache_gb = 0 means on the CPU."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How tokens are chosen; one for all requests of a `generate` call.

    `temperature` 0 is greedy, `top_k` 0 is off. `seed` makes a call repeatable only as far as the engine
    allows: a draft that samples draws from the engine's own generator, so only its law repeats.

    Example, GRPO's rollouts and a greedy evaluation:
        Sampling(temperature=1.0, max_new_tokens=256)
        Sampling(temperature=0.0, max_new_tokens=256)
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_new_tokens: int
    seed: int | None = None


def sampling_of(config: Config) -> Sampling:
    """Return the sampling that [rollout] asks for."""
    rollout = config.rollout
    return Sampling(
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        max_new_tokens=rollout.max_new_tokens,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One prompt, to be answered `samples` times.

    Example, a group of 8:
        Request(problem_id="spell_backward/17", prompt_tokens=[5, 18, 40, 6], samples=8)
    """

    problem_id: str
    prompt_tokens: list[int]
    samples: int = 1


@dataclass(kw_only=True, slots=True)
class Counters:
    """What an engine did since it was built; take differences.

    Example, after one group of 8 with a prompt of 40 tokens:
        Counters(samples=8, prompt_tokens=320, cached_tokens=0, tokens=512, seconds=0.4, thread_seconds=0.4)
    """

    samples: int = 0
    prompt_tokens: int = 0
    """Tokens of the prompts, counted once per sample."""
    cached_tokens: int = 0
    """Prompt tokens that the prefix cache served."""
    tokens: int = 0
    """Tokens sampled."""
    seconds: float = 0.0
    """Wall time inside `generate`."""
    thread_seconds: float = 0.0
    """CPU time of the calling thread inside `generate`: on CPU what it takes on a machine without other load."""


class Engine(Protocol):
    """Samples responses from the policy; speculation changes the speed, never the distribution."""

    counters: Counters
    policy_version: int
    draft_version: int

    @property
    def longest_draft(self) -> int:
        """Return the most draft tokens of a request in a step; 0 without speculation."""
        ...

    def generate(self, requests: list[Request], sampling: Sampling) -> list[Rollout]:
        """Answer every request; ordered by request, then by sample.

        Fills all of a Rollout but `text`, rewards and advantage. A response stops after the policy's end
        token, which is then its last token (finish "stop"), or is cut by `max_new_tokens` or by the
        model's longest sequence (finish "length").

        Raises:
            ConfigError: a prompt that leaves no room for a response.
            EngineDied: only `restart` and `close` may follow.
        """
        ...

    def restart(self) -> None:
        """Build the engine again after `EngineDied`: `update` with all weights, then `resume` must follow.

        The same settings; what the drafters have learned stays. Its weights, and so the versions, are those that
        it was first built with. Touches no other rank.
        """
        ...

    def resume(self) -> list[Rollout]:
        """Return all answers of the last `generate`; those that were complete before a `restart` are kept.

        The others go on from what was sampled of them. With a seed they begin again, because it samples the same.

        Raises:
            EngineDied: it died again.
        """
        ...

    def learn(self, iteration: int, rollouts: Sequence[Rollout]) -> None:
        """Give the drafters what all engines sampled in an iteration."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return what the drafters have learned, as plain values and arrays."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` of an engine with the same config gave."""
        ...

    def drain_stats(self) -> SpeculationStats | None:
        """Return what speculation did since the last call; None without speculation."""
        ...

    def frozen_stats(self) -> AbstractContextManager[None]:
        """Let what is drafted within teach nothing; does nothing without speculation."""
        ...

    def save_costs(self, path: Path) -> None:
        """Write the measured cost table as JSON; does nothing where no table was needed."""
        ...

    def shared_names(self) -> frozenset[str]:
        """Return names of draft weights that are the policy's own in this engine: never sent with the draft."""
        ...

    def update(
        self,
        policy: NamedWeights | None,
        draft: NamedWeights | None,
        *,
        policy_version: int,
        draft_version: int,
    ) -> None:
        """Load new weights, policy first, and stamp what follows with the versions; None leaves a model.

        Both iterables are consumed to their end, tensor by tensor, and nothing of them is kept.

        Raises:
            ValueError: a draft weight in `shared_names`.
            RuntimeError: draft weights for an engine without a draft.
        """
        ...

    def sleep(self) -> None:
        """Give device memory back until `wake`; does nothing where the engine cannot."""
        ...

    def wake(self) -> None:
        """Take the memory again, weights as they were."""
        ...

    def close(self) -> None:
        """Free everything; the engine cannot be used afterwards."""
        ...


class SpeculatingEngine(Engine, Protocol):
    """An engine whose speculator can be changed while it runs, as `rollout.py bench` does."""

    cost: CostTable | None
    """Measured times; None where the budget rule needs none."""

    def speculate(self, speculator: Speculator | None) -> None:
        """Let `speculator` draft from now on; None: no drafts, at no cost."""
        ...
