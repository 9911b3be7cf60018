"""Where problems come from: reasoning-gym's generators, and the rows of JSONL, Parquet and Hugging Face files."""

from __future__ import annotations

import codecs
import dataclasses
import difflib
import glob
import json
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchspec.config.schema import Data
from torchspec.errors import ConfigError, one_line

DRAWS_PER_PROBLEM = 10
"""reasoning-gym repeats questions; give up after this many draws for each problem asked for."""


def reasoning_gym_task(task: str, task_args: dict[str, Any], size: int) -> Any:
    """Return the reasoning-gym data set `task`, `size` items long; it generates and it scores.

    Raises:
        ConfigError: unknown task, or arguments its generator does not take.
    """
    with warnings.catch_warnings():  # a dependency of reasoning-gym compiles with SyntaxWarnings
        warnings.simplefilter("ignore", SyntaxWarning)
        from reasoning_gym.factory import DATASETS, create_dataset
    if task not in DATASETS:
        close = difflib.get_close_matches(task, DATASETS, n=1, cutoff=0.0)[0]
        raise ConfigError(f'data.task = "{task}" is not a reasoning-gym task; did you mean "{close}"?')
    names = {f.name for f in dataclasses.fields(DATASETS[task][1])} - {"size"}
    for name in task_args:
        if name not in names:
            hint = "set data.size" if name == "size" else f"it takes: {', '.join(sorted(names))}"
            raise ConfigError(f'data.task_args: "{task}" takes no {name!r} here; {hint}')
    try:
        return create_dataset(task, **{"seed": 0, **task_args}, size=size)
    except Exception as error:  # each task checks its arguments in its own way
        raise ConfigError(f'data.task_args: "{task}" refuses {task_args}: {one_line(error)}') from error


def generate(data: Data) -> list[tuple[int, dict[str, Any]]]:
    """Return the first `size + eval_size` different questions of a reasoning-gym task, each with its index.

    Raises:
        ConfigError: unknown task, bad task_args, no size, or too few different questions.
    """
    if data.size == 0:
        raise ConfigError(
            "data.size = 0 (all) is for files; reasoning_gym generates without end: set a number"
        )
    wanted = data.size + data.eval_size
    draws = DRAWS_PER_PROBLEM * wanted
    task = reasoning_gym_task(data.task, data.task_args, draws)
    entries: dict[str, tuple[int, dict[str, Any]]] = {}  # by question
    for index in range(draws):
        try:
            entry = task[index]
        except Exception as error:  # arguments that pass the task's own check may still be impossible
            raise ConfigError(
                f'data.task_args: "{data.task}" fails at problem {index} with {data.task_args}: '
                f"{one_line(error)}"
            ) from error
        entries.setdefault(entry["question"], (index, entry))
        if len(entries) == wanted:
            return list(entries.values())
    raise ConfigError(
        f'data.task = "{data.task}" gave only {len(entries)} different questions in {draws} draws, '
        f"data.size + data.eval_size ask for {wanted}; lower them, or widen data.task_args"
    )


