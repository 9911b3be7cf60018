"""Problems: load them from their source and check them.

What a file holds that cannot be used is counted in one `ConfigError` that names the first lines or rows.
"""

from __future__ import annotations

import difflib
import json
import logging
import reprlib
from decimal import Decimal
from typing import Any

from torchspec.config.schema import Data
from torchspec.data.answers import compile_pattern, counted, last_match
from torchspec.data.sources import Row, file_rows, generate
from torchspec.errors import ConfigError
from torchspec.records import Message, Problem

log = logging.getLogger(__name__)

ROLES = ("system", "user", "assistant")


def load_problems(data: Data) -> tuple[list[Problem], list[Problem]]:
    """Return the training problems and the held-out ones; the same config always gives the same lists.

    No question is in both lists. reasoning_gym: the first `size` different questions, then `eval_size` more.
    Files: the last `eval_size` rows are held out. The others are for training, without repetitions, cut to `size`.

    Raises:
        ConfigError: unknown task, bad task_args, unreadable files or lines, fields that do not exist, two
            different problems with one id, or too few problems.
    """
    if data.size < 0 or data.eval_size < 0:
        raise ConfigError("data.size and data.eval_size must not be negative")
    if data.source == "reasoning_gym":
        return _generated(data)
    if not data.path:
        raise ConfigError(f'data.path is empty; data.source = "{data.source}" needs a file or folder')
    problems = _Reader(data).read()
    if not problems:
        raise ConfigError(f"{data.path}: no problems in it")
    if data.eval_size >= len(problems):
        raise ConfigError(
            f"data.eval_size = {data.eval_size} leaves nothing to train on: {data.path} has {len(problems)} "
            f"problems; lower it"
        )
    cut = len(problems) - data.eval_size
    train, held_out = problems[:cut], _unique(problems[cut:])
    kept = _unique(_without(train, held_out, data))
    if repeated := len(problems) - len(_unique(problems)):
        log.warning(
            "%s: %d of %d rows repeat a problem, and are left out", data.path, repeated, len(problems)
        )
    return kept[: data.size or None], held_out


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


def _unique(problems: list[Problem]) -> list[Problem]:
    return list({problem.id: problem for problem in problems}.values())


def _without(train: list[Problem], held_out: list[Problem], data: Data) -> list[Problem]:
    """Return `train` less the problems whose question is also held out."""

    def question(problem: Problem) -> tuple[tuple[str, str], ...]:
        return tuple((m["role"], m["content"]) for m in problem.messages)

    seen = {question(problem) for problem in held_out}
    kept = [problem for problem in train if question(problem) not in seen]
    if not kept:
        raise ConfigError(f"{data.path}: every training question is also held out; lower data.eval_size")
    if len(kept) < len(train):
        log.warning("%s: %d training problems dropped: also held out", data.path, len(train) - len(kept))
    return kept


class _RowError(Exception):
    """A row that cannot be used; the message begins with its place."""


class _Unmatched(Exception):
    """A row whose reference has no match for data.answer_pattern."""


