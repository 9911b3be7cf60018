"""What stands beside a key's default in the schema: its bounds, and whether a resumed run may change it."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator
from typing import Any, NamedTuple


class Bounds(NamedTuple):
    """Values that a number may have. `why` is put behind the error in parentheses."""

    low: float | None = None
    high: float | None = None
    above: float | None = None
    below: float | None = None
    why: str = ""

    def allow(self, value: float) -> bool:
        return (
            (self.low is None or value >= self.low)
            and (self.high is None or value <= self.high)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        left = f"[{self.low}" if self.above is None else f"({self.above}"
        if self.high is None and self.below is None:
            return f"above {self.above}" if self.low is None else f"at least {self.low}"
        return f"in {left}, {self.high}]" if self.below is None else f"in {left}, {self.below})"


def key(default: Any, *, may_change: bool = False, **bounds: Any) -> Any:
    """Return a dataclass field with this default. `bounds` are `Bounds`' fields.

    Args:
        may_change: a resumed run may have another value: the key says where or how fast it computes, not what.
    """
    metadata = {"may_change": may_change, "bounds": Bounds(**bounds) if bounds else None}
    return dataclasses.field(default=default, metadata=metadata)


class Key(NamedTuple):
    """One key of a configuration, with its value."""

    name: str
    """Dotted: `draft.optim.lr`."""
    owner: type
    """The section's class."""
    hint: Any
    value: Any
    bounds: Bounds | None
    may_change: bool


def keys(section: Any, prefix: str = "", may_change: bool = False) -> Iterator[Key]:
    """Yield all keys of a section and of the sections in it, in the schema's order."""
    hints = typing.get_type_hints(type(section))
    for field in dataclasses.fields(section):
        value, name = getattr(section, field.name), prefix + field.name
        free = may_change or field.metadata.get("may_change", False)
        if dataclasses.is_dataclass(value):
            yield from keys(value, f"{name}.", free)
        else:
            yield Key(name, type(section), hints[field.name], value, field.metadata.get("bounds"), free)
