"""branch_attention against the dense oracle: values, every gradient, the op's contracts."""

from operator import sub

import pytest
import torch

from torchspec.attention import branch_attention, core, packed_attention, reference, save_ops
from torchspec.attention.kernels import cpu, flash, kernels_for
from torchspec.attention.plan import Task

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


@pytest.mark.parametrize("window", [1, 2, 3, 5, 9, 300])
@pytest.mark.parametrize("entries", [0, 1, 3, 6])
@pytest.mark.parametrize("lengths", [[9], [5, 1, 7, 2], [700, 1, 3]], ids=str)
def test_windows(lengths, entries, window):
    """Windows smaller than the number of passes hide the whole trunk, and then the first entries."""
    assert_equals_oracle(make(lengths, entries=entries), tol=1e-12, window=window)


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


def test_bf16_error_is_at_most_two_casts():
    inputs = make([40, 24], entries=3, dtype=torch.bfloat16)
    exact_inputs = [
        [y.detach().double().requires_grad_() for y in x] if isinstance(x, list) else x for x in inputs
    ]
    exact_inputs[:3] = [x.detach().double().requires_grad_() for x in inputs[:3]]
    exact = values_and_grads(reference.branch_attention, *exact_inputs)
    for ours, expected in zip(values_and_grads(branch_attention, *inputs), exact, strict=True):
        one_cast = (expected.to(ours.dtype).double() - expected).norm()
        assert (ours.double() - expected).norm() <= 2 * one_cast + 1e-6 * expected.norm()


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
    args = (q, k, v, branch_k, branch_v, cu, 0.5, None)
    torch.library.opcheck(torch.ops.torchspec.branch_attention.default, args)
    out, lse = branch_attention(q, k, v, branch_k, branch_v, cu, 0.5)
    detached = [[y.detach() for y in x] for x in ([q, k, v], branch_k, branch_v)]
    backward_args = (
        torch.ones_like(out),
        *detached[0],
        detached[1],
        detached[2],
        out.detach(),
        lse,
        cu,
        0.5,
        None,
    )
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
    kernels = kernels_for(torch.device("cpu"))
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


CAUSAL = (Task(0, 3, 0, 3, True), Task(3, 7, 3, 7, True))
TASKS = {
    "documents": CAUSAL,
    "a later rank's shard": (Task(1, 3, 0, 2, False), Task(4, 7, 3, 5, False)),
    "gathered trunk": (Task(0, 2, 0, 4, True), Task(2, 4, 0, 6, True), Task(4, 5, 6, 7, True)),
    "windows": (Task(0, 4, 0, 4, True, 1), Task(4, 7, 2, 7, True, 2), Task(4, 7, 0, 2, False, 1)),
}


