"""What all attention ops share: parts merged into one softmax, its backward, and the checks of inputs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from torchspec.attention.kernels import accumulator, kernels_for
from torchspec.attention.plan import Task


class Keys(NamedTuple):
    """Keys and values [S, G, D] that some query rows look at, as `tasks` say.

    Attributes:
        dk, dv: where the backward adds their gradients; accumulator dtype.
        opens: these tasks give every query row its first part (else the causal tasks do).
    """

    k: Tensor
    v: Tensor
    tasks: tuple[Task, ...]
    dk: Tensor | None = None
    dv: Tensor | None = None
    opens: bool = False


def merge_parts(q: Tensor, sources: Iterable[Keys], scale: float) -> tuple[Tensor | None, Tensor | None]:
    """Softmax attention of q over all sources: out [T, H, D] and lse [H, T], or None where none has a task.

    out comes in q's dtype where one kernel call gave it all, else in the accumulator dtype. The first part
    of a row opens its accumulator: none ever starts from -inf, which two empty parts would turn into NaN.
    """
    total: tuple[Tensor, Tensor] | None = None
    for source in sources:
        parts = kernels_for(q.device).part_fwd(q, source.k, source.v, source.tasks, scale)
        for rows, part, part_lse, opens in parts:
            if total is None and part.shape[0] == q.shape[0] and isinstance(rows, slice):
                total = part, part_lse
                continue
            out, lse = total or _accumulators(q)
            if opens or source.opens:
                out[rows] = part.to(out.dtype)
                lse[:, rows] = part_lse
            else:
                out = out.to(accumulator(q.dtype))
                merge_part(out, lse, rows, part, part_lse)
            total = out, lse
    return (total[0].contiguous(), total[1].contiguous()) if total else (None, None)


def merge_part(out: Tensor, lse: Tensor, rows: slice | Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merge one part of some rows into `out` and `lse` in place; accumulator dtype.

    A part without keys, (0, -inf), leaves its rows as they are; they must hold another part already.
    """
    joint = torch.logaddexp(lse[:, rows], part_lse)
    weight = torch.exp(part_lse - joint).T.unsqueeze(-1)
    out[rows] = torch.lerp(out[rows], part.to(out.dtype), weight)
    lse[:, rows] = joint


