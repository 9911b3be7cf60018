"""All ranks' engines as one: who answers what, and what each of them learns from the answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torchspec.mesh import Mesh
from torchspec.records import Rollout
from torchspec.rollout.balance import LengthStats, dispatch
from torchspec.rollout.engine import Engine, Request, Sampling


class Fleet:
    """This rank's engine among those of all ranks.

    Every rank is given the same requests and computes the same dispatch from the same lengths, so that no rank
    has to tell another what to do; and every rank sees all rollouts, because a problem may come to another engine
    the next time.

    Args:
        engine: this rank's.
        lengths: the lengths that the engine predicts with as well.
        tail_weight: see `balance.dispatch`.
    """

    def __init__(self, mesh: Mesh, engine: Engine, lengths: LengthStats, tail_weight: float) -> None:
        self.mesh, self.engine, self.lengths, self.tail_weight = mesh, engine, lengths, tail_weight

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[tuple[int, Rollout]]:
        """This rank's share of the answers, each with its request's index; the longest are begun first."""
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
        owners = [share.request for share in mine for _ in range(share.samples)]
        rollouts = self.engine.generate(asked, sampling)
        for index, rollout in zip(owners, rollouts):
            rollout.sample += before[index]
        return list(zip(owners, rollouts))

    def exchange(self, mine: list[tuple[int, Rollout]]) -> list[Rollout]:
        """All ranks' answers, ordered by request, then by sample. Collective; waits for the slowest engine."""
        everything = self.mesh.gather_world(mine)
        everything.sort(key=lambda pair: (pair[0], pair[1].sample))
        return [rollout for _, rollout in everything]

    def learn(self, iteration: int, rollouts: Sequence[Rollout]) -> None:
        """Lengths and drafters take in an iteration's rollouts, all ranks'."""
        self.lengths.observe(rollouts)
        self.engine.learn(iteration, rollouts)

    def state_dict(self) -> dict[str, Any]:
        """What was learned on this rank, as plain values and arrays."""
        return {"lengths": self.lengths.state_dict(), "engine": self.engine.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.lengths.load_state_dict(state["lengths"])
        self.engine.load_state_dict(state["engine"])
