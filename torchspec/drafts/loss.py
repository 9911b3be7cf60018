"""Soft cross-entropy of a draft against its teacher, fused with both heads and computed in chunks of rows."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class SoftCrossEntropy(NamedTuple):
    """`loss` [] is differentiable; the others are detached, one value per row [N], fp32 (fp64 for fp64).

    `ce` is -sum_v t_v log p_v for teacher t and student p, `overlap` sum_v min(p_v, t_v), the probability
    that rejection sampling accepts a token drawn from p, and `top1` 1.0 where both argmaxes agree.
    """

    loss: Tensor
    ce: Tensor
    overlap: Tensor
    top1: Tensor


def soft_cross_entropy(
    student: Tensor, head: Tensor, teacher: Tensor, teacher_head: Tensor, weights: Tensor, chunk_rows: int
) -> SoftCrossEntropy:
    """loss = sum_i weights_i CE(softmax(teacher_i @ teacher_head.T), softmax(student_i @ head.T)).

    Gradients are computed along with the loss, so that logits exist for `chunk_rows` rows at a time and
    never again. Softmaxes and sums are fp32 (fp64 for fp64). Only `student` and `head` get gradients.
    Every row costs a pass through both heads: leave out rows of weight zero.

    Args:
        student: [N, E] hidden rows of the draft, after its last norm.
        head: [Vd, E] head of the draft.
        teacher: [N, E] final hidden rows of the policy.
        teacher_head: [Vd, E] head of the policy, its rows gathered to the draft vocabulary; the teacher is
            thereby renormalised over that vocabulary.
        weights: [N], of each row in the loss.
        chunk_rows: rows whose logits exist at a time.

    N = 0 is legal: the loss is zero and its gradients are zeros.
    """
    return SoftCrossEntropy(
        *_SoftCrossEntropy.apply(student, head, teacher.detach(), teacher_head.detach(), weights, chunk_rows)
    )


class _SoftCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, student, head, teacher, teacher_head, weights, chunk_rows):
        acc = torch.promote_types(student.dtype, torch.float32)
        weights = weights.to(acc)
        dstudent = torch.empty_like(student)
        dhead = torch.zeros_like(head, dtype=acc)
        ce, overlap, top1 = (student.new_empty(student.shape[0], dtype=acc) for _ in range(3))
        for start in range(0, student.shape[0], chunk_rows):
            rows = slice(start, start + chunk_rows)
            log_p = torch.log_softmax((student[rows] @ head.T).to(acc), dim=-1)
            t = torch.softmax((teacher[rows] @ teacher_head.T).to(acc), dim=-1)
            p = log_p.exp()
            ce[rows] = -(t * log_p).sum(-1)
            overlap[rows] = torch.minimum(p, t).sum(-1)
            top1[rows] = (p.argmax(-1) == t.argmax(-1)).to(acc)
            dlogits = p.sub_(t).mul_(weights[rows, None]).to(student.dtype)
            dstudent[rows] = dlogits @ head
            dhead += dlogits.T @ student[rows]
        ctx.save_for_backward(dstudent, dhead.to(head.dtype))
        ctx.mark_non_differentiable(ce, overlap, top1)
        return (weights * ce).sum(), ce, overlap, top1

    @staticmethod
    def backward(ctx, *grads):
        dloss, (dstudent, dhead) = grads[0], ctx.saved_tensors
        return dloss * dstudent, dloss * dhead, None, None, None, None