class _Reader:
    """Make problems of a file's rows, and gather what is wrong with them."""

    def __init__(self, data: Data) -> None:
        self.data = data
        self.pattern = compile_pattern("data.answer_pattern", data.answer_pattern)
        self.errors: list[str] = []
        self.unmatched: list[str] = []
        self.names: dict[str, None] = {}
        """Fields that occur in some row, nested ones by their dotted key."""
        self.has_answer = False
        self.places: dict[str, str] = {}
        """Places by id."""
        self.first: dict[str, Problem] = {}
        """By content: the first problem that has it."""

    def read(self) -> list[Problem]:
        """Return the problem of each row. A row that repeats a problem gives the same object again."""
        problems, count = [], 0
        for row in file_rows(self.data):
            count += 1
            try:
                problems += self._problem(row)
            except _Unmatched as error:
                self.unmatched.append(str(error))
            except _RowError as error:
                self.errors.append(str(error))
        if self.errors:
            raise ConfigError(counted(self.errors, f"of {count} rows cannot be used"))
        key = self.data.answer_key
        if count and not self.has_answer and key != Data().answer_key:
            raise ConfigError(
                f'{self.data.path}: no field "{key}" (data.answer_key) in any of {count} rows; {self._known(key)}'
            )
        if self.unmatched and self.data.unreadable == "error":
            text = f"of {count} references have no match for it"
            raise ConfigError(f'{counted(self.unmatched, text)}; data.unreadable = "skip" leaves them out')
        if self.unmatched:
            text = "%s: %d of %d rows left out (data.unreadable): no match for data.answer_pattern"
            log.warning(text, self.data.path, len(self.unmatched), count)
        return problems

    def _problem(self, row: Row) -> list[Problem]:
        data, place, fields = self.data, row.place, row.fields
        if isinstance(fields, str):
            raise _RowError(f"{place}: {fields}")
        names = dict.fromkeys(_dotted(fields))
        self.names |= names
        prompt = self._field(row, data.prompt_key, "data.prompt_key", names)
        identity = self._field(row, data.id_key, "data.id_key", names) if data.id_key else None
        answer = _lookup(fields, data.answer_key)
        self.has_answer |= _exists(fields, data.answer_key)
        text = self._answer(answer, place)
        messages = self._messages(prompt, place)
        used = {data.prompt_key, data.answer_key, data.id_key}
        problem = Problem(
            id=row.id if identity is None and not data.id_key else str(_scalar(identity, data.id_key, place)),
            messages=messages,
            answer=text,
            meta={name: value for name, value in fields.items() if name not in used},
        )
        return [self._known_or_new(problem, place)]

    def _answer(self, answer: Any, place: str) -> str | None:
        if answer is None or answer != answer:  # NaN is null in a column that pandas wrote
            return None
        text = str(_scalar(answer, self.data.answer_key, place))
        if not self.data.answer_pattern:
            return text
        found = last_match(self.pattern, text)
        if found is None:
            raise _Unmatched(f"{place}: no match for data.answer_pattern in {reprlib.repr(text)}")
        return found

    def _known_or_new(self, problem: Problem, place: str) -> Problem:
        content = json.dumps([problem.messages, problem.answer, problem.meta], default=repr)
        if problem.id in self.places:
            raise _RowError(
                f"{place}: id {problem.id!r} is taken by {self.places[problem.id]}; ids must be unique"
            )
        self.places[problem.id] = place
        return self.first.setdefault(content, problem)

    def _field(self, row: Row, name: str, option: str, names: dict[str, None]) -> Any:
        assert isinstance(row.fields, dict)
        if not _exists(row.fields, name):
            raise _RowError(
                f'{row.place}: no field "{name}" ({option}); fields here: {", ".join(names) or "none"}'
            )
        return _lookup(row.fields, name)

    def _known(self, key: str) -> str:
        last = {name.rpartition(".")[2]: name for name in self.names}
        near = last.get(key) or next(iter(difflib.get_close_matches(key, self.names, n=1)), None)
        hint = f"did you mean {near}? " if near else ""
        return f"{hint}fields here: {', '.join(self.names)}"

    def _messages(self, prompt: Any, place: str) -> list[Message]:
        data, key = self.data, self.data.prompt_key
        if isinstance(prompt, str) and prompt.strip():
            return _with_system(data, [{"role": "user", "content": prompt}])
        if not isinstance(prompt, list) or not prompt:
            raise _RowError(
                f'{place}: "{key}" must be a text or a list of chat messages, and not empty, got {prompt!r}'
            )
        messages = [_message(message) for message in prompt]
        for i, (message, given) in enumerate(zip(messages, prompt)):
            if message is None:
                raise _RowError(
                    f'{place}: "{key}"[{i}] must be '
                    f'{{"role": {" | ".join(ROLES)}, "content": text}}, got {given!r}'
                )
        chat = [message for message in messages if message]
        if data.system_prompt and chat[0]["role"] == "system":
            raise _RowError(f'{place}: has a system message of its own; set data.system_prompt = ""')
        if chat[-1]["role"] != "user":
            raise _RowError(
                f'{place}: "{key}" must end with a message of the user, for the policy to answer; its last role '
                f"is {chat[-1]['role']}"
            )
        return _with_system(data, chat)


def _message(given: Any) -> Message | None:
    """Return a chat message without the fields that are null; None if it is not one."""
    if not isinstance(given, dict):
        return None
    message = {name: value for name, value in given.items() if value is not None}
    good = message.keys() == {"role", "content"} and message["role"] in ROLES
    return message if good and isinstance(message["content"], str) else None


def _exists(fields: dict[str, Any], key: str) -> bool:
    return key in fields or any(name == key or name.startswith(f"{key}.") for name in _dotted(fields))


def _lookup(fields: dict[str, Any], key: str) -> Any:
    """Return the value of a key, or of a dotted key in nested fields; None if there is none."""
    if key in fields:
        return fields[key]
    value: Any = fields
    for name in key.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _dotted(fields: dict[str, Any]) -> list[str]:
    """Return the names of the fields; those of a nested field as dotted keys."""
    names = []
    for name, value in fields.items():
        nested = _dotted(value) if isinstance(value, dict) else []
        names += [f"{name}.{inner}" for inner in nested] or [name]
    return names


def _scalar(value: Any, name: str, place: str) -> str | int | float | Decimal:
    if isinstance(value, bool) or not isinstance(value, str | int | float | Decimal):
        raise _RowError(f'{place}: "{name}" must be a string or a number, got {value!r}')
    return value


def _with_system(data: Data, messages: list[Message]) -> list[Message]:
    return [{"role": "system", "content": data.system_prompt}, *messages] if data.system_prompt else messages
