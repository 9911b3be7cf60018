"""The chunked soft cross-entropy against plain log_softmax, and the trainer's sums."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from torchspec.drafts.loss import soft_cross_entropy
from torchspec.drafts.trainer import DraftStats


def make(rows=11, width=6, vocab=17, dtype=torch.float64):
    torch.manual_seed(0)
    student, teacher = (torch.randn(rows, width, dtype=torch.float64).to(dtype) for _ in range(2))
    head, teacher_head = (torch.randn(vocab, width, dtype=torch.float64).to(dtype) for _ in range(2))
    weights = torch.rand(rows, dtype=torch.float64)
    return student.requires_grad_(), head.requires_grad_(), teacher, teacher_head, weights


def dense(student, head, teacher, teacher_head, weights):
    log_p = (student @ head.T).log_softmax(-1)
    t = (teacher @ teacher_head.T).softmax(-1)
    ce = -(t * log_p).sum(-1)
    overlap = torch.minimum(log_p.exp(), t).sum(-1)
    return (weights * ce).sum(), ce, overlap, (log_p.argmax(-1) == t.argmax(-1)).to(ce.dtype)


@pytest.mark.parametrize("chunk_rows", [1, 4, 11, 100])
@pytest.mark.parametrize(("dtype", "tol"), [(torch.float64, 1e-12), (torch.float32, 2e-5)])
def test_equals_dense(dtype, tol, chunk_rows):
    args = make(dtype=dtype)
    expected, ours = dense(*args), soft_cross_entropy(*args, chunk_rows)
    for a, b in zip(ours, expected, strict=True):
        torch.testing.assert_close(a, b.to(a.dtype), rtol=tol, atol=tol)
    ours, expected = ([*torch.autograd.grad(3 * x[0], args[:2])] for x in (ours, expected))
    torch.testing.assert_close(ours, expected, rtol=tol, atol=tol)


def test_bf16_sums_in_fp32():
    args = make(rows=64, dtype=torch.bfloat16)
    exact_args = [x.detach().double() for x in args]
    exact_args[:2] = [x.requires_grad_() for x in exact_args[:2]]
    scored = soft_cross_entropy(*args, 1)
    assert scored.loss.dtype == scored.ce.dtype == torch.float32
    torch.testing.assert_close(scored.loss.double(), dense(*exact_args)[0], rtol=1e-2, atol=0)
    exact = torch.autograd.grad(dense(*exact_args)[0], exact_args[:2])
    for ours, expected in zip(torch.autograd.grad(scored.loss, args[:2]), exact, strict=True):
        assert ours.dtype == torch.bfloat16
        assert (ours.double() - expected).norm() <= 2e-2 * expected.norm()


def test_gradient_of_the_head_does_not_saturate_in_bf16():
    """2000 equal contributions: summed in bf16 they would stop adding up after a few hundred."""
    student, head, teacher, teacher_head, _ = make(rows=1, dtype=torch.bfloat16)
    one, many = (
        torch.autograd.grad(
            soft_cross_entropy(
                student.expand(rows, -1), head, teacher.expand(rows, -1), teacher_head, torch.ones(rows), 1
            ).loss,
            head,
        )[0].double()
        for rows in (1, 2000)
    )
    torch.testing.assert_close(many, 2000 * one, rtol=1e-2, atol=1e-6)


def test_only_the_student_learns():
    student, head, teacher, teacher_head, weights = make()
    teacher.requires_grad_()
    teacher_head.requires_grad_()
    scored = soft_cross_entropy(student, head, teacher, teacher_head, weights, 4)
    scored.loss.backward()
    assert student.grad is not None
    assert head.grad is not None
    assert teacher.grad is None
    assert teacher_head.grad is None
    assert not any(x.requires_grad for x in scored[1:])


def test_no_rows_is_a_zero_loss_with_zero_gradients():
    student, head, teacher, teacher_head, weights = make(rows=0)
    loss = soft_cross_entropy(student, head, teacher, teacher_head, weights, 4).loss
    loss.backward()
    assert loss.item() == 0.0
    assert torch.equal(head.grad, torch.zeros_like(head))
    assert student.grad.shape == student.shape


def test_logits_exist_for_chunk_rows_only():
    vocab, chunk_rows, sizes = 1000, 4, []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            sizes.extend(x.numel() for x in [out] if isinstance(x, torch.Tensor))
            return out

    args = make(rows=64, width=2, vocab=vocab)
    with Watch():
        soft_cross_entropy(*args, chunk_rows).loss.backward()
    assert max(sizes) == chunk_rows * vocab


def test_stats_add_up():
    part = DraftStats(
        loss=torch.tensor(0.5, dtype=torch.float64),
        counts=torch.tensor([2, 1, 0], dtype=torch.float64),
        sums={"ce": torch.tensor([4.0, 3.0, 0.0], dtype=torch.float64)},
    )
    both = part + part
    assert both.loss.item() == 1.0
    assert both.counts.tolist() == [4, 2, 0]
    assert both.sums["ce"].tolist() == [8.0, 6.0, 0.0]
