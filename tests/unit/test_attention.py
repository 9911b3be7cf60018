"""branch_attention against the dense oracle: values, every gradient, the op's contracts."""

import pytest
import torch

from torchspec.attention import branch_attention, ops, packed_attention, reference, save_ops
from torchspec.attention.kernels import cpu, flash

LENGTHS = {
    "one": [9],
    "packed": [5, 1, 7, 2],
    "ones": [1, 1, 1],
    "empty documents": [0, 4, 0, 3, 0],
}


def make(lengths, heads=4, kv_heads=2, dim=8, entries=0, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    cu = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)

    def rand(n):
        x = torch.randn(sum(lengths), n, dim, generator=generator, dtype=torch.float64)
        return x.to(dtype).requires_grad_()

    q, k, v = rand(heads), rand(kv_heads), rand(kv_heads)
    branch_k, branch_v = [[rand(kv_heads) for _ in range(entries)] for _ in range(2)]
    return q, k, v, branch_k, branch_v, cu


def values_and_grads(function, q, k, v, branch_k, branch_v, cu, **kwargs):
    out, lse = function(q, k, v, branch_k, branch_v, cu, **kwargs)
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    grads = torch.autograd.grad(out, [q, k, v, *branch_k, *branch_v], cotangent.to(out.dtype))
    return [out, lse, *grads]


def assert_equals_oracle(inputs, tol, **kwargs):
    exact = values_and_grads(reference.branch_attention, *inputs, **kwargs)
    for ours, expected in zip(values_and_grads(branch_attention, *inputs, **kwargs), exact, strict=True):
        assert ours.dtype == expected.dtype
        torch.testing.assert_close(ours, expected, rtol=tol, atol=tol)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize("entries", [0, 1, 3])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_equals_the_dense_oracle(lengths, entries, heads, kv_heads):
    assert_equals_oracle(make(lengths, heads, kv_heads, entries=entries), tol=1e-12)
    assert_equals_oracle(make(lengths, heads, kv_heads, entries=entries, dtype=torch.float32), tol=2e-5)


def test_explicit_scale():
    assert_equals_oracle(make([6, 3], entries=2), tol=1e-12, scale=0.7)


@pytest.mark.parametrize("gap", [-200.0, 200.0])
def test_huge_gap_between_trunk_and_branch(gap):
    """One part outweighs the other by e^200: no overflow, no lost weight, finite gradients."""
    q, k, v, branch_k, branch_v, cu = make([5, 4], entries=1)
    with torch.no_grad():
        branch_k[0].copy_(q[:, ::2] * gap)
    assert_equals_oracle((q, k, v, branch_k, branch_v, cu), tol=1e-11)


def test_mask_is_the_literal_staircase():
    """One document of 4 tokens in pass 3: trunk causal, then one diagonal for pass 2 and one for pass 3."""
    literal = [
        [1, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0],
        [1, 1, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0],
        [1, 1, 1, 0, 0, 0, 1, 0, 0, 0, 1, 0],
        [1, 1, 1, 1, 0, 0, 0, 1, 0, 0, 0, 1],
    ]
    assert reference.staircase_mask(torch.tensor([0, 4]), 2).int().tolist() == literal
    packed = [
        [1, 0, 0, 1, 0, 0],
        [1, 1, 0, 0, 1, 0],
        [0, 0, 1, 0, 0, 1],
    ]
    assert reference.staircase_mask(torch.tensor([0, 2, 3]), 1).int().tolist() == packed


def test_strided_inputs_and_gradients():
    """Heads-first storage, and a cotangent of stride 0: aten's kernel would read garbage unwarned."""
    inputs = make([5, 3], entries=1)
    q, k, v, branch_k, branch_v, cu = inputs
    flipped = [x.detach().transpose(0, 2).contiguous().transpose(0, 2) for x in (q, k, v)]
    assert not flipped[0].is_contiguous()
    assert_equals_oracle(
        ([x.requires_grad_() for x in flipped] + [branch_k, branch_v, cu]),
        tol=1e-12,
    )
    ours, expected = [
        torch.autograd.grad(f(*inputs)[0].sum(), [q, k, v, *branch_k, *branch_v])
        for f in (branch_attention, reference.branch_attention)
    ]
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)


