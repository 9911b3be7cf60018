"""The reference of all configuration keys: `python -m torchspec.config.document > docs/config.md` (`make docs`)."""

from __future__ import annotations

import ast
import inspect
import json
import typing
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

from torchspec.config import schema
from torchspec.config.keys import Key, keys

INTRODUCTION = """\
# Configuration

Made from `torchspec/config/schema.py` by `make docs`; do not edit.

A file has `[section]` and `key = value`; on the command line the same is `--section.key value`, and wins.
**Resume** says whether a run that was stopped may go on with another value (docs/durability.md).
"""
HEADER = "| key | type | default | bounds | resume | meaning |\n|---|---|---|---|---|---|"


def render() -> str:
    """Return docs/config.md."""
    meanings = dict(_docstrings())
    parts = [INTRODUCTION]
    for section, group in groupby(keys(schema.Config()), lambda key: key.name.rpartition(".")[0]):
        members = list(group)
        about = inspect.cleandoc(meanings.get((members[0].owner.__name__, ""), ""))
        rows = [
            _row(key, meanings.get((key.owner.__name__, key.name.rpartition(".")[2]), "")) for key in members
        ]
        parts.append("\n".join([f"## [{section}]", *([about] if about else []), "", HEADER, *rows, ""]))
    return "\n".join(parts)


def _row(key: Key, meaning: str) -> str:
    bounds = str(key.bounds) if key.bounds else ""
    default = f"`{json.dumps(key.value)}`"
    cells = [f"`{key.name.rpartition('.')[2]}`", _type(key.hint), default, bounds]
    cells += ["may change" if key.may_change else "", " ".join(meaning.split())]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _type(hint: Any) -> str:
    if typing.get_origin(hint) is Literal:
        return " or ".join(f'`"{value}"`' for value in typing.get_args(hint))
    if typing.get_origin(hint) is list:
        return f"list of {typing.get_args(hint)[0].__name__}"
    return "table" if typing.get_origin(hint) is dict else hint.__name__


def _docstrings() -> Iterator[tuple[tuple[str, str], str]]:
    """Yield what stands under each class (key name "") and each field of the schema."""
    tree = ast.parse(Path(schema.__file__).read_text(encoding="utf-8"))
    for owner in tree.body:
        if isinstance(owner, ast.ClassDef):
            yield (owner.name, ""), ast.get_docstring(owner) or ""
            for node, after in zip(owner.body, owner.body[1:]):
                match node, after:
                    case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(
                        value=ast.Constant(value=str(text))
                    ):
                        yield (owner.name, name), text


if __name__ == "__main__":
    print(render(), end="")
