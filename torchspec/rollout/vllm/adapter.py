"""Puts a Speculator into vLLM: ragged drafts of several drafters, and their right probabilities.

vLLM's model runner asks one method for the drafts of a step, and another for the probabilities they were drawn
with. `SpecDecodeAdapter` replaces both on the runner of one engine; everything else stays vLLM's. Used with method
"eagle3", whose draft model then runs when the plan wants it, or with "custom_class" and `NoProposals`, which
loads no model.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import torch

from torchspec.speculation.speculator import Speculator

PROPOSE = (
    "scheduler_output",
    "sampled_token_ids",
    "sampling_metadata",
    "hidden_states",
    "sample_hidden_states",
    "aux_hidden_states",
    "spec_decode_metadata",
    "common_attn_metadata",
    "slot_mappings",
)


class NoProposals:
    """What vLLM loads as the proposer where there is no draft model; `SpecDecodeAdapter` answers in its place."""

    def __init__(self, vllm_config: Any) -> None:
        pass

    def load_model(self, *args: Any) -> None:
        pass

    def propose(self, *args: Any, **named: Any) -> list[list[int]]:
        raise RuntimeError("the drafter was not installed")


@dataclass(slots=True)
class CalibrationRun:
    """A calibration: drafts of given lengths, and what the steps took."""

    schedule: list[int]
    """Tokens to verify in each step, those that would come anyway included."""
    vocabulary: int
    model_tokens: int
    """Of the draft model, in every second step; 0: there is none."""
    requests: int
    steps: list[tuple[int, float]] = field(default_factory=list)
    """(tokens, seconds) of steps with all requests, drafting left out."""
    drafting: list[tuple[int, float]] = field(default_factory=list)
    """(tokens proposed, seconds) of the draft model."""
    done: int = 0
    pending: tuple[int, float] | None = None
    """Tokens of the step that runs, and when it began."""


class SpecDecodeAdapter:
    """Stands between vLLM's runner and a Speculator; `speculator` None: no drafts at all."""

    def __init__(self, runner: Any) -> None:
        names = tuple(inspect.signature(runner.propose_draft_token_ids).parameters)
        if names != PROPOSE:
            raise RuntimeError(f"vLLM's propose_draft_token_ids takes {names}; known is {PROPOSE}")
        self.speculator: Speculator | None = None
        self.forced: CalibrationRun | None = None
        self._runner = runner
        # On CPU the thread's own time: other load on the machine is none of the engine's.
        self._clock = time.thread_time if runner.device.type == "cpu" else time.perf_counter
        self._run_model = runner.propose_draft_token_ids
        self._known: dict[str, str] = {}
        """vLLM's request id -> ours."""
        self._chains: dict[str, torch.Tensor] = {}
        """vLLM's request id -> float32 [n, V]: what the n tokens of its draft's chain were drawn from. A request
        that a step leaves out keeps its draft."""
        self._entered = 0.0
        runner.propose_draft_token_ids = self._propose
        runner._get_spec_decode_draft_probs = self._draft_probs

    def _propose(self, scheduler_output: Any, sampled: Any, *rest: Any) -> list[list[int]]:
        ids = self._runner.input_batch.req_ids
        rows = self._rows(sampled)  # on CUDA this waits for the step: its time is not the drafters'
        entered = self._clock()
        if self.forced:
            return self._force(self.forced, entered, scheduler_output, sampled, rest, rows)
        if self.speculator is None:
            return [[] for _ in rows]
        metadata = rest[PROPOSE.index("spec_decode_metadata") - 2]
        verified = [0] * len(rows) if metadata is None else metadata.num_draft_tokens
        going, at = self._advance(self.speculator, rows, verified, entered - self._entered)
        self._entered = entered
        plan = self.speculator.plan(going)
        chains, model_seconds = None, 0.0
        if plan.passes is not None:
            begun = self._clock()
            tokens = self._model_tokens(scheduler_output, sampled, rest, plan.passes)
            model_seconds = self._clock() - begun
            chains = [tokens[row] for row in at]
        # Where the model did not run too: its last chain must not vouch for another drafter's tokens.
        self._keep_probs([(ids[row], row, n) for row, n in zip(at, plan.chains.tolist())])
        drafts: list[list[int]] = [[] for _ in rows]
        for row, draft in zip(at, self.speculator.complete(plan, chains)):
            drafts[row] = draft
        self.speculator.record_time(self._clock() - entered - model_seconds, model_seconds)
        return drafts

    def forget(self, lost: Collection[str] = ()) -> None:
        """No request runs any more, `lost` (our ids) unfinished; vLLM would tell us with the next step only."""
        if self.speculator:
            for own in sorted(self._known.values()):
                self.speculator.end(own, finished=own not in lost)
        self._known.clear()
        self._chains.clear()

    def _advance(
        self, speculator: Speculator, rows: list[list[int]], verified: list[int], seconds: float
    ) -> tuple[list[str], list[int]]:
        """Tell the speculator what came; returns the requests that go on, our ids and their rows."""
        requests = self._runner.requests
        for gone in [r for r in self._known if r not in requests]:
            speculator.end(self._known.pop(gone))
            self._chains.pop(gone, None)
        own, tokens, tested, hits, ends = [], [], [], [], []
        sampled = [row for row, new in enumerate(rows) if new]  # the others still read their prompts
        for row in sampled:
            request_id, new = self._runner.input_batch.req_ids[row], rows[row]
            parameters = requests[request_id].sampling_params
            if request_id not in self._known:
                mine, problem = parameters.extra_args["id"], parameters.extra_args["problem_id"]
                prompt = requests[request_id].prompt_token_ids
                speculator.begin(mine, problem, prompt, parameters.max_tokens)
                self._known[request_id] = mine
            kept = _cut(new, parameters)
            own.append(self._known[request_id])
            tokens.append(kept)
            tested.append(verified[row])
            hits.append(len(new) - 1 if verified[row] else 0)
            ends.append(kept[-1] in _stop_tokens(parameters))
        speculator.advance(own, tokens, tested, hits, seconds)
        going = [i for i, end in enumerate(ends) if not end and speculator.room(own[i]) > 0]
        return [own[i] for i in going], [sampled[i] for i in going]

    def _keep_probs(self, chains: list[tuple[str, int, int]]) -> None:
        """Remember the distributions of what is proposed: (vLLM's id, row, tokens of the model)."""
        probs = self._runner._draft_probs  # float32 [B, K, V]; None where all sampling is greedy
        for request_id, row, count in chains:
            self._chains.pop(request_id, None)
            if count and probs is not None:
                self._chains[request_id] = probs[row, :count]

    def _model_tokens(self, scheduler_output: Any, sampled: Any, rest: tuple, passes: int) -> list[list[int]]:
        """Run vLLM's drafter for `passes` tokens; its first pass fills its KV cache even where that is 0."""
        scheduler_output.num_spec_tokens_to_schedule = passes
        return self._run_model(scheduler_output, sampled, *rest).tolist()

    def _rows(self, sampled: Any) -> list[list[int]]:
        """What each request of the batch got: tokens of its drafts, and one more; [] while prompts are read."""
        if isinstance(sampled, list):
            return sampled
        unfinished = self._runner.discard_request_mask.np[: self._runner.input_batch.num_reqs].tolist()
        return [
            [] if waits else [token for token in row if token >= 0]
            for waits, row in zip(unfinished, sampled.tolist())
        ]

    def _draft_probs(self, metadata: Any) -> torch.Tensor | None:
        """float32 [draft tokens, V], flat over requests: the model's distributions, and one-hot rows for the
        suffix drafter's tokens, which are no sample. None says that all of them are one-hot."""
        probs, at = None, 0
        tokens = metadata.draft_token_ids.long()
        for request_id, count in zip(self._runner.input_batch.req_ids, metadata.num_draft_tokens):
            chain = self._chains.get(request_id)
            if count and chain is not None:
                if probs is None:
                    one_hot = torch.zeros(len(tokens), chain.shape[1], device=tokens.device)
                    probs = one_hot.scatter_(1, tokens[:, None], 1.0)
                by_model = min(len(chain), count)
                probs[at : at + by_model] = chain[:by_model]
            at += count
        return probs

    def _force(
        self,
        forced: CalibrationRun,
        entered: float,
        scheduler_output: Any,
        sampled: Any,
        rest: tuple,
        rows: list[list[int]],
    ) -> list[list[int]]:
        if forced.pending and len(rows) == forced.requests:
            tokens, begun = forced.pending
            forced.steps.append((tokens, entered - begun))
        if forced.model_tokens:
            passes = forced.model_tokens * (forced.done % 2)
            begun = self._clock()
            self._model_tokens(scheduler_output, sampled, rest, passes)
            if forced.done:  # not the prompts
                forced.drafting.append((passes, self._clock() - begun))
        forced.pending, drafts = None, [[] for _ in rows]
        if len(rows) == forced.requests and all(rows) and forced.done < len(forced.schedule):
            extra = forced.schedule[forced.done] - len(rows)
            shares = [extra // len(rows) + (i < extra % len(rows)) for i in range(len(rows))]
            drafts = [
                [(7 * row[-1] + j) % forced.vocabulary for j in range(n)] for row, n in zip(rows, shares)
            ]
            forced.pending = forced.schedule[forced.done], self._clock()
            forced.done += 1
        return drafts


def _stop_tokens(parameters: Any) -> set[int]:
    return set() if parameters.ignore_eos else parameters.all_stop_token_ids


def _cut(tokens: list[int], parameters: Any) -> list[int]:
    """Tokens up to the one that ends the request."""
    stops = _stop_tokens(parameters)
    for j, token in enumerate(tokens):
        if token in stops:
            return tokens[: j + 1]
    return tokens
