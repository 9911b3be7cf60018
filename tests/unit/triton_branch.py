"""Run by test_triton.py under TRITON_INTERPRET=1: the Triton branch kernels against the torch ones, fp32."""

from itertools import product

import torch

from torchspec.attention.kernels import cpu, triton


def check(tokens: int, heads: int, kv_heads: int, dim: int, entries: int, trunk: bool) -> None:
    generator = torch.Generator().manual_seed(0)

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    q, dout, out, dq = (rand(tokens, heads, dim) for _ in range(4))
    lse = rand(heads, tokens)
    lse[0, :2] = torch.tensor([150.0, -150.0])[: min(2, tokens)]  # one part outweighs the other
    branch_k, branch_v = ([rand(tokens, kv_heads, dim) for _ in range(entries)] for _ in range(2))
    state = (out.clone(), lse.clone()) if trunk else (None, None)
    joined, joint = triton.branch_fwd(q, *state, branch_k, branch_v, 0.3)
    expected, expected_lse = cpu.branch_fwd(q, *state, branch_k, branch_v, 0.3)
    torch.testing.assert_close(joined, expected, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(joint, expected_lse, rtol=2e-6, atol=2e-6)
    partial = dq if trunk else None
    args = dout, q, branch_k, branch_v, joined, joint
    ours = triton.branch_bwd(*args, partial.clone() if trunk else None, 0.3)
    theirs = cpu.branch_bwd(*args, partial, 0.3)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


for (heads, kv_heads), entries, trunk in product([(4, 4), (4, 1), (8, 1)], [1, 3], [True, False]):
    check(37, heads, kv_heads, 8, entries, trunk)
check(2, 4, 2, 16, 6, True)
check(33, 2, 1, 12, 2, True)  # a head dim that is no power of two
print("ok")