@pytest.mark.parametrize("tasks", TASKS.values(), ids=TASKS)
def test_flash_attn_is_called_as_version_2_8_wants_it(tasks, monkeypatch):
    """A stand-in with flash-attn 2.8's signatures, computing on the CPU."""
    seen = []

    def as_tasks(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, window):
        assert window[1] == (0 if causal else -1)
        ends_q, ends_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
        assert (max_seqlen_q, max_seqlen_k) == (
            max(map(sub, ends_q[1:], ends_q)),
            max(map(sub, ends_k[1:], ends_k)),
        )
        left = None if window[0] == -1 else window[0]
        seen.append((causal, left))
        spans = zip(ends_q, ends_q[1:], ends_k, ends_k[1:], strict=False)
        return [Task(*span, causal, left) for span in spans]

    class FlashAttn:
        @staticmethod
        def _flash_attn_varlen_forward(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
            window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False,
            block_table=None, leftpad_k=None, seqused_k=None, zero_tensors=False,
        ):  # fmt: skip
            window = window_size_left, window_size_right
            lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
            tasks = as_tasks(*lengths, causal, window)
            opens = core.Keys(k, v, tuple(tasks), opens=True)
            if not causal:  # one part per row: the merge is not this kernel's business
                out, lse = core.merge_parts(q, [opens], softmax_scale)
            else:
                out, lse = core.merge_parts(q, [core.Keys(k, v, tuple(tasks))], softmax_scale)
            lse = lse.clone()
            lse[0, 0] = torch.inf  # flash-attn's word for a row without keys
            return out.to(q.dtype), lse, None, None

        @staticmethod
        def _flash_attn_varlen_backward(
            dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
            dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes,
            deterministic, rng_state=None, zero_tensors=False,
        ):  # fmt: skip
            window = window_size_left, window_size_right
            tasks = as_tasks(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, window)
            sums = torch.zeros_like(k), torch.zeros_like(v)
            source = core.Keys(k, v, tuple(tasks), *sums)
            dq.copy_(core.part_grads(dout, q, [source], out, softmax_lse, softmax_scale))
            dk.copy_(sums[0])
            dv.copy_(sums[1])

    monkeypatch.setattr(flash, "_flash_attn", lambda: FlashAttn)
    monkeypatch.setattr(flash, "_check_dtype", lambda q: None)
    q, k, v = (x.detach() for x in make([7])[:3])
    lse = torch.randn(4, 7, dtype=torch.float64) + 3
    dout, out = torch.randn_like(q), torch.randn_like(q)

    def spread(parts):
        """Parts of each kernel summed up, so that their order and grouping do not matter."""
        total = [torch.zeros_like(x) for x in (q, k, v)]
        for rows, keys, *grads in parts:
            for x, at, grad in zip(total, (rows, keys, keys), grads, strict=True):
                x.index_add_(0, torch.arange(7)[at], grad)
        return total

    ours = spread(flash.part_bwd(dout, q, k, v, out, lse, tasks, 0.5))
    torch.testing.assert_close(ours, spread(cpu.part_bwd(dout, q, k, v, out, lse, tasks, 0.5)))
    weights, expected = [torch.zeros(7, dtype=torch.float64) for _ in range(2)]
    for rows, _, part_lse, _ in flash.part_fwd(q, k, v, tasks, 0.5):
        assert part_lse[0, 0] == -torch.inf
        weights[torch.arange(7)[rows]] += part_lse[1].exp()
    for rows, _, part_lse, _ in cpu.part_fwd(q, k, v, tasks, 0.5):
        expected[rows] += part_lse[1].exp()
    torch.testing.assert_close(weights, expected)
    assert len(seen) == 2 * len({(t.causal, t.left) for t in tasks}) + 2 * (tasks is TASKS["gathered trunk"])


def test_torchs_varlen_ops_take_our_arguments(monkeypatch):
    """On meta tensors the ops check their arguments against their schema, and give shapes."""
    monkeypatch.setattr(flash, "_flash_attn", lambda: None)
    q, k, v = (torch.empty(7, heads, 8, dtype=torch.bfloat16, device="meta") for heads in (4, 2, 2))
    ((_, out, lse, _),) = flash.part_fwd(q, k, v, CAUSAL, 0.5)
    assert (out.shape, lse.shape, lse.dtype) == ((7, 4, 8), (4, 7), torch.float32)
    ((_, _, dq, dk, dv),) = flash.part_bwd(out, q, k, v, out, lse, CAUSAL, 0.5)
    assert (dq.shape, dk.shape, dv.shape) == (q.shape, k.shape, v.shape)


def test_cuda_kernels_refuse_fp32():
    q, k, v, _, _, _ = make([3], dtype=torch.float32)
    with pytest.raises(ValueError, match=r"q is torch\.float32; CUDA attention kernels take bfloat16"):
        next(flash.part_fwd(q, k, v, CAUSAL[:1], 0.5))


def test_other_devices_are_refused():
    with pytest.raises(ValueError, match="attention kernels exist for cpu and cuda"):
        kernels_for(torch.device("mps"))


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
    "window is 0; it must be at least 1": lambda a: {**a, "window": 0},
    "it needs the 5 rows of q": lambda a: {**a, "k": a["k"][1:], "v": a["v"][1:]},
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
