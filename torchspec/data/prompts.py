"""Prompts: the token ids of a problem's chat messages."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from torchspec.errors import ConfigError, one_line
from torchspec.records import Message, Problem

if TYPE_CHECKING:  # importing transformers takes seconds
    from transformers import PreTrainedTokenizerBase


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
    """Refuse a tokenizer that can produce ids the model has no embedding for, or that cannot end a response.

    Raises:
        ConfigError: more tokens than `vocab_size`, or no end token.
    """
    if len(tokenizer) > vocab_size:
        raise ConfigError(
            f"the tokenizer has {len(tokenizer)} tokens, the model's vocab_size is {vocab_size}: they do not "
            f"belong together; point model.source at a folder whose tokenizer and weights do"
        )
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
            raise ConfigError(f"problem {problem.id}: the tokenizer refuses it: {one_line(error)}") from error
    for problem, prompt in zip(problems, prompts, strict=True):
        if len(prompt) > max_prompt:
            raise ConfigError(
                f"problem {problem.id}: its prompt has {len(prompt)} tokens, at most {max_prompt} fit; raise "
                f"model.max_len, lower rollout.max_new_tokens, or remove the problem"
            )
    return prompts
