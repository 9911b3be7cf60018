"""The progress of a run, and the checkpoints that keep it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchspec.checkpoint.checkpoint import Checkpoints, Component, Saved, restore
from torchspec.checkpoint.lock import RunLock
from torchspec.distributed.mesh import Mesh
from torchspec.training.optim import ModelOptimizer
from torchspec.training.refit import ServedWeights


class Progress:
    """Counts the steps that are done, saves them and goes back to what was saved.

    Args:
        every: save after every n-th step; 0: never.
        components: the objects besides the models that a checkpoint holds, by name.
        lock: the ownership of the run's folder, looked at before anything is written; None on other ranks.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        every: int,
        optimizers: Mapping[str, ModelOptimizer],
        components: Mapping[str, Component],
        weights: ServedWeights,
        lock: RunLock | None,
    ) -> None:
        self._checkpoints, self._every = checkpoints, every
        self._optimizers, self._components, self._weights = optimizers, components, weights
        self._lock = lock
        self.done = self.saved = 0
        self.scores: dict[str, float | None] = {}
        """By which checkpoint.best chooses: reward and tau of the last step."""
        self._before: dict[str, Any] = {}

    def begin_step(self) -> None:
        """Remember the components' states, in case the step is dropped."""
        self._before = self._states()

    def end_step(self, step: int, values: Mapping[str, float]) -> None:
        """Count a step as done, with its metrics."""
        self.done = step
        self.scores = {"reward": values["reward/mean"], "tau": values.get("rollout/tau")}

    def save_if_due(self) -> None:
        """Save after every n-th step."""
        if self._every and self.done % self._every == 0:
            self._save(self._states())

    def finish(self) -> None:
        """Save the last step, and wait until all checkpoints are on disk."""
        self._save(self._states())
        self._checkpoints.wait()
        if self._lock:  # exports are replaced next
            self._lock.check()

    def stop(self) -> None:
        """Save the steps that are done without the dropped one, whose problems come again; wait for the disk."""
        self._save(self._before)
        self._checkpoints.wait()

    def resume(self, saved: Saved, mesh: Mesh) -> None:
        """Be where a checkpoint was saved, and send its weights to the engine. Collective."""
        restore(saved, mesh, self._optimizers, self._components)
        self.done = self.saved = saved.step
        self._weights.policy_version = saved.manifest["policy_version"]
        self._weights.draft_version = saved.manifest["draft_version"]
        self._weights.send()

    def close(self) -> None:
        """End the thread that writes checkpoints, and give up the run's folder."""
        self._checkpoints.close()
        if self._lock:
            self._lock.release()

    def _states(self) -> dict[str, Any]:
        return {name: component.state_dict() for name, component in self._components.items()}

    def _save(self, states: dict[str, Any]) -> None:
        """Save the steps done, unless they are saved; `states` are the components' after them."""
        if self._every and self.done > self.saved:
            if self._lock:
                self._lock.check()
            facts = {
                "step": self.done,
                "policy_version": self._weights.policy_version,
                "draft_version": self._weights.draft_version,
                "scores": self.scores,
            }
            self._checkpoints.save(facts, self._optimizers, states)
            self.saved = self.done
