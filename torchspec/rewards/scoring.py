"""Decodes rollouts and scores them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchspec.records import Problem, Rollout
from torchspec.rewards.scorer import Scorer

if TYPE_CHECKING:  # importing transformers takes seconds
    from transformers import PreTrainedTokenizerBase


def score(
    scorer: Scorer, tokenizer: PreTrainedTokenizerBase, problems: list[Problem], rollouts: list[Rollout]
) -> None:
    """Fill `text`, `reward` and `reward_parts` of the problems' rollouts."""
    for rollout in rollouts:
        rollout.text = decode(tokenizer, rollout.tokens)
    scorer.score_all({problem.id: problem for problem in problems}, rollouts)


def decode(tokenizer: PreTrainedTokenizerBase, tokens: list[int]) -> str:
    """Return the text that rewards see, without special tokens."""
    text = tokenizer.decode(tokens, skip_special_tokens=True)
    assert isinstance(text, str)  # a list only for a batch
    return text
