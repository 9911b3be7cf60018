"""The order in which problems are asked."""

from __future__ import annotations

import hashlib
import json
import random
from functools import cached_property
from typing import Any

from torchspec.errors import ConfigError
from torchspec.records import Problem


class ProblemOrder:
    """Problems without end: every epoch is a permutation drawn from (seed, epoch).

    What an epoch has left too few of for a whole draw is skipped, so no problem is drawn twice at once: its
    two groups would be one to the advantages.
    """

    def __init__(self, problems: list[Problem], seed: int) -> None:
        self.problems = problems
        self.seed = seed
        self._start(epoch=0)

    def next(self, n: int) -> list[Problem]:
        """The next `n` problems, all different.

        Raises:
            ConfigError: there are fewer than `n` problems.
        """
        if n > len(self.problems):
            raise ConfigError(
                f"a step asks for {n} problems, but there are only {len(self.problems)} to train on"
            )
        if self.offset + n > len(self.problems):
            self._start(self.epoch + 1)
        taken = self.order[self.offset : self.offset + n]
        self.offset += n
        return [self.problems[i] for i in taken]

    def state_dict(self) -> dict[str, Any]:
        return {
            "seed": self.seed,
            "problems": len(self.problems),
            "digest": self._digest,
            "epoch": self.epoch,
            "offset": self.offset,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on exactly where `state` was taken.

        Raises:
            ConfigError: the state belongs to other problems or another seed.
        """
        here = {"seed": self.seed, "problems": len(self.problems), "digest": self._digest}
        saved = {name: state[name] for name in here}
        if saved != here:
            raise ConfigError(
                f"cannot resume the problems' order of {saved} with {here}; restore the [data] settings and files"
            )
        self._start(state["epoch"])
        self.offset = state["offset"]

    @cached_property
    def _digest(self) -> str:
        """Differs where any problem does, as files may have been edited between two sessions."""
        known = [(p.id, p.messages, p.answer) for p in self.problems]
        return hashlib.sha256(json.dumps(known).encode()).hexdigest()[:12]

    def _start(self, epoch: int) -> None:
        self.epoch, self.offset = epoch, 0
        self.order = list(range(len(self.problems)))
        random.Random(f"{self.seed}/{epoch}").shuffle(self.order)
