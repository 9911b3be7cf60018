"""Evaluation on the held-out problems."""

from __future__ import annotations

from collections.abc import Callable

from torchspec.config.schema import Config
from torchspec.distributed.interrupt import Interrupt
from torchspec.distributed.mesh import Mesh
from torchspec.errors import GuardStop, RewardFailed, Stopped
from torchspec.metrics.meter import Meter
from torchspec.metrics.rollout_metrics import add_tau
from torchspec.records import Rollout, SpecStats
from torchspec.rollout.engine import Engine, sampling_of
from torchspec.rollout.seeding import reseed
from torchspec.training.refit import FrozenCopy, ServedWeights
from torchspec.training.task import Task


class Evaluation:
    """Measures reward and tau, and tau of the draft as it was when this object was built.

    Args:
        keep: writes the rollouts of a step whose reward failed, and returns where they are.
    """

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        engine: Engine,
        task: Task,
        weights: ServedWeights,
        interrupt: Interrupt,
        keep: Callable[[int, list[Rollout]], str],
    ) -> None:
        self._config, self._mesh, self._engine = config, mesh, engine
        self._task, self._weights, self._interrupt, self._keep = task, weights, interrupt, keep
        self._problems = task.held_out[mesh.rank :: mesh.world_size]
        frozen = weights.draft and config.eval.frozen_draft
        self._frozen_draft = FrozenCopy(weights.draft) if weights.draft and frozen else None

    def is_due(self, step: int) -> bool:
        """Return whether eval.every asks for an evaluation after `step`; one always follows the last step."""
        every = self._config.eval.every
        return bool(every) and (step % every == 0 or step == self._config.run.steps)

    def run(self, step: int) -> dict[str, float]:
        """Return the metrics `eval/*` after `step`, equal on all ranks. Collective.

        The frozen draft answers the same problems with the same policy. Empty where there was a signal: the step
        before is whole, so its metrics and its checkpoint come first.

        Raises:
            GuardStop: a reward function failed.
        """
        meter = Meter()
        reseed(self._config.run.seed, step, self._mesh.rank, "eval")
        with meter.phase("eval"):
            rollouts = self._generate()
            try:
                self._task.score(self._problems, rollouts, self._mesh, self._interrupt)
            except Stopped:
                return {}
            except RewardFailed as error:
                kept = self._keep(step, rollouts)
                raise GuardStop(f"evaluation after step {step}: {error}; {kept}") from error
            meter.mean("eval/reward", sum(r.reward or 0.0 for r in rollouts), len(rollouts))
            if self._engine.longest_draft:
                add_tau(meter, "eval/tau", self._stats(rollouts))
            if self._frozen_draft:
                self._weights.send_draft(self._frozen_draft, version=0)
                add_tau(meter, "eval/tau_frozen", self._stats(self._generate()))
            # Also without a frozen draft: the prefix cache must not keep what evaluation left in it, because
            # a run that resumes here has an empty one.
            self._weights.send_draft(self._weights.draft if self._frozen_draft else None)
        return meter.reduce(self._mesh)

    def _generate(self) -> list[Rollout]:
        requests = self._task.requests(self._problems, self._config.eval.samples_per_problem)
        with self._engine.frozen_stats():
            return self._engine.generate(requests, sampling_of(self._config))

    def _stats(self, rollouts: list[Rollout]) -> SpecStats:
        return SpecStats.total((r.spec for r in rollouts if r.spec), self._engine.longest_draft)
