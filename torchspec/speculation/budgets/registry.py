"""Budget rules by the name that budget.rule gives."""

from __future__ import annotations

import difflib

from torchspec.config.schema import Budget as BudgetConfig
from torchspec.errors import ConfigError
from torchspec.speculation.budgets.base import BudgetRule, BudgetState
from torchspec.speculation.budgets.das import Das
from torchspec.speculation.budgets.das_closed import DasClosed
from torchspec.speculation.budgets.fixed import Fixed, Off, Unlimited
from torchspec.speculation.budgets.price import Price
from torchspec.speculation.budgets.survival import Survival
from torchspec.speculation.cost_table import CostTable

RULES: dict[str, type[BudgetRule]] = {
    "off": Off,
    "fixed": Fixed,
    "unlimited": Unlimited,
    "das": Das,
    "das_closed": DasClosed,
    "price": Price,
}


def register(name: str, rule: type[BudgetRule]) -> None:
    """Add a rule from outside this package; budget.rule = name selects it.

    Raises:
        ValueError: the name is taken.
    """
    if name in RULES:
        raise ValueError(f"a budget rule {name!r} is already registered")
    RULES[name] = rule


def rule_class(name: str, key: str = "budget.rule") -> type[BudgetRule]:
    """Return the rule of this name. Raise ConfigError, with the nearest name, if there is none; `key` said it."""
    if name not in RULES:
        near = difflib.get_close_matches(name, RULES, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError(f"{key} = {name!r} is not allowed; {hint}one of: {', '.join(RULES)}")
    return RULES[name]


def build_rule(settings: BudgetConfig, cost: CostTable, max_draft: int = 32) -> BudgetRule:
    """Return the rule that `settings` name, with nothing measured yet but `cost`.

    Raises:
        ConfigError: unknown rule.
    """
    state = BudgetState(cost, Survival(settings.short_below, settings.long_from))
    return rule_class(settings.rule)(settings, state, max_draft)
