"""Verify steps with garbage for drafts, whose times make the cost table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torchspec.rollout.engine import Request
from torchspec.rollout.vllm.adapter import CalibrationRun, SpecDecodeAdapter
from torchspec.rollout.vllm.requests import Sample

if TYPE_CHECKING:
    from vllm import RequestOutput


@dataclass(frozen=True, slots=True)
class CalibrationRuns:
    """Runs of an engine with forced drafts; `run` is what speculation.calibration.measure calls."""

    adapter: SpecDecodeAdapter
    answer: Callable[[list[Sample], Callable[[Sample, RequestOutput], None]], None]
    """Lets the engine answer samples."""
    vocabulary: int
    model_tokens: int
    """Tokens of the draft model; 0: there is none."""
    max_len: int

    def run(self, schedule: list[int], batch: int) -> CalibrationRun:
        """Let `batch` requests verify schedule[i] tokens in step i."""
        from vllm import SamplingParams

        self.adapter.forced = CalibrationRun(schedule, self.vocabulary, self.model_tokens, batch)
        tokens = min(2 * len(schedule) + 2, self.max_len - 4)
        limit = SamplingParams(
            max_tokens=tokens, ignore_eos=True, logprobs=0, flat_logprobs=True, detokenize=False
        )
        prompts = [[2 + i % (self.vocabulary - 2)] * 4 for i in range(batch)]
        requests = [Request(problem_id="", prompt_tokens=prompt) for prompt in prompts]
        self.answer([Sample(request, 0, limit) for request in requests], lambda *_: None)
        forced, self.adapter.forced = self.adapter.forced, None
        return forced
