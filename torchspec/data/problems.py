"""Problems: load them from their source and check them.

Whatever a file holds that cannot be used is a `ConfigError` that names the line or row.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torchspec.config.schema import Data
from torchspec.data.sources import FILE_SOURCES, Row, generate
from torchspec.errors import ConfigError
from torchspec.records import Message, Problem

log = logging.getLogger(__name__)

ROLES = ("system", "user", "assistant")


def load_problems(data: Data) -> tuple[list[Problem], list[Problem]]:
    """The training problems and the held-out ones; the same config always gives the same lists.

    No question is in both lists. reasoning_gym: the first `size` different questions, then `eval_size` more.
    Files: the last `eval_size` problems are held out, the others, cut to `size`, are for training.

    Raises:
        ConfigError: unknown task, bad task_args, unreadable file or line, two problems with one id, or too
            few problems.
    """
    if data.size < 0 or data.eval_size < 0:
        raise ConfigError("data.size and data.eval_size must not be negative")
    if data.source == "reasoning_gym":
        return _generated(data)
    if not data.path:
        raise ConfigError(f'data.path is empty; data.source = "{data.source}" needs a file or folder')
    rows = FILE_SOURCES[data.source]
    problems = _from_rows(rows(data), data)
    if not problems:
        raise ConfigError(f"{data.path}: no problems in it")
    if data.eval_size >= len(problems):
        raise ConfigError(
            f"data.eval_size = {data.eval_size} leaves nothing to train on: {data.path} has {len(problems)} "
            f"problems; lower it"
        )
    cut = len(problems) - data.eval_size
    train, held_out = problems[:cut][: data.size or None], problems[cut:]
    return _without(train, held_out, data), held_out


def _without(train: list[Problem], held_out: list[Problem], data: Data) -> list[Problem]:
    """`train` less the problems whose question is also held out."""

    def question(problem: Problem) -> tuple[tuple[str, str], ...]:
        return tuple((m["role"], m["content"]) for m in problem.messages)

    seen = {question(problem) for problem in held_out}
    kept = [problem for problem in train if question(problem) not in seen]
    if not kept:
        raise ConfigError(f"{data.path}: every training question is also held out; lower data.eval_size")
    if len(kept) < len(train):
        log.warning("%s: %d training problems dropped: also held out", data.path, len(train) - len(kept))
    return kept


def _generated(data: Data) -> tuple[list[Problem], list[Problem]]:
    problems = [
        Problem(
            id=f"{data.task}/{index}",
            messages=_with_system(data, [{"role": "user", "content": entry["question"]}]),
            answer=entry["answer"],
            meta={"entry": entry},
        )
        for index, entry in generate(data)
    ]
    return problems[: data.size], problems[data.size :]


def _from_rows(rows: Iterator[Row], data: Data) -> list[Problem]:
    problems, places = [], {}
    for number, place, row in rows:
        problem = _problem(number, place, row, data)
        if problem.id in places:
            raise ConfigError(
                f"{place}: id {problem.id!r} is taken by {places[problem.id]}; ids must be unique"
            )
        places[problem.id] = place
        problems.append(problem)
    return problems


def _problem(number: int, place: str, row: dict[str, Any], data: Data) -> Problem:
    key = f"{Path(data.path).name}:{number}"
    if data.id_key:
        key = str(_scalar(_field(row, data.id_key, "data.id_key", place), data.id_key, place))
    answer = row.get(data.answer_key)
    used = {data.prompt_key, data.answer_key, data.id_key}
    return Problem(
        id=key,
        messages=_messages(_field(row, data.prompt_key, "data.prompt_key", place), place, data),
        answer=None if answer is None else str(_scalar(answer, data.answer_key, place)),
        meta={name: value for name, value in row.items() if name not in used},
    )


def _field(row: dict[str, Any], name: str, option: str, place: str) -> Any:
    if name not in row:
        raise ConfigError(f'{place}: no field "{name}" ({option}); fields here: {", ".join(row) or "none"}')
    return row[name]


def _scalar(value: Any, name: str, place: str) -> str | int | float:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ConfigError(f'{place}: "{name}" must be a string or a number, got {value!r}')
    return value


def _messages(prompt: Any, place: str, data: Data) -> list[Message]:
    if isinstance(prompt, str) and prompt:
        return _with_system(data, [{"role": "user", "content": prompt}])
    if not isinstance(prompt, list) or not prompt:
        raise ConfigError(
            f'{place}: "{data.prompt_key}" must be a text or a list of chat messages, and not empty, '
            f"got {prompt!r}"
        )
    for i, message in enumerate(prompt):
        if not (
            isinstance(message, dict)
            and message.keys() == {"role", "content"}
            and message["role"] in ROLES
            and isinstance(message["content"], str)
        ):
            raise ConfigError(
                f'{place}: "{data.prompt_key}"[{i}] must be '
                f'{{"role": {" | ".join(ROLES)}, "content": text}}, got {message!r}'
            )
    if data.system_prompt and prompt[0]["role"] == "system":
        raise ConfigError(f'{place}: has a system message of its own; set data.system_prompt = ""')
    return _with_system(data, prompt)


def _with_system(data: Data, messages: list[Message]) -> list[Message]:
    return [{"role": "system", "content": data.system_prompt}, *messages] if data.system_prompt else messages
