"""The task of a run: problems, their prompts as tokens, and the scorer of the answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container
from typing import TYPE_CHECKING

import torch

from torchspec.config.schema import Config
from torchspec.data.problems import load_problems
from torchspec.data.prompts import prompts_by_id
from torchspec.distributed.interrupt import Interrupt
from torchspec.distributed.mesh import Mesh
from torchspec.errors import RewardFailed
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
        readable = self._scorer.check_answers([*self.problems, *self.held_out])
        self._overlong = config.data.overlong
        self._keep({problem.id for problem in readable})

    def tokenize(self, tokenizer: PreTrainedTokenizerBase, longest: int) -> None:
        """Encode all prompts; one of more than `longest` tokens is refused or left out, as data.overlong says.

        Raises:
            ConfigError: prompts are longer.
        """
        self.tokenizer = tokenizer
        self.prompts = prompts_by_id(tokenizer, [*self.problems, *self.held_out], longest, self._overlong)
        self._keep(self.prompts)

    def _keep(self, ids: Container[str]) -> None:
        self.problems = [problem for problem in self.problems if problem.id in ids]
        self.held_out = [problem for problem in self.held_out if problem.id in ids]

    def token_counts(self) -> Counter[int]:
        """Return how often each token occurs in the prompts and in the answers that are trained on."""
        counts = Counter(token for prompt in self.prompts.values() for token in prompt)
        for problem in self.problems:
            counts.update(self.tokenizer.encode(problem.answer or "", add_special_tokens=False))
        return counts

    def requests(self, problems: list[Problem], samples: int) -> list[Request]:
        """Return one request per problem for `samples` answers each."""
        prompts = self.prompts
        return [Request(problem_id=p.id, prompt_tokens=prompts[p.id], samples=samples) for p in problems]

    def score(
        self, problems: list[Problem], rollouts: list[Rollout], mesh: Mesh, interrupt: Interrupt
    ) -> None:
        """Fill `text`, `reward` and `reward_parts` of the problems' rollouts. Collective.

        Raises:
            RewardFailed: on every rank, if a user's function failed on any.
            Stopped: there was a signal.
        """
        failed = None
        with interrupt.abandonable(), interrupt.user_code():
            try:
                score(self._scorer, self.tokenizer, problems, rollouts)
            except RewardFailed as error:
                failed = error
        interrupt.check()
        if mesh.max_over_world(torch.tensor([float(failed is not None)])).item():
            raise failed or RewardFailed("a reward function failed on another rank")

    def take_failures(self) -> int:
        """Return how many rewards could not be computed since the last call."""
        failures = sum(self._scorer.failures.values())
        self._scorer.failures.clear()
        return failures

    def close(self) -> None:
        """End the scorer's worker processes."""
        self._scorer.close()
