"""The task of a run: problems, their prompts as tokens, and the scorer of the answers."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from torchspec.config.schema import Config
from torchspec.data.problems import load_problems
from torchspec.data.prompts import encode_prompts
from torchspec.records import Problem, Rollout
from torchspec.rewards.scorer import build_scorer
from torchspec.rewards.scoring import score
from torchspec.rollout.engine import Request

if TYPE_CHECKING:  # importing transformers takes seconds
    from transformers import PreTrainedTokenizerBase


class Task:
    """Asks problems and scores the answers.

    Raises:
        ConfigError: problems or rewards cannot be used, or do not fit each other.
    """

    tokenizer: PreTrainedTokenizerBase

    def __init__(self, config: Config) -> None:
        self.problems, self.held_out = load_problems(config.data)
        self._scorer = build_scorer(config.reward, config.data)
        self._scorer.check_answers([*self.problems, *self.held_out])

    def tokenize(self, tokenizer: PreTrainedTokenizerBase, longest: int) -> None:
        """Encode all prompts; none may have more than `longest` tokens.

        Raises:
            ConfigError: a prompt is longer.
        """
        self.tokenizer = tokenizer
        known = [*self.problems, *self.held_out]
        self._prompts = {p.id: t for p, t in zip(known, encode_prompts(tokenizer, known, longest))}

    def token_counts(self) -> Counter[int]:
        """Return how often each token occurs in the prompts and in the answers that are trained on."""
        counts = Counter(token for prompt in self._prompts.values() for token in prompt)
        for problem in self.problems:
            counts.update(self.tokenizer.encode(problem.answer or "", add_special_tokens=False))
        return counts

    def requests(self, problems: list[Problem], samples: int) -> list[Request]:
        """Return one request per problem for `samples` answers each."""
        prompts = self._prompts
        return [Request(problem_id=p.id, prompt_tokens=prompts[p.id], samples=samples) for p in problems]

    def score(self, problems: list[Problem], rollouts: list[Rollout]) -> None:
        """Fill `text`, `reward` and `reward_parts` of the problems' rollouts."""
        score(self._scorer, self.tokenizer, problems, rollouts)

    def take_failures(self) -> int:
        """Return how many rewards could not be computed since the last call."""
        failures = sum(self._scorer.failures.values())
        self._scorer.failures.clear()
        return failures

    def close(self) -> None:
        """End the scorer's worker processes."""
        self._scorer.close()
