"""A budget rule from outside the package, which knows the registry alone."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from torchspec.config.schema import Config
from torchspec.speculation.budgets.base import BudgetRule, Step
from torchspec.speculation.budgets.registry import RULES, register
from torchspec.speculation.lengths import LengthStats
from torchspec.speculation.speculator import Speculator


class Alternating(BudgetRule):
    """Every second request of a step may propose two tokens."""

    def limits(self, step: Step) -> np.ndarray:
        return 2 * (np.arange(len(step.generated)) % 2)


@pytest.fixture
def alternating() -> Iterator[str]:
    register("alternating", Alternating)
    yield "alternating"
    del RULES["alternating"]


def test_a_rule_from_outside_decides_what_is_drafted(alternating: str) -> None:
    config = Config()
    config.budget.rule = alternating
    config.rollout.num_draft_tokens = 4
    speculator = Speculator(config, LengthStats(default=30))
    ids = ["0", "1"]
    for own in ids:
        speculator.begin(own, "p", [1, 2, 3], 100)
    speculator.advance(ids, [[7], [7]], [0, 0], [0, 0], 0.0)
    plan = speculator.plan(ids)
    assert speculator.complete(plan, [[8] * (plan.passes or 0)] * 2) == [[], [8, 8]]


def test_a_name_is_given_once() -> None:
    with pytest.raises(ValueError, match="already registered"):
        register("price", Alternating)
