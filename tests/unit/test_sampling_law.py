"""The trainer's truncated law against a brute force over sorted probabilities, and against vLLM's sampler."""

from __future__ import annotations

import math

import pytest
import torch

from torchspec.models.logprobs import chunk_logprobs
from torchspec.records import SamplingLaw

LAWS = [
    SamplingLaw(temperature=0.7, top_k=1),
    SamplingLaw(temperature=1.3, top_k=5),
    SamplingLaw(temperature=1.0, top_k=500),
    SamplingLaw(temperature=1.0, top_p=0.4),
    SamplingLaw(temperature=1.6, top_p=0.95),
    SamplingLaw(temperature=1.0, top_p=1e-6),
    SamplingLaw(temperature=1.2, top_p=0.8, top_k=7),
    SamplingLaw(temperature=0.5, top_p=0.99, top_k=3),
]
VOCAB = 40


def brute_force(logits: list[float], law: SamplingLaw) -> dict[int, float]:
    """Probabilities of the kept tokens, straight from the definition at `SamplingLaw`; no two logits equal."""
    weights = {i: math.exp(x / law.temperature) for i, x in enumerate(logits)}
    order = sorted(weights, key=weights.__getitem__)
    if law.top_k:
        order = order[-law.top_k :]
    total, dropped = sum(weights[i] for i in order), 0.0
    while len(order) > 1 and (dropped + weights[order[0]]) / total <= 1 - law.top_p:
        dropped += weights[order.pop(0)]
    total = sum(weights[i] for i in order)
    return {i: weights[i] / total for i in order}


@pytest.mark.parametrize("law", LAWS, ids=str)
def test_the_truncated_law_equals_brute_force(law: SamplingLaw) -> None:
    torch.manual_seed(0)
    logits = (3 * torch.randn(30, VOCAB, dtype=torch.float64)).requires_grad_()
    expected = [brute_force(row, law) for row in logits.tolist()]
    targets = torch.tensor([list(row)[i % len(row)] for i, row in enumerate(expected)])
    logprobs, entropy = chunk_logprobs(
        torch.eye(30).double() @ logits, torch.eye(VOCAB).double(), targets, law
    )
    for i, row in enumerate(expected):
        assert logprobs[i].item() == pytest.approx(math.log(row[int(targets[i])]), abs=1e-12)
        assert entropy[i].item() == pytest.approx(-sum(p * math.log(p) for p in row.values()), abs=1e-12)
    (gradient,) = torch.autograd.grad(logprobs.sum(), logits)
    wanted = torch.zeros(30, VOCAB, dtype=torch.float64)
    for i, row in enumerate(expected):  # (one-hot - law) / temperature, nothing for what was dropped
        for token, p in row.items():
            wanted[i, token] = (float(token == targets[i]) - p) / law.temperature
    torch.testing.assert_close(gradient, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("law", LAWS, ids=str)
def test_it_is_the_law_of_vllms_sampler(law: SamplingLaw) -> None:
    sampler = pytest.importorskip("vllm.v1.sample.ops.topk_topp_sampler")
    torch.manual_seed(1)
    logits = torch.randn(64, VOCAB) * 2
    logits[:, 1::2] = logits[:, ::2]  # every logit twice: ties at every bound
    k = torch.full((64,), min(law.top_k or VOCAB, VOCAB), dtype=torch.int32)
    p = torch.full((64,), law.top_p)
    kept = sampler.apply_top_k_top_p_pytorch(
        logits / law.temperature, k if law.top_k else None, p if law.top_p < 1 else None, True
    ).log_softmax(-1)
    targets = torch.multinomial(kept.exp(), 1).squeeze(1)
    found, _ = chunk_logprobs(logits, torch.eye(VOCAB), targets, law)
    torch.testing.assert_close(found, kept.gather(1, targets[:, None])[:, 0], rtol=0, atol=1e-5)


def test_a_token_that_the_trainer_would_drop_is_added_to_the_kept_ones() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]], dtype=torch.float64)
    found, _ = chunk_logprobs(logits, torch.eye(4).double(), torch.tensor([3]), SamplingLaw(top_k=2))
    weights = logits[0].exp()
    assert found.item() == pytest.approx(
        math.log(weights[3] / (weights[0] + weights[1] + weights[3])), abs=1e-12
    )


def test_a_law_that_keeps_all_is_the_plain_one_bit_by_bit() -> None:
    torch.manual_seed(2)
    final, head, targets = torch.randn(9, 8), torch.randn(VOCAB, 8), torch.randint(VOCAB, (9,))
    plain, _ = chunk_logprobs(final, head, targets, SamplingLaw(temperature=0.9))
    logits = torch.nn.functional.linear(final, head) / 0.9
    assert torch.equal(plain, logits.log_softmax(-1).gather(1, targets[:, None])[:, 0])
