"""Fill the configuration from TOML and the command line, and refuse what cannot work.

The command line wins over TOML, TOML over the defaults. `[section] key = value` in the file is
`--section.key value` on the command line. Whatever is wrong is a `ConfigError` of one line: where, what, and the
remedy.
"""

from __future__ import annotations

import dataclasses
import difflib
import tomllib
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from torchspec.config.checks import check
from torchspec.config.old_names import pairs_of, refuse, translate
from torchspec.config.schema import Config
from torchspec.errors import ConfigError


def load(path: str | Path | None = None, overrides: Sequence[str] = ()) -> Config:
    """Read a config: defaults, then the TOML file, then `--section.key value` overrides, then `check`.

    Raises:
        ConfigError: unreadable file, unknown key, wrong type, impossible value or combination.
    """
    config = Config()
    if path is not None:
        table = _read_toml(Path(path))
        refuse(pairs_of(table), str(path))
        _apply_table(config, table, where=str(path), prefix="")
    for key, raw in _split_overrides(list(overrides)):
        refuse([(key, raw.strip("'\""))], "command line")
        _override(config, key, raw)
    try:
        check(config)
    except ConfigError as error:
        raise ConfigError(f"{path or 'command line'}: {error}") from None
    return config


def load_recorded(path: Path) -> Config:
    """Read the config.toml in a run's folder, which an earlier version may have written, with old names.

    Raises:
        ConfigError: it is no config.toml of a run.
    """
    config = Config()
    _apply_table(config, translate(_read_toml(path)), where=str(path), prefix="")
    return config


def _read_toml(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ConfigError(f"{path}: no such config file (the shipped ones are in configs/)")
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None


def _apply_table(target: Any, table: dict[str, Any], *, where: str, prefix: str) -> None:
    hints = typing.get_type_hints(type(target))
    for key, value in table.items():
        dotted = prefix + key
        if key not in hints:
            raise ConfigError(f"{where}: unknown key {dotted}; {_nearest(key, hints, prefix)}")
        current = getattr(target, key)
        if dataclasses.is_dataclass(current):
            if not isinstance(value, dict):
                raise ConfigError(f"{where}: {dotted} is a section, write [{dotted}]")
            _apply_table(current, value, where=where, prefix=dotted + ".")
        else:
            setattr(target, key, _typed(value, hints[key], f"{where}: {dotted}"))


def _nearest(key: str, valid: dict[str, Any], prefix: str) -> str:
    close = difflib.get_close_matches(key, valid, n=1)
    if close:
        return f"did you mean {prefix}{close[0]}?"
    return f"valid keys here: {', '.join(sorted(valid))}"


def _typed(value: Any, hint: Any, label: str) -> Any:
    """`value` as the field's type; an int is a float's value, nothing else is converted."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        if value not in args:
            near = difflib.get_close_matches(str(value), map(str, args), n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ConfigError(
                f"{label} = {value!r} is not allowed; {hint}one of: {', '.join(map(str, args))}"
            )
        return value
    if origin is list:
        if not isinstance(value, list):
            raise ConfigError(f"{label} must be a list of {args[0].__name__}, got {value!r}")
        return [_typed(item, args[0], f"{label}[{i}]") for i, item in enumerate(value)]
    kind = origin or hint
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise ConfigError(f"{label} must be {kind.__name__}, got {type(value).__name__} {value!r}")
    return value


def _split_overrides(argv: list[str]) -> list[tuple[str, str]]:
    pairs, rest = [], list(argv)
    while rest:
        flag = rest.pop(0)
        if not flag.startswith("--"):
            raise ConfigError(f"command line: unexpected {flag!r}; overrides are --section.key value")
        key, has_equals, raw = flag[2:].partition("=")
        if not has_equals:
            if not rest:
                raise ConfigError(f"command line: {flag} needs a value")
            raw = rest.pop(0)
        pairs.append((key.replace("-", "_"), raw))
    return pairs


def _override(config: Config, dotted: str, raw: str) -> None:
    """Set one dotted key from its command-line text, read as a TOML value, or as a bare string."""
    target: Any = config
    *sections, key = dotted.split(".")
    for depth, name in enumerate(sections):
        prefix = "".join(s + "." for s in sections[:depth])
        hints = typing.get_type_hints(type(target))
        if name not in hints or not dataclasses.is_dataclass(getattr(target, name)):
            raise ConfigError(
                f"command line: unknown section {prefix}{name}; {_nearest(name, hints, prefix)}"
            )
        target = getattr(target, name)
    hints = typing.get_type_hints(type(target))
    value: Any = raw
    if hints.get(key) is not str:
        try:
            value = tomllib.loads(f"value = {raw}")["value"]
        except tomllib.TOMLDecodeError:
            value = raw
    prefix = "".join(s + "." for s in sections)
    _apply_table(target, {key: value}, where="command line", prefix=prefix)
