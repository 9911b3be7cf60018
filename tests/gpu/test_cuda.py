"""The CUDA paths against the oracles, on one GPU; skipped where there is none."""

from __future__ import annotations

import pytest
import torch

from torchspec.attention import branch_attention, reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("entries", [0, 1, 3])
def test_branch_attention_in_bf16_is_within_a_few_casts_of_the_oracle(entries) -> None:
    draw = torch.Generator().manual_seed(0)
    heads, kv_heads, dim, cu = 8, 2, 64, torch.tensor([0, 1, 70, 300], dtype=torch.int32)

    def tensor(h: int) -> torch.Tensor:
        x = torch.randn(300, h, dim, generator=draw).to("cuda", torch.bfloat16)
        return x.requires_grad_()

    q, k, v = tensor(heads), tensor(kv_heads), tensor(kv_heads)
    branch_k, branch_v = ([tensor(kv_heads) for _ in range(entries)] for _ in range(2))
    inputs = [q, k, v, *branch_k, *branch_v]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    grad = torch.randn(300, heads, dim, generator=draw).cuda()
    out, _ = branch_attention(q, k, v, branch_k, branch_v, cu)
    out.backward(grad.bfloat16())
    expected, _ = reference.branch_attention(*exact[:3], exact[3 : 3 + entries], exact[3 + entries :], cu)
    expected.backward(grad.bfloat16().double())
    pairs = [(out, expected), *((x.grad, y.grad) for x, y in zip(inputs, exact))]
    for ours, theirs in pairs:
        cast = (theirs.bfloat16().double() - theirs).abs().max()
        assert (ours.double() - theirs).abs().max() <= 4 * cast
