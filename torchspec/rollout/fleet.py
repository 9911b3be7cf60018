"""All ranks' engines as one: which rank answers what, and what each learns from the answers."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchspec.distributed.interrupt import Interrupt
from torchspec.distributed.mesh import Mesh
from torchspec.errors import EngineDied, GuardStop
from torchspec.records import Rollout
from torchspec.rollout.dispatch import dispatch
from torchspec.rollout.engine import Engine, Request, Sampling
from torchspec.speculation.lengths import LengthStats

log = logging.getLogger(__name__)


class Fleet:
    """This rank's engine among those of all ranks.

    Every rank is given the same requests and computes the same dispatch from the same lengths, so that no rank
    has to tell another what to do; and every rank sees all rollouts, because a problem may come to another engine
    the next time.

    Args:
        engine: this rank's.
        lengths: the lengths that the engine predicts with as well.
        tail_weight: see `dispatch`.
    """

    def __init__(self, mesh: Mesh, engine: Engine, lengths: LengthStats, tail_weight: float) -> None:
        self.mesh, self.engine, self.lengths, self.tail_weight = mesh, engine, lengths, tail_weight
        self._calls = 0
        self._trusted = 0
        """The first call of `generate` in which the engine may die."""
        self._death = ""
        self._places: list[tuple[int, int]] = []

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[tuple[int, Rollout]]:
        """Return this rank's share of the answers, each with its request's index; the longest are begun first.

        Return nothing where the engine died; `any_died` must follow.
        """
        self._calls += 1
        shares = dispatch(requests, self.mesh.world_size, self.lengths, self.tail_weight)
        before = [0] * len(requests)
        for share in (share for engine in shares[: self.mesh.rank] for share in engine):
            before[share.request] += share.samples
        expected = [self.lengths.expected(r.problem_id)[0] for r in requests]
        mine = sorted(shares[self.mesh.rank], key=lambda share: (-expected[share.request], share.request))
        asked = [
            Request(
                problem_id=requests[share.request].problem_id,
                prompt_tokens=requests[share.request].prompt_tokens,
                samples=share.samples,
            )
            for share in mine
        ]
        self._places = [
            (share.request, before[share.request] + i) for share in mine for i in range(share.samples)
        ]
        return self._answers(lambda: self.engine.generate(asked, sampling))

    def any_died(self, step: int) -> bool:
        """Return whether an engine of any rank died in the last `generate`; if so, `recover`. Collective.

        Raises:
            GuardStop: on every rank, if one died that was restarted in this call of `generate` or in the last.
        """
        again = bool(self._death) and self._calls < self._trusted
        worst = self.mesh.max_over_world(torch.tensor([float(bool(self._death)) + again])).item()
        if self._death:
            what = (
                "again" if again else "the run stops" if worst > 1 else "and is built again for what is left"
            )
            log.error(
                "step %d: rank %d's rollout engine died, %s: %s", step, self.mesh.rank, what, self._death
            )
        if worst > 1:
            raise GuardStop(
                f"step {step}: {'this' if again else 'another'} rank's rollout engine died again before a whole step "
                "was done after its restart; the same command goes on from the last checkpoint"
            )
        return worst > 0

    def recover(
        self, step: int, refit: Callable[[], None], interrupt: Interrupt
    ) -> tuple[list[tuple[int, Rollout]], int]:
        """Restart engines that died and let them finish; the others only take part in `refit`. Collective.

        Return what `generate` would have returned, and how many engines this rank has restarted: 0 or 1.

        Raises:
            GuardStop: one died again.
            Stopped: there was a signal.
        """
        restarted, answers = bool(self._death), []
        if restarted:
            self.engine.restart()
            self._trusted = self._calls + 2
        refit()  # every rank's part of the models is needed for it
        interrupt.check()  # building takes long, and what follows too
        with interrupt.abandonable():
            answers = self._answers(self.engine.resume)
        interrupt.check()
        self.any_died(step)
        return answers, int(restarted)

    def _answers(self, generate: Callable[[], list[Rollout]]) -> list[tuple[int, Rollout]]:
        self._death = ""
        try:
            rollouts = generate()
        except EngineDied as death:  # only text is kept: a traceback holds on to the engine's tensors
            self._death = f"{death}\n{traceback.format_exc()}"
            return []
        for (_, sample), rollout in zip(self._places, rollouts, strict=True):
            rollout.sample = sample
        return [(request, rollout) for (request, _), rollout in zip(self._places, rollouts)]

    def exchange(self, mine: list[tuple[int, Rollout]]) -> list[Rollout]:
        """Return all ranks' answers, ordered by request, then by sample. Collective; waits for the slowest engine."""
        pairs = self.mesh.gather_world(mine)
        pairs.sort(key=lambda pair: (pair[0], pair[1].sample))
        return [rollout for _, rollout in pairs]

    def learn(self, iteration: int, rollouts: Sequence[Rollout]) -> None:
        """Give an iteration's rollouts, all ranks', to the lengths and the drafters."""
        self.lengths.observe(rollouts)
        self.engine.learn(iteration, rollouts)

    def state_dict(self) -> dict[str, Any]:
        """Return what was learned on this rank, as plain values and arrays."""
        return {"lengths": self.lengths.state_dict(), "engine": self.engine.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.lengths.load_state_dict(state["lengths"])
        self.engine.load_state_dict(state["engine"])
