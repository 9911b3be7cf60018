"""What stops a run before it trains on, or serves, something wrong without a word."""

from __future__ import annotations

import logging
from typing import Any

from torchspec.config.schema import Config
from torchspec.errors import GuardStop

log = logging.getLogger(__name__)


class Guards:
    """Bounds on what a step measured. Crossing one is a warning; `guards.patience` steps in a row end the run.

    The counts are part of a checkpoint, so stopping and resuming does not reset them.
    """

    def __init__(self, config: Config) -> None:
        self.patience = config.guards.patience
        # metric, is it the least or the most that is allowed, bound, key, what it means
        bounds = [
            (
                "policy/kl_train_rollout",
                max,
                config.guards.max_kl,
                "guards.max_kl",
                "the engine does not sample from the policy that is trained",
            ),
            (
                "speculation/model_tau",  # not rollout/tau: the suffix drafter's tokens are in that
                min,
                config.guards.min_tau,
                "guards.min_tau",
                "the engine accepts next to none of the draft's tokens: is it the draft that is trained?",
            ),
        ]
        self.bounds = [bound for bound in bounds if bound[2]]  # 0 turns one off
        self.crossed = {metric: 0 for metric, *_ in bounds}

    def check(self, step: int, values: dict[str, float]) -> None:
        """Judge a step's metrics.

        Raises:
            GuardStop: a bound was crossed in so many steps in a row.
        """
        for metric, extreme, bound, key, meaning in self.bounds:
            value = values.get(metric)
            # A NaN is never on the right side.
            if value is None or (extreme(value, bound) == bound and value == value):
                self.crossed[metric] = 0
                continue
            self.crossed[metric] += 1
            side = "above" if extreme is max else "below"
            text = f"step {step}: {metric} = {value:.4g} is {side} {key} = {bound:g}: {meaning}"
            if self.crossed[metric] >= self.patience:
                raise GuardStop(f"{text} (for {self.crossed[metric]} steps in a row)")
            log.warning("%s", text)

    def state_dict(self) -> dict[str, Any]:
        return dict(self.crossed)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.crossed = dict(state)
