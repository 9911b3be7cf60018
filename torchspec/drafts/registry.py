"""Which draft architectures there are, by name. Others enter with `register`, before a config is used."""

from __future__ import annotations

from typing import Any

from torchspec.drafts.base import DraftArchitecture
from torchspec.drafts.eagle3 import EAGLE3
from torchspec.errors import ConfigError

_ARCHITECTURES: dict[str, DraftArchitecture] = {}


def register(architecture: DraftArchitecture) -> None:
    """Enter an architecture, as the value `architecture.name` of draft.arch."""
    _ARCHITECTURES[architecture.name] = architecture


register(EAGLE3)


def get(name: str) -> DraftArchitecture:
    """Return the architecture of this name.

    Raises:
        ConfigError: there is none.
    """
    if name not in _ARCHITECTURES:
        raise ConfigError(
            f"draft.arch = {name!r} is not allowed; one of: {', '.join(sorted(_ARCHITECTURES))}"
        )
    return _ARCHITECTURES[name]


def served_as(name: str) -> DraftArchitecture | None:
    """Return the architecture that vLLM serves under this value of config.json's `architectures`, if one is."""
    return next((a for a in _ARCHITECTURES.values() if name in a.served_as), None)


def of_checkpoint(config: dict[str, Any]) -> DraftArchitecture:
    """Return the architecture of a draft's config.json.

    Raises:
        ConfigError: the checkpoint holds no draft that can be served.
    """
    name = (config.get("architectures") or ["none"])[0]
    if found := served_as(name):
        return found
    allowed = [known for a in _ARCHITECTURES.values() for known in a.served_as]
    raise ConfigError(f"its architecture is {name}, allowed are {', '.join(allowed)}")
