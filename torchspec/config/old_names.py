"""Names that keys and values had in earlier versions.

In a user's file and on the command line an old name is an error that gives the new one. In the config.toml that an
earlier version wrote into a run's folder it is translated, so that its checkpoints can be resumed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torchspec.errors import ConfigError

KEYS = {
    "tap.timeout_s": "parallel.tap_timeout_s",
    "balance.tail_weight": "rollout.tail_weight",
    "draft.min_tau": "guards.min_tau",
    "draft.placement": "parallel.draft_placement",
    "budget.policy": "budget.rule",
}
VALUES = {
    ("parallel.attention", "passq"): "query_ring",
    ("rollout.drafter", "eagle3"): "model",
}
SINCE = "0.2"


def refuse(pairs: Iterable[tuple[str, Any]], where: str) -> None:
    """Raise a ConfigError for the first old name in (dotted key, value) pairs."""
    for key, value in pairs:
        if key in KEYS:
            raise ConfigError(f"{where}: {key} is called {KEYS[key]} since {SINCE}")
        for (dotted, old), new in VALUES.items():
            if (key, value) == (dotted, old):
                raise ConfigError(f'{where}: {key} = "{old}" is called "{new}" since {SINCE}')


def pairs_of(table: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield what stands in the sections of a TOML file, by dotted key."""
    for section, content in table.items():
        if isinstance(content, dict):
            yield from ((f"{section}.{key}", value) for key, value in content.items())


def translate(table: dict[str, Any]) -> dict[str, Any]:
    """Give a TOML file's sections the names of today, in place."""
    for old, new in KEYS.items():
        (section, key), (to, name) = old.split("."), new.split(".")
        if key in table.get(section, {}):
            table.setdefault(to, {})[name] = table[section].pop(key)
            if not table[section]:
                del table[section]
    for (dotted, old), new in VALUES.items():
        section, key = dotted.split(".")
        if table.get(section, {}).get(key) == old:
            table[section][key] = new
    return table
