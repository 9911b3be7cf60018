"""How often the policy accepts the draft model's tokens, by position in the draft."""

from __future__ import annotations

from typing import Any

import numpy as np

EVIDENCE = 64.0
"""Trials that a position's acceptance is worth at most when an iteration begins."""
TRUST = 4.0
"""Predicted acceptances of a request before its own record weighs as much as all requests'."""
LARGEST_PROBABILITY = 0.999


class AcceptanceEstimator:
    """Counts of tried and accepted tokens at each of `positions` positions of a draft."""

    def __init__(self, positions: int) -> None:
        self.tried = np.ones(positions)
        self.accepted = np.full(positions, 0.5)

    def observe(self, verified: int, accepted: int) -> tuple[float, int]:
        """Count a draft; return how many acceptances were predicted for it, and how many came."""
        tried, agreed = min(accepted + 1, verified), min(accepted, verified)
        predicted = float((self.accepted[:tried] / self.tried[:tried]).sum())
        self.tried[:tried] += 1
        self.accepted[:agreed] += 1
        return predicted, agreed

    def paths(self, predicted: np.ndarray, accepted: np.ndarray) -> np.ndarray:
        """Return path probabilities, float [B, K], of K tokens of the draft model.

        They follow from what was accepted of all requests and of this request before. They do not look at the
        tokens, which are not drawn yet.

        Args:
            predicted: float [B], acceptances that the record of all requests predicted for each request.
            accepted: float [B], acceptances that came.
        """
        own = (accepted + TRUST) / (predicted + TRUST)
        each = np.minimum(own[:, None] * (self.accepted / self.tried), LARGEST_PROBABILITY)
        return np.cumprod(each, axis=1)

    def forget(self) -> None:
        """Limit what the past is worth: the draft has learned since."""
        scale = np.minimum(1.0, EVIDENCE / self.tried)
        self.tried *= scale
        self.accepted *= scale

    def state_dict(self) -> dict[str, Any]:
        return {"tried": self.tried.copy(), "accepted": self.accepted.copy()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tried[:], self.accepted[:] = state["tried"], state["accepted"]
