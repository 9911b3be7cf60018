"""The hook in vLLM's model runner, on a stand-in for a runner."""

from __future__ import annotations

import types
from typing import Any

import numpy as np
import torch

from torchspec.rollout.vllm.adapter import SpecDecodeAdapter


class Runner:
    """One request, a vocabulary of 8, and a draft model that is equally unsure of everything."""

    device = torch.device("cpu")
    input_batch = types.SimpleNamespace(req_ids=["r"])
    _draft_probs = torch.full((1, 4, 8), 1 / 8)

    def __init__(self) -> None:
        parameters = types.SimpleNamespace(
            extra_args={"id": "0", "problem_id": "p"}, max_tokens=100, ignore_eos=True
        )
        self.requests = {"r": types.SimpleNamespace(prompt_token_ids=[1], sampling_params=parameters)}

    def propose_draft_token_ids(
        self,
        scheduler_output: Any,
        sampled_token_ids: Any,
        sampling_metadata: Any,
        hidden_states: Any,
        sample_hidden_states: Any,
        aux_hidden_states: Any,
        spec_decode_metadata: Any,
        common_attn_metadata: Any,
        slot_mappings: Any,
    ) -> torch.Tensor:
        return torch.tensor([[1, 2, 3, 4]])


class Plans:
    """A speculator that does as it is told: (model's passes, its tokens of the draft, the draft) by step."""

    def __init__(self, *plans: tuple[int | None, int, list[int]]) -> None:
        self.plans = iter(plans)
        self.draft: list[int] = []

    def plan(self, ids: list[str]) -> Any:
        passes, chain, self.draft = next(self.plans)
        return types.SimpleNamespace(passes=passes, chains=np.array([chain]))

    def complete(self, plan: Any, chains: Any) -> list[list[int]]:
        return [self.draft]

    def room(self, request_id: str) -> int:
        return 9

    def begin(self, *_: Any) -> None: ...

    def advance(self, *_: Any) -> None: ...

    def record_time(self, *_: Any) -> None: ...


def test_a_chain_vouches_for_its_own_tokens_only() -> None:
    """Whether the model is asked for nothing in the next step, or does not run at all."""
    runner = Runner()
    hook = SpecDecodeAdapter(runner)
    for passes in (None, 0):
        hook.speculator = Plans((2, 2, [1, 2, 7]), (passes, 0, [5, 6]))
        rows = []
        for draft in ([1, 2, 7], [5, 6]):
            assert runner.propose_draft_token_ids(types.SimpleNamespace(), [[0]], *[None] * 7) == [draft]
            metadata = types.SimpleNamespace(
                draft_token_ids=torch.tensor(draft), num_draft_tokens=[len(draft)]
            )
            rows.append(runner._get_spec_decode_draft_probs(metadata))
        model, suffix = rows
        assert torch.equal(model[:2], torch.full((2, 8), 1 / 8))
        assert torch.equal(model[2], torch.nn.functional.one_hot(torch.tensor(7), 8).float())
        assert suffix is None  # all one-hot
