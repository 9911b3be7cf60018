"""Prompts: the token ids of a problem's chat messages."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Literal, cast

from torchspec.data.answers import counted, named
from torchspec.errors import ConfigError, one_line
from torchspec.models.vocabulary import check_ids
from torchspec.records import Message, Problem

if TYPE_CHECKING:  # importing transformers takes seconds
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)


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
            f"the chat template refuses messages of roles {roles}: {one_line(error)}"
        ) from error
    return cast("list[int]", ids)


def encode_prompts(
    tokenizer: PreTrainedTokenizerBase, problems: list[Problem], max_prompt: int
) -> list[list[int]]:
    """Return the token ids of each problem's prompt.

    Args:
        max_prompt: the most tokens that leave room for a response.

    Raises:
        ConfigError: prompts that are longer, or that the tokenizer refuses; all are counted.
    """
    prompts = prompts_by_id(tokenizer, problems, max_prompt)
    return [prompts[problem.id] for problem in problems]


def prompts_by_id(
    tokenizer: PreTrainedTokenizerBase,
    problems: list[Problem],
    max_prompt: int,
    overlong: Literal["error", "skip"] = "error",
) -> dict[str, list[int]]:
    """Return the token ids of the problems' prompts by problem id, as `encode_prompts`.

    With `overlong` = "skip" problems that are too long are left out, with one warning.
    """
    prompts, refused = {}, []
    for problem in problems:
        try:
            prompts[problem.id] = encode_prompt(tokenizer, problem.messages)
        except ConfigError:
            raise
        except Exception as error:  # tokenizers raises bare Exception for text outside its vocabulary
            refused.append(f"problem {problem.id}: the tokenizer refuses it: {one_line(error)}")
    if refused:
        raise ConfigError(counted(refused, f"of {len(problems)} problems are refused"))
    lengths = {key: len(tokens) for key, tokens in prompts.items() if len(tokens) > max_prompt}
    if not lengths:
        return prompts
    first, most = next(iter(lengths)), max(lengths.values())
    text = f"problem {first}: its prompt has {lengths[first]} tokens, at most {max_prompt} fit"
    if len(lengths) > 1:
        others = named(list(lengths)[1:])
        text += (
            f"; {len(lengths)} of {len(problems)} problems are too long (the longest {most}), also {others}"
        )
    if overlong == "error":
        raise ConfigError(
            f"{text}; raise model.max_len, lower rollout.max_new_tokens, remove the problem, or leave such "
            f'problems out with data.overlong = "skip"'
        )
    if len(lengths) == len(prompts):
        raise ConfigError(f"{text}; that leaves none: raise model.max_len, or lower rollout.max_new_tokens")
    log.warning("%s; left out (data.overlong)", text)
    return {key: tokens for key, tokens in prompts.items() if key not in lengths}
