"""When the draft model runs: it pauses or rests where it costs more time than it saves."""

from __future__ import annotations

import logging
from dataclasses import astuple, dataclass
from typing import Any

log = logging.getLogger(__name__)

PROBES = tuple(2**i for i in range(24))
"""Steps of an iteration, counted from 1, in which the draft model proposes all it may: its estimates follow it."""
REST = 8
"""Iterations that the draft model is left out for, after one in which it was not worth its time."""
PATIENCE = 32
"""Steps with about as many requests before it may be left out in those that follow with about as many."""


@dataclass(frozen=True, slots=True)
class Spell:
    """Steps in a row with about as many requests."""

    requests: int = 0
    began: int = 0
    """The step before its first."""
    worth: float = 0.0
    """The gate's worth when it began."""


class ModelGate:
    """Opens and closes for the draft model.

    Args:
        enabled: False: it stays closed, because there is no draft model or the budget allows no draft.
    """

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self.probes = PROBES
        self.step = 0
        self.worth = 0.0
        """Of this iteration: log of the estimated gains with the model over those without it, summed."""
        self.spell = Spell()
        self.rest = 0
        """Iterations to go without the model."""

    @property
    def is_open(self) -> bool:
        paused = self.step >= self.spell.began + PATIENCE and self.worth < self.spell.worth
        return self.enabled and not self.rest and not paused

    @property
    def is_probe(self) -> bool:
        return self.step in self.probes

    def begin_step(self, requests: int, waiting: int) -> None:
        """Count a step of so many requests, while `waiting` others have no place."""
        self.step += 1
        emptied = not waiting and 2 * requests <= self.spell.requests
        if emptied or requests >= 2 * self.spell.requests:
            self.spell = Spell(requests, self.step - 1, self.worth)

    def end_iteration(self) -> None:
        """Rest if the model was not worth its time, and begin to count again."""
        self.step = 0
        self.rest = max(self.rest - 1, 0)
        if self.worth < 0:
            log.warning("the draft model costs more time than it saves; it rests for %d iterations", REST)
            self.rest = REST
        self.worth, self.spell = 0.0, Spell()

    def state_dict(self) -> dict[str, Any]:
        return {"steps": [self.step, self.rest], "worth": self.worth, "spell": astuple(self.spell)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.rest = map(int, state["steps"])
        self.worth, self.spell = float(state["worth"]), Spell(*state["spell"])