def attend(
    q: Tensor,
    sources: Iterable[Keys],
    branch_k: list[Tensor],
    branch_v: list[Tensor],
    window: int | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """out [T, H, D] in q's dtype and lse [H, T] over all sources and the rows' own entries."""
    return join_branches(q, *merge_parts(q, sources, scale), branch_k, branch_v, window, scale)


def join_branches(
    q: Tensor,
    out: Tensor | None,
    lse: Tensor | None,
    branch_k: list[Tensor],
    branch_v: list[Tensor],
    window: int | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Merge the branch entries that the window leaves visible into what `merge_parts` gave."""
    if not q.shape[0]:
        return empty_outputs(q)
    hidden = _hidden_entries(branch_k, window)
    if branch_k:
        return kernels_for(q.device).branch_fwd(q, out, lse, branch_k[hidden:], branch_v[hidden:], scale)
    assert out is not None
    assert lse is not None
    return out.to(q.dtype), lse


def attend_grads(
    dout: Tensor,
    q: Tensor,
    sources: Iterable[Keys],
    branch_k: list[Tensor],
    branch_v: list[Tensor],
    out: Tensor,
    lse: Tensor,
    window: int | None,
    scale: float,
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """dq and the entries' gradients; the trunk's are added to the sources' dk and dv."""
    dq = part_grads(dout, q, sources, out, lse, scale)
    return join_branch_grads(dout, q, branch_k, branch_v, out, lse, dq, window, scale)


def part_grads(
    dout: Tensor, q: Tensor, sources: Iterable[Keys], out: Tensor, lse: Tensor, scale: float
) -> Tensor | None:
    """The sources' share of dq (None: they had no task); dk and dv go into the sources."""
    dq = None
    for source in sources:
        parts = kernels_for(q.device).part_bwd(dout, q, source.k, source.v, out, lse, source.tasks, scale)
        for rows, keys, part, dk, dv in parts:
            if dq is None and part.shape[0] == q.shape[0] and isinstance(rows, slice):
                dq = part
            else:
                total = torch.zeros_like(q, dtype=accumulator(q.dtype)) if dq is None else dq
                dq = _add(total.to(accumulator(q.dtype)), rows, part)
            assert source.dk is not None
            assert source.dv is not None
            _add(source.dk, keys, dk)
            _add(source.dv, keys, dv)
    return dq


def join_branch_grads(
    dout: Tensor,
    q: Tensor,
    branch_k: list[Tensor],
    branch_v: list[Tensor],
    out: Tensor,
    lse: Tensor,
    dq: Tensor | None,
    window: int | None,
    scale: float,
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """dq completed by the visible entries' share, and the gradients of all entries."""
    hidden = _hidden_entries(branch_k, window)
    if not q.shape[0] or not branch_k:
        dq = torch.zeros_like(q) if dq is None else dq.to(q.dtype).contiguous()
        return dq, [*map(torch.zeros_like, branch_k)], [*map(torch.zeros_like, branch_v)]
    kernels = kernels_for(q.device)
    seen = branch_k[hidden:], branch_v[hidden:]
    dq, dbranch_k, dbranch_v = kernels.branch_bwd(dout, q, *seen, out, lse, dq, scale)
    zeros = [[torch.zeros_like(x) for x in branch[:hidden]] for branch in (branch_k, branch_v)]
    return dq, zeros[0] + dbranch_k, zeros[1] + dbranch_v


def empty_outputs(q: Tensor) -> tuple[Tensor, Tensor]:
    """out and lse of a call, uninitialised."""
    return q.new_empty(q.shape), q.new_empty(q.shape[1], q.shape[0], dtype=accumulator(q.dtype))


def empty_like(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Contiguous, as real ops return it, whatever x's strides: for fake implementations."""
    return x.new_empty(x.shape, dtype=dtype or x.dtype)


def check_tensors(
    q: Tensor, k: Tensor, v: Tensor, branch_k: list[Tensor], branch_v: list[Tensor], slots: int = 0
) -> None:
    """Raise a ValueError unless shapes, dtypes and devices of one call fit together.

    k and v may have other rows than q; branch entries have q's. A block draft (slots > 0) has one entry.
    """
    if q.dim() != 3:
        raise ValueError(f"q has shape {list(q.shape)}; expected [tokens, heads, head_dim]")
    if k.dim() != 3 or not k.shape[1] or q.shape[1] % k.shape[1]:
        raise ValueError(
            f"k has shape {list(k.shape)} and q {list(q.shape)}; k's heads (dim 1) must divide q's evenly"
        )
    if len(branch_k) != len(branch_v):
        raise ValueError(f"branch_k has {len(branch_k)} entries and branch_v {len(branch_v)}; they are pairs")
    if slots and len(branch_k) != 1:
        raise ValueError(f"branch_k has {len(branch_k)} entries; blocks (slots = {slots}) have exactly one")
    entries = [(f"branch_k[{i}]", x) for i, x in enumerate(branch_k)]
    entries += [(f"branch_v[{i}]", x) for i, x in enumerate(branch_v)]
    shapes = [("k", k, k.shape[0]), ("v", v, k.shape[0]), *((name, x, q.shape[0]) for name, x in entries)]
    for name, x, rows in shapes:
        shape = (rows, k.shape[1], q.shape[2])
        if x.shape != shape:
            raise ValueError(f"{name} has shape {list(x.shape)}; with this q and k it must be {list(shape)}")
        if (x.dtype, x.device) != (q.dtype, q.device):
            raise ValueError(f"{name} is {x.dtype} on {x.device}; it must be as q, {q.dtype} on {q.device}")


def host_integers(name: str, x: Tensor, dim: int, shape: str) -> list:
    """A host tensor of integers as a list."""
    if x.dtype != torch.int32 or x.device.type != "cpu" or x.dim() != dim:
        raise ValueError(
            f"{name} is {x.dtype} {list(x.shape)} on {x.device}; it must be int32 {shape} on cpu"
        )
    return x.tolist()


def pack_ends(cu_seqlens: Tensor, tokens: int | None = None) -> tuple[int, ...]:
    """cu_seqlens as host integers that rise from 0, to `tokens` where given."""
    values = host_integers("cu_seqlens", cu_seqlens, 1, "[documents + 1]")
    last = tokens if tokens is not None else (values or [0])[-1]
    if not values or values[0] != 0 or values[-1] != last or values != sorted(values):
        raise ValueError(f"cu_seqlens is {values}; it must rise from 0 to the {last} tokens of the pack")
    return tuple(values)


def _accumulators(q: Tensor) -> tuple[Tensor, Tensor]:
    acc = accumulator(q.dtype)
    return q.new_empty(q.shape, dtype=acc), q.new_empty(q.shape[1], q.shape[0], dtype=acc)


def _add(total: Tensor, at: slice | Tensor, part: Tensor) -> Tensor:
    part = part.to(total.dtype)
    if isinstance(at, slice):
        total[at] += part
    else:
        total.index_add_(0, at, part)  # no index twice: the order of additions does not matter
    return total


def _hidden_entries(branch_k: list[Tensor], window: int | None) -> int:
    """How many of the first entries lie outside the window; the last entry is the row itself."""
    return 0 if window is None else max(0, len(branch_k) - window)