# Files


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a file: an id by its number counted from 1, its place for messages, and its fields.

    `fields` is a message where the row cannot be read.
    """

    id: str
    place: str
    fields: dict[str, Any] | str


SUFFIXES = {"jsonl": ("*.jsonl", "*.json"), "parquet": ("*.parquet",)}


def data_files(data: Data) -> list[Path]:
    """Return the files that `data.path` stands for: one file, the shards in a folder, or those of a glob, sorted.

    A data set folder of Hugging Face is returned as it is.

    Raises:
        ConfigError: there is none.
    """
    path = Path(data.path)
    if data.source not in SUFFIXES or path.is_file():
        return [path]
    patterns = SUFFIXES[data.source]
    if path.is_dir():
        files = sorted(f for pattern in patterns for f in path.glob(pattern))
        if not files:
            raise ConfigError(f"{path}: no file of {' or '.join(patterns)} in this folder (data.path)")
        return files
    files = sorted(f for f in map(Path, glob.glob(data.path, recursive=True)) if f.is_file())
    if not files:
        kind = "file matches this" if glob.has_magic(data.path) else "such file"
        raise ConfigError(f"{path}: no {kind} (data.path)")
    return files


def file_rows(data: Data) -> Iterator[Row]:
    """Yield the rows of all files of `data.path`, in order.

    Raises:
        ConfigError: no such file, or one that cannot be read at all.
    """
    files = data_files(data)
    root = Path(os.path.commonpath([f.parent for f in files]))
    for path in files:
        name = path.relative_to(root)
        for number, (place, fields) in FILE_SOURCES[data.source](path, data):
            yield Row(f"{name}:{number}", place, fields)


Numbered = Iterator[tuple[int, tuple[str, dict[str, Any] | str]]]

SIGNATURES = {
    b"\xff\xfe": "is UTF-16 or UTF-32; save it as UTF-8",
    b"\xfe\xff": "is UTF-16; save it as UTF-8",
    b"\x1f\x8b": "is compressed with gzip; decompress it",
    b"PAR1": 'is a Parquet file; set data.source = "parquet"',
}


def _jsonl_rows(path: Path, _: Data) -> Numbered:
    content = path.read_bytes()
    for signature, message in SIGNATURES.items():
        if content.startswith(signature):
            raise ConfigError(f"{path}: {message}")
    if b"\0" in content[:4]:
        raise ConfigError(f"{path}: is UTF-16 without a byte order mark; save it as UTF-8")
    if (items := _json_array(content, path)) is not None:
        for number, item in enumerate(items, start=1):
            yield number, (f"{path}: item {number}", _object(item))
        return
    # Lines of bytes, so that a line that is not UTF-8 still has its number. A byte order mark starts a file, and a
    # line where files were joined.
    for number, line in enumerate(content.split(b"\n"), start=1):
        if line.strip():
            try:
                fields = _object(json.loads(line.decode("utf-8-sig")))
            except (ValueError, RecursionError) as error:  # UnicodeDecodeError, JSONDecodeError
                fields = f"not a JSON line: {one_line(error)}"
            yield number, (f"{path}:{number}", fields)


def _json_array(content: bytes, path: Path) -> list[Any] | None:
    """Return the items of a file that is one JSON array of objects; None for one that has an object a line."""
    text = content.removeprefix(codecs.BOM_UTF8).lstrip()
    if not text.startswith(b"["):
        return None
    try:
        items = json.loads(text.decode())
    except (ValueError, RecursionError) as error:
        if text.split(b"\n")[0].strip() in (b"[", b"[{"):
            raise ConfigError(f"{path}: begins as a JSON array, but is none: {one_line(error)}") from None
        return None
    return items if items and isinstance(items[0], dict) else None


def _object(value: Any) -> dict[str, Any] | str:
    return value if isinstance(value, dict) else f"must be a JSON object, got {type(value).__name__}"


def _parquet_rows(path: Path, _: Data) -> Numbered:
    import pyarrow
    from pyarrow import parquet

    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                for fields in batch.to_pylist():
                    number += 1
                    yield number, (f"{path}: row {number}", fields)
    except (pyarrow.ArrowException, OSError) as error:  # not Parquet, or damaged pages
        raise ConfigError(f"{path}: not a Parquet file: {one_line(error)}") from None


def _hf_rows(path: Path, data: Data) -> Numbered:
    import datasets

    try:
        loaded = datasets.load_from_disk(str(path))
    except FileNotFoundError:
        raise ConfigError(
            f"{path}: no data set folder (data.path); write one with datasets' save_to_disk, or set "
            f'data.source = "parquet" for a folder of Parquet files'
        ) from None
    if isinstance(loaded, datasets.DatasetDict):
        if data.split not in loaded:
            raise ConfigError(
                f'{path}: no split "{data.split}" (data.split); it has: {", ".join(map(str, loaded))}'
            )
        loaded = loaded[data.split]
    for number, fields in enumerate(loaded.with_format(None), start=1):  # a saved format may be numpy's
        yield number, (f"{path}: row {number}", dict(fields))


FILE_SOURCES: dict[str, Callable[[Path, Data], Numbered]] = {
    "jsonl": _jsonl_rows,
    "parquet": _parquet_rows,
    "hf": _hf_rows,
}
