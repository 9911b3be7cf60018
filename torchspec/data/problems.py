"""Problems: where they come from, the order they are asked in, and their prompts as tokens.

Four sources give the same `Problem` records: reasoning-gym generators, JSONL, Parquet, and Hugging Face data
set folders. Whatever a file holds that cannot be used is a `ConfigError` that names the line or row.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import logging
import random
import warnings
from collections.abc import Iterator
from dataclasses import fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from torchspec.config.schema import Data
from torchspec.errors import ConfigError
from torchspec.models.vocabulary import check_ids
from torchspec.records import Message, Problem

if TYPE_CHECKING:  # importing transformers takes seconds
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

ROLES = ("system", "user", "assistant")
DRAWS_PER_PROBLEM = 10
"""reasoning-gym repeats questions; give up after this many draws for each problem asked for."""


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
        return _generate(data)
    if not data.path:
        raise ConfigError(f'data.path is empty; data.source = "{data.source}" needs a file or folder')
    rows = {"jsonl": _jsonl_rows, "parquet": _parquet_rows, "hf": _hf_rows}[data.source]
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


# reasoning-gym


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
        raise ConfigError(f'data.task_args: "{task}" refuses {task_args}: {_one_line(error)}') from error


def _generate(data: Data) -> tuple[list[Problem], list[Problem]]:
    if data.size == 0:
        raise ConfigError(
            "data.size = 0 (all) is for files; reasoning_gym generates without end: set a number"
        )
    wanted = data.size + data.eval_size
    draws = DRAWS_PER_PROBLEM * wanted
    task = reasoning_gym_task(data.task, data.task_args, draws)
    problems: dict[str, Problem] = {}  # by question
    for index in range(draws):
        try:
            entry = task[index]
        except Exception as error:  # arguments that pass the task's own check may still be impossible
            raise ConfigError(
                f'data.task_args: "{data.task}" fails at problem {index} with {data.task_args}: '
                f"{_one_line(error)}"
            ) from error
        if entry["question"] not in problems:
            problems[entry["question"]] = Problem(
                id=f"{data.task}/{index}",
                messages=_with_system(data, [{"role": "user", "content": entry["question"]}]),
                answer=entry["answer"],
                meta={"entry": entry},
            )
        if len(problems) == wanted:
            unique = list(problems.values())
            return unique[: data.size], unique[data.size :]
    raise ConfigError(
        f'data.task = "{data.task}" gave only {len(problems)} different questions in {draws} draws, '
        f"data.size + data.eval_size ask for {wanted}; lower them, or widen data.task_args"
    )


# Files. A row travels with its number, counted from 1, and its place, for messages.

Row = tuple[int, str, dict[str, Any]]


def _jsonl_rows(data: Data) -> Iterator[Row]:
    path = _existing_file(data)
    with path.open("rb") as file:  # bytes, so that a line that is not UTF-8 still has its number
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            place = f"{path}:{number}"
            try:
                row = json.loads(line.decode("utf-8"))
            except ValueError as error:  # UnicodeDecodeError, JSONDecodeError
                raise ConfigError(f"{place}: not a JSON line: {_one_line(error)}") from None
            if not isinstance(row, dict):
                raise ConfigError(f"{place}: must be a JSON object, got {type(row).__name__}")
            yield number, place, row


def _parquet_rows(data: Data) -> Iterator[Row]:
    import pyarrow
    from pyarrow import parquet

    path = _existing_file(data)
    try:
        rows = parquet.read_table(path).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:  # not Parquet, or damaged pages
        raise ConfigError(f"{path}: not a Parquet file: {_one_line(error)}") from None
    for number, row in enumerate(rows, start=1):
        yield number, f"{path}: row {number}", row


def _hf_rows(data: Data) -> Iterator[Row]:
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


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


# Tokens


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
    """Refuse a tokenizer that can produce ids the model has no embedding for, or that cannot end a response.

    Raises:
        ConfigError: a token id from `vocab_size` on, or no end token.
    """
    remedy = "they do not belong together; point model.source at a folder whose tokenizer and weights do"
    ids = {*tokenizer.get_vocab().values(), *tokenizer.added_tokens_decoder, *tokenizer.all_special_ids}
    check_ids(ids, vocab_size, "the tokenizer", remedy)
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            "the tokenizer has no end token; set eos_token in tokenizer_config.json of model.source"
        )


def encode_prompt(tokenizer: PreTrainedTokenizerBase, messages: list[Message]) -> list[int]:
    """Token ids of the chat `messages`, up to where the policy's response starts.

    Raises:
        ConfigError: the tokenizer has no chat template, or its template refuses the messages.
    """
    from jinja2 import TemplateError

    if tokenizer.chat_template is None:
        raise ConfigError(
            "the tokenizer has no chat template; use an instruction-tuned model, or put a chat_template.jinja "
            "into the folder model.source"
        )
    try:
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    except TemplateError as error:  # e.g. a template that knows no system message
        roles = ", ".join(m["role"] for m in messages)
        raise ConfigError(
            f"the chat template refuses messages of roles {roles}: {_one_line(error)}"
        ) from error
    return cast("list[int]", ids)


def encode_prompts(
    tokenizer: PreTrainedTokenizerBase, problems: list[Problem], max_prompt: int
) -> list[list[int]]:
    """Token ids of each problem's prompt; `max_prompt` is the most tokens that leave room for a response.

    Raises:
        ConfigError: a prompt longer than `max_prompt`.
    """
    prompts = []
    for problem in problems:
        try:
            prompts.append(encode_prompt(tokenizer, problem.messages))
        except ConfigError:
            raise
        except Exception as error:  # tokenizers raises bare Exception for text outside its vocabulary
            raise ConfigError(
                f"problem {problem.id}: the tokenizer refuses it: {_one_line(error)}"
            ) from error
    for problem, prompt in zip(problems, prompts, strict=True):
        if len(prompt) > max_prompt:
            raise ConfigError(
                f"problem {problem.id}: its prompt has {len(prompt)} tokens, at most {max_prompt} fit; raise "
                f"model.max_len, lower rollout.max_new_tokens, or remove the problem"
            )
    return prompts


# Order


class ProblemOrder:
    """Problems without end: every epoch is a permutation drawn from (seed, epoch).

    What an epoch has left too few of for a whole draw is skipped, so no problem is drawn twice at once: its
    two groups would be one to the advantages.
    """

    def __init__(self, problems: list[Problem], seed: int) -> None:
        self.problems = problems
        self.seed = seed
        self._start(epoch=0)

    def next(self, n: int) -> list[Problem]:
        """The next `n` problems, all different.

        Raises:
            ConfigError: there are fewer than `n` problems.
        """
        if n > len(self.problems):
            raise ConfigError(
                f"a step asks for {n} problems, but there are only {len(self.problems)} to train on"
            )
        if self.offset + n > len(self.problems):
            self._start(self.epoch + 1)
        taken = self.order[self.offset : self.offset + n]
        self.offset += n
        return [self.problems[i] for i in taken]

    def state_dict(self) -> dict[str, Any]:
        return {
            "seed": self.seed,
            "problems": len(self.problems),
            "digest": self._digest,
            "epoch": self.epoch,
            "offset": self.offset,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on exactly where `state` was taken.

        Raises:
            ConfigError: the state belongs to other problems or another seed.
        """
        here = {"seed": self.seed, "problems": len(self.problems), "digest": self._digest}
        saved = {name: state[name] for name in here}
        if saved != here:
            raise ConfigError(
                f"cannot resume the problems' order of {saved} with {here}; restore the [data] settings and files"
            )
        self._start(state["epoch"])
        self.offset = state["offset"]

    @cached_property
    def _digest(self) -> str:
        """Differs where any problem does, as files may have been edited between two sessions."""
        known = [(p.id, p.messages, p.answer) for p in self.problems]
        return hashlib.sha256(json.dumps(known).encode()).hexdigest()[:12]

    def _start(self, epoch: int) -> None:
        self.epoch, self.offset = epoch, 0
        self.order = list(range(len(self.problems)))
        random.Random(f"{self.seed}/{epoch}").shuffle(self.order)