def test_bf16_error_is_that_of_a_few_casts():
    inputs = make([40, 24], entries=3, dtype=torch.bfloat16)
    exact_inputs = [
        [y.detach().double().requires_grad_() for y in x] if isinstance(x, list) else x for x in inputs
    ]
    exact_inputs[:3] = [x.detach().double().requires_grad_() for x in inputs[:3]]
    exact = values_and_grads(reference.branch_attention, *exact_inputs)
    for ours, expected in zip(values_and_grads(branch_attention, *inputs), exact, strict=True):
        assert (ours.double() - expected).norm() <= 8e-3 * expected.norm()


def test_no_tokens():
    out, lse = branch_attention(*make([], entries=1))
    assert out.shape == (0, 4, 8)
    assert lse.shape == (4, 0)
    out.sum().backward()


def test_packed_attention_has_no_branches():
    q, k, v, _, _, cu = make([5, 3])
    torch.testing.assert_close(
        packed_attention(q, k, v, cu),
        reference.branch_attention(q, k, v, [], [], cu)[0],
        rtol=1e-12,
        atol=1e-12,
    )


def test_documents_do_not_see_each_other():
    q, k, v, branch_k, branch_v, cu = make([4, 3, 5], entries=2)
    before = branch_attention(q, k, v, branch_k, branch_v, cu)[0]
    with torch.no_grad():
        for x in (q, k, v, *branch_k, *branch_v):
            x[4:7] += 1.0
    after = branch_attention(q, k, v, branch_k, branch_v, cu)[0]
    assert torch.equal(before[:4], after[:4])
    assert torch.equal(before[7:], after[7:])
    assert not torch.equal(before[4:7], after[4:7])


@pytest.mark.parametrize("entries", [0, 2])
def test_opcheck_and_gradcheck(entries):
    q, k, v, branch_k, branch_v, cu = make([3, 1, 2], heads=2, kv_heads=1, dim=4, entries=entries)
    args = (q, k, v, branch_k, branch_v, cu, 0.5)
    torch.library.opcheck(torch.ops.torchspec.branch_attention.default, args)
    out, lse = branch_attention(q, k, v, branch_k, branch_v, cu, 0.5)
    detached = [[y.detach() for y in x] for x in ([q, k, v], branch_k, branch_v)]
    backward_args = (torch.ones_like(out), *detached[0], detached[1], detached[2], out.detach(), lse, cu, 0.5)
    torch.library.opcheck(torch.ops.torchspec.branch_attention_backward.default, backward_args)

    def flat(q, k, v, *branches):
        return branch_attention(q, k, v, list(branches[:entries]), list(branches[entries:]), cu, 0.5)[0]

    assert torch.autograd.gradcheck(flat, (q, k, v, *branch_k, *branch_v))


def test_lse_carries_no_gradient():
    _, lse = branch_attention(*make([3, 2], entries=1))
    assert not lse.requires_grad


def test_selective_checkpointing_keeps_the_result(monkeypatch):
    from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

    calls = []
    kernels = ops.kernels_for(torch.device("cpu"))
    forward = kernels.part_fwd
    monkeypatch.setattr(kernels, "part_fwd", lambda *args: calls.append(1) or forward(*args))
    q, k, v, _, _, cu = make([5, 3])

    def run(q, k, v):
        return packed_attention(q * 2, k, v, cu).square().sum()

    def contexts():
        return create_selective_checkpoint_contexts(save_ops())

    plain = torch.autograd.grad(run(q, k, v), [q, k, v])
    calls.clear()
    loss = checkpoint(run, q, k, v, use_reentrant=False, context_fn=contexts)
    assert all(map(torch.equal, torch.autograd.grad(loss, [q, k, v]), plain))
    assert len(calls) == 1


