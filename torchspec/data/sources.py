"""Where problems come from: reasoning-gym's generators, and the rows of JSONL, Parquet and Hugging Face files."""

from __future__ import annotations

import difflib
import json
import warnings
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from torchspec.config.schema import Data
from torchspec.errors import ConfigError, one_line

DRAWS_PER_PROBLEM = 10
"""reasoning-gym repeats questions; give up after this many draws for each problem asked for."""


def reasoning_gym_task(task: str, task_args: dict[str, Any], size: int) -> Any:
    """The reasoning-gym data set `task`, `size` items long; it generates and it scores.

    Raises:
        ConfigError: unknown task, or arguments its generator does not take.
    """
    with warnings.catch_warnings():  # a dependency of reasoning-gym compiles with SyntaxWarnings
        warnings.simplefilter("ignore", SyntaxWarning)
        from reasoning_gym.factory import DATASETS, create_dataset
    if task not in DATASETS:
        close = difflib.get_close_matches(task, DATASETS, n=1, cutoff=0.0)[0]
        raise ConfigError(f'data.task = "{task}" is not a reasoning-gym task; did you mean "{close}"?')
    names = {f.name for f in fields(DATASETS[task][1])} - {"size"}
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


# Files. A row travels with its number, counted from 1, and its place, for messages.

Row = tuple[int, str, dict[str, Any]]


def jsonl_rows(data: Data) -> Iterator[Row]:
    path = _existing_file(data)
    with path.open("rb") as file:  # bytes, so that a line that is not UTF-8 still has its number
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            place = f"{path}:{number}"
            try:
                row = json.loads(line.decode("utf-8"))
            except ValueError as error:  # UnicodeDecodeError, JSONDecodeError
                raise ConfigError(f"{place}: not a JSON line: {one_line(error)}") from None
            if not isinstance(row, dict):
                raise ConfigError(f"{place}: must be a JSON object, got {type(row).__name__}")
            yield number, place, row


def parquet_rows(data: Data) -> Iterator[Row]:
    import pyarrow
    from pyarrow import parquet

    path = _existing_file(data)
    try:
        rows = parquet.read_table(path).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:  # not Parquet, or damaged pages
        raise ConfigError(f"{path}: not a Parquet file: {one_line(error)}") from None
    for number, row in enumerate(rows, start=1):
        yield number, f"{path}: row {number}", row


def hf_rows(data: Data) -> Iterator[Row]:
    import datasets

    try:
        loaded = datasets.load_from_disk(data.path)
    except FileNotFoundError:
        raise ConfigError(
            f"{data.path}: no data set folder (data.path); write one with datasets' save_to_disk"
        ) from None
    if isinstance(loaded, datasets.DatasetDict):
        if data.split not in loaded:
            raise ConfigError(
                f'{data.path}: no split "{data.split}" (data.split); it has: {", ".join(map(str, loaded))}'
            )
        loaded = loaded[data.split]
    for number, row in enumerate(loaded, start=1):
        yield number, f"{data.path}: row {number}", dict(row)


def _existing_file(data: Data) -> Path:
    path = Path(data.path)
    if not path.is_file():
        raise ConfigError(f"{path}: no such file (data.path)")
    return path


FILE_SOURCES: dict[str, Callable[[Data], Iterator[Row]]] = {
    "jsonl": jsonl_rows,
    "parquet": parquet_rows,
    "hf": hf_rows,
}
