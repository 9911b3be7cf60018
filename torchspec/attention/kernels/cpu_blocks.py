"""Long fp32 tasks on the CPU, in blocks on oneDNN's matrix products: in 0.6 of the time of aten's flash kernel.

The online softmax of flash attention (arXiv 2205.14135, algorithm 1), in base 2 because torch's exp2 is four
times as fast as its exp. The H / G query heads of a k/v head are rows of one product: k and v are not expanded.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from torchspec.attention.plan import Task

# A task pays from this many keys, and query rows times heads per k/v head, on. Below, the products are too small,
# and what they gain is less than the few ms in which oneDNN compiles a task's new shapes.
MIN_KEYS, MIN_ROWS = 2048, 256
# A block has at most _ROWS query rows, which with their heads make at most 2 * _ROWS rows of scores, and _KEYS
# keys: 2 MB. Smaller blocks slow the products; larger ones leave the cache, and malloc gives their memory back
# to the system each time, whose page faults then take a fifth of the run.
_ROWS, _KEYS = 512, 512
_LOG2_E = math.log2(math.e)


def pays(q: Tensor, k: Tensor, task: Task) -> bool:
    """Whether `forward` can do a task, and faster than aten's kernel."""
    rows = (task.q1 - task.q0) * (q.shape[1] // k.shape[1])
    long = rows >= MIN_ROWS and task.k1 - task.k0 >= MIN_KEYS
    return long and q.dtype == torch.float32 and torch.backends.mkldnn.is_available()


def forward(q: Tensor, k: Tensor, v: Tensor, task: Task, scale: float) -> tuple[Tensor, Tensor]:
    """out [rows, H, D] and lse [H, rows] of the task's query rows over its keys.

    q [T, H, D], k and v [S, G, D]: fp32, any strides.
    """
    q, k, v = q[task.q0 : task.q1], k[task.k0 : task.k1], v[task.k0 : task.k1]
    group = q.shape[1] // k.shape[1]
    out, lse = q.new_empty(q.shape), q.new_empty(q.shape[1], q.shape[0])
    step = max(1, min(_ROWS, 2 * _ROWS // group))
    for g in range(k.shape[1]):
        heads = slice(g * group, (g + 1) * group)
        keys, values = k[:, g].contiguous(), v[:, g].T.contiguous()  # [S, D], [D, S]: see _product
        for start in range(0, q.shape[0], step):
            rows = slice(start, min(start + step, q.shape[0]))
            queries = (q[rows, heads] * (scale * _LOG2_E)).flatten(0, 1)
            parts = _softmax_sum(queries, keys, values, rows, task)
            total, weight, top = (x.unflatten(0, (-1, group)) for x in parts)  # [rows, group, D or 1]
            torch.div(total, weight, out=out[rows, heads])
            lse[heads, rows] = ((top + weight.log2()) / _LOG2_E).squeeze(-1).T
    return out, lse


def _softmax_sum(q: Tensor, k: Tensor, v: Tensor, rows: slice, task: Task) -> tuple[Tensor, Tensor, Tensor]:
    """sum_j w_j v_j, sum_j w_j and t, where w_j = 2^(q.k_j - t) and t is the highest of a row's q.k_j.

    q [rows * group, D], k [S, D], v [D, S]. Keys come highest first: every row sees some of the first block,
    so t is finite from the start, and what a mask hides later weighs 2^-inf = 0.
    """
    state: tuple[Tensor, Tensor, Tensor] | None = None
    for keys, masked in _key_blocks(rows, task):
        scores = _product(q, k[keys])
        if masked:
            hidden = _hidden(rows, keys, task)
            scores.unflatten(0, (len(hidden), -1)).masked_fill_(hidden.unsqueeze(1), -torch.inf)
        top = scores.amax(1, keepdim=True)
        if state is not None:
            top = torch.maximum(top, state[2])
        weights = scores.sub_(top).exp2_()
        total, weight = _product(weights, v[:, keys]), weights.sum(1, keepdim=True)
        if state is not None:
            shrink = torch.exp2(state[2] - top)
            total.addcmul_(state[0], shrink)
            weight.addcmul_(state[1], shrink)
        state = total, weight, top
    assert state is not None
    return state


def _key_blocks(rows: slice, task: Task) -> Iterator[tuple[slice, bool]]:
    """The keys that some of the rows see, highest block first, and whether one of them does not see all of it."""
    size = task.k1 - task.k0
    offset = size - (task.q1 - task.q0)  # row i is aligned with key i + offset
    low, seen_by_all, high = 0, 0, size
    if task.left is not None:
        low = max(0, rows.start + offset - task.left)
        seen_by_all = rows.stop - 1 + offset - task.left
    if task.causal:
        high = rows.start + offset
        yield slice(high, rows.stop + offset), True
    while high > low:
        start = max(low, high - _KEYS)
        yield slice(start, high), start < seen_by_all
        high = start


def _hidden(rows: slice, keys: slice, task: Task) -> Tensor:
    """Bool [rows, keys]: whether the task hides a key from a row."""
    offset = (task.k1 - task.k0) - (task.q1 - task.q0)
    own = torch.arange(rows.start + offset, rows.stop + offset).unsqueeze(1)
    key = torch.arange(keys.start, keys.stop)
    if task.left is None:
        return key > own
    hidden = key < own - task.left
    return hidden.logical_or_(key > own) if task.causal else hidden


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b.T, for a [m, n] and b [l, n] with rows that are contiguous.

    It is written as a 1x1 convolution of m pixels with n channels because this is the one aten op that takes dense
    fp32 tensors to oneDNN. torch.mm takes them to MKL, which is half as fast on AMD's AVX-512 CPUs: use it where it
    has caught up.
    """
    pixels = a[None, None].permute(0, 3, 1, 2)
    out = torch.mkldnn_convolution(pixels, b[:, :, None, None], None, (0, 0), (1, 1), (1, 1), 1)
    return out.permute(0, 2, 3, 1)[0, 0]
