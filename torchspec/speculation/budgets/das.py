"""The rule of DAS (arXiv 2511.13841, section 4.2.3): draft tokens by class of response length."""

from __future__ import annotations

import numpy as np

from torchspec.speculation.budgets.base import BudgetRule, Step


class Das(BudgetRule):
    """Allow `class_tokens` by the class in which the request will most likely end."""

    needs_costs = True

    def limits(self, step: Step) -> np.ndarray:
        return np.array(self.settings.class_tokens)[
            self.state.survival.classes(step.expected, step.generated)
        ]
