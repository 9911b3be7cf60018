"""Loads a checkpoint folder's tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchspec.data.prompts import check_tokenizer
from torchspec.errors import ConfigError
from torchspec.models.spec import PolicySpec

if TYPE_CHECKING:  # importing transformers takes seconds
    from transformers import PreTrainedTokenizerBase


def load_tokenizer(folder: Path, spec: PolicySpec) -> PreTrainedTokenizerBase:
    """Return the folder's tokenizer, checked against the model.

    Raises:
        ConfigError: the folder has no tokenizer, or one that does not fit the model.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:  # transformers' ways of saying that the files are not there
        raise ConfigError(f"{folder}: no usable tokenizer: {str(error).splitlines()[0]}") from None
    check_tokenizer(tokenizer, spec.vocab_size)
    return tokenizer


def special_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the ids that a reduced draft vocabulary must have: end tokens, and added ones such as </think>."""
    return sorted({*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder})