def test_flash_attn_is_called_as_version_2_8_wants_it(monkeypatch):
    """A stand-in with flash-attn 2.8's signatures, computing on the CPU."""
    calls = []

    class FlashAttn:
        @staticmethod
        def _flash_attn_varlen_forward(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
            window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False,
            block_table=None, leftpad_k=None, seqused_k=None, zero_tensors=False,
        ):  # fmt: skip
            calls.append((cu_seqlens_q.tolist(), max_seqlen_q, causal))
            out, lse = cpu.part_fwd(q, k, v, cu_seqlens_q.tolist(), softmax_scale)
            lse[0, 0] = torch.inf  # flash-attn's word for a row without keys
            return out, lse, None, None

        @staticmethod
        def _flash_attn_varlen_backward(
            dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
            dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes,
            deterministic, rng_state=None, zero_tensors=False,
        ):  # fmt: skip
            grads = cpu.part_bwd(dout, q, k, v, out, softmax_lse, cu_seqlens_q.tolist(), softmax_scale)
            for grad, value in zip((dq, dk, dv), grads, strict=True):
                grad.copy_(value)

    monkeypatch.setattr(flash, "_flash_attn", lambda: FlashAttn)
    q, k, v, _, _, _ = (x.detach() if torch.is_tensor(x) else x for x in make([3, 4], dtype=torch.bfloat16))
    out, lse = flash.part_fwd(q, k, v, [0, 3, 7], 0.5)
    expected, expected_lse = cpu.part_fwd(q, k, v, [0, 3, 7], 0.5)
    assert calls == [([0, 3, 7], 4, True)]
    assert lse[0, 0] == -torch.inf
    assert torch.equal(out, expected)
    assert torch.equal(lse[1:], expected_lse[1:])
    args = (torch.ones_like(out), q, k, v, expected, expected_lse, [0, 3, 7], 0.5)
    assert all(map(torch.equal, flash.part_bwd(*args), cpu.part_bwd(*args)))


def test_torchs_varlen_ops_take_our_arguments(monkeypatch):
    """On meta tensors the ops check their arguments against their schema, and give shapes."""
    monkeypatch.setattr(flash, "_flash_attn", lambda: None)
    q, k, v = (torch.empty(7, heads, 8, dtype=torch.bfloat16, device="meta") for heads in (4, 2, 2))
    out, lse = flash.part_fwd(q, k, v, [0, 3, 7], 0.5)
    assert (out.shape, lse.shape, lse.dtype) == ((7, 4, 8), (4, 7), torch.float32)
    dq, dk, dv = flash.part_bwd(out, q, k, v, out, lse, [0, 3, 7], 0.5)
    assert (dq.shape, dk.shape, dv.shape) == (q.shape, k.shape, v.shape)


def test_cuda_kernels_refuse_fp32():
    q, k, v, _, _, _ = make([3], dtype=torch.float32)
    with pytest.raises(ValueError, match=r"q is torch\.float32; CUDA attention kernels take bfloat16"):
        flash.part_fwd(q, k, v, [0, 3], 0.5)


def test_other_devices_are_refused():
    with pytest.raises(ValueError, match="attention kernels exist for cpu and cuda"):
        ops.kernels_for(torch.device("mps"))


BAD = {
    "q has shape": lambda a: {**a, "q": a["q"][0]},
    "k's heads": lambda a: {**a, "k": a["k"][:, :0]},
    "v has shape": lambda a: {**a, "v": a["v"][1:]},
    "v is torch.float32": lambda a: {**a, "v": a["v"].float()},
    r"branch_k\[0\] has shape": lambda a: {**a, "branch_k": [a["k"][1:]], "branch_v": [a["v"]]},
    "they are pairs": lambda a: {**a, "branch_k": [a["k"]]},
    r"rise from 0 to the 5 tokens": lambda a: {**a, "cu_seqlens": a["cu_seqlens"] - 1},
    r"cu_seqlens is \[0, 4, 3, 5\]": lambda a: {**a, "cu_seqlens": torch.tensor([0, 4, 3, 5]).int()},
    r"cu_seqlens is \[0, 3\]": lambda a: {**a, "cu_seqlens": torch.tensor([0, 3]).int()},
    "must be int32": lambda a: {**a, "cu_seqlens": a["cu_seqlens"].long()},
}


@pytest.mark.parametrize("message", BAD)
def test_bad_inputs_say_what_is_allowed(message):
    q, k, v, branch_k, branch_v, cu = make([3, 2])
    args = dict(q=q, k=k, v=v, branch_k=branch_k, branch_v=branch_v, cu_seqlens=cu)
    with pytest.raises(ValueError, match=message):
        branch_attention(**BAD[message](args))


def test_heads_that_do_not_divide():
    with pytest.raises(ValueError, match="must divide q's evenly"):
        branch_attention(*make([3], heads=4, kv_heads=3))
