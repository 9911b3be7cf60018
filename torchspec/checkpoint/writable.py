"""Try an output's place before the work whose result it will hold."""

from __future__ import annotations

import tempfile
from pathlib import Path

from torchspec.errors import ConfigError


def check_writable(path: Path, name: str) -> None:
    """Raise ConfigError unless a file can be created in the nearest existing parent of `path`.

    Args:
        name: the option or key that gave the path, for the message.
    """
    parent = path.absolute().parent
    while not parent.exists():
        parent = parent.parent
    try:
        with tempfile.NamedTemporaryFile(dir=parent):
            pass
    except OSError as error:
        raise ConfigError(
            f"{name} {path}: nothing can be written in {parent} ({error.strerror}); give another path"
        ) from error
