"""Context-parallel attention in worlds of gloo ranks against the dense oracle, and its own promises."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.dist.worlds import run_world
from torchspec.attention import (
    AttentionCall,
    Plan,
    Traffic,
    Trunk,
    build_plan,
    context_attention,
    get_transport,
    reference,
    save_ops,
    trunk_attention,
    trunk_gather,
)
from torchspec.attention.transports.query_ring import branch_attention_query_ring
from torchspec.attention.transports.ring import branch_ring_attention
from torchspec.distributed.mesh import Mesh

pytestmark = pytest.mark.dist
TRANSPORTS = ("ring", "gather", "query_ring")


@dataclass(frozen=True)
class Case:
    lengths: tuple[int, ...]
    heads: int = 4
    kv_heads: int = 2
    entries: int = 1
    window: int | None = None
    dtype: torch.dtype = torch.float64
    anchors: tuple[int, ...] = ()
    slots: int = 0
    dim: int = 8


@dataclass(frozen=True)
class Inputs:
    """A whole pack in fp64, the same on all ranks."""

    q: Tensor
    k: Tensor
    v: Tensor
    branch_k: list[Tensor]
    branch_v: list[Tensor]
    dout: Tensor
    cu: Tensor

    @property
    def leaves(self) -> list[Tensor]:
        return [self.q, self.k, self.v, *self.branch_k, *self.branch_v]


def group() -> str:
    return dist.group.WORLD.group_name


def plan_of(case: Case) -> Plan:
    ends = tuple(torch.tensor([0, *case.lengths]).cumsum(0).tolist())
    return build_plan(ends, dist.get_world_size(), dist.get_rank(), case.window)


def make(case: Case) -> Inputs:
    generator = torch.Generator().manual_seed(0)
    tokens = sum(case.lengths)
    queries = len(case.anchors) * case.slots if case.slots else tokens

    def rand(rows: int, heads: int) -> Tensor:
        x = torch.randn(rows, heads, case.dim, generator=generator, dtype=torch.float64)
        return x.to(case.dtype).double().requires_grad_()

    q, k, v = rand(queries, case.heads), rand(tokens, case.kv_heads), rand(tokens, case.kv_heads)
    branch_k, branch_v = ([rand(queries, case.kv_heads) for _ in range(case.entries)] for _ in range(2))
    cu = torch.tensor([0, *case.lengths]).cumsum(0).int()
    return Inputs(q, k, v, branch_k, branch_v, rand(queries, case.heads).detach(), cu)


def oracle(case: Case, x: Inputs) -> list[Tensor]:
    """out, lse as [T, H], and the gradients of all leaves."""
    if case.slots:
        mask = reference.block_mask(
            x.cu, torch.tensor(case.anchors, dtype=torch.int32), case.slots, case.window
        )
        out, lse = reference.masked_attention(
            x.q, torch.cat([x.k, *x.branch_k]), torch.cat([x.v, *x.branch_v]), mask
        )
    else:
        out, lse = reference.branch_attention(x.q, x.k, x.v, x.branch_k, x.branch_v, x.cu, window=case.window)
    return [out, lse.T, *torch.autograd.grad(out, x.leaves, x.dout)]


def local_rows(case: Case, plan: Plan) -> tuple[Tensor, Tensor]:
    """(which query rows, which trunk rows) of the pack this rank has."""
    index = torch.from_numpy(plan.index)
    if not case.slots:
        return index, index
    mine = [i for i, p in enumerate(case.anchors) if p in plan.own_anchors(case.anchors)]
    rows = [i * case.slots + j for i in mine for j in range(case.slots)]
    return torch.tensor(rows, dtype=torch.long), index


def shard(case: Case, x: Inputs, plan: Plan) -> Inputs:
    rows, index = local_rows(case, plan)

    def take(y: Tensor, at: Tensor) -> Tensor:
        return y.detach()[at].to(case.dtype).requires_grad_()

    branches = ([take(y, rows) for y in branch] for branch in (x.branch_k, x.branch_v))
    return Inputs(
        take(x.q, rows), take(x.k, index), take(x.v, index), *branches, take(x.dout, rows).detach(), x.cu
    )


def attention(transport: str, case: Case, x: Inputs) -> tuple[Tensor, Tensor]:
    call = AttentionCall(group(), case.window, case.slots)
    anchors = torch.tensor(case.anchors, dtype=torch.int32) if case.slots else None
    if transport == "gather":
        trunk = trunk_gather(x.k, x.v, x.cu, group=group())
        return trunk_attention(x.q, trunk, x.branch_k, x.branch_v, x.cu, call, anchors)
    op = branch_ring_attention if transport == "ring" else branch_attention_query_ring
    return op(x.q, x.k, x.v, x.branch_k, x.branch_v, x.cu, call, anchors)


def run(transport: str, case: Case, x: Inputs) -> list[Tensor]:
    out, lse = attention(transport, case, x)
    assert not lse.requires_grad
    return [out, lse.T, *torch.autograd.grad(out, x.leaves, x.dout)]


def worst_error(transport: str, case: Case) -> float:
    """The largest error of this rank over out, lse and every gradient. Collective."""
    x, plan = make(case), plan_of(case)
    rows, index = local_rows(case, plan)
    exact = oracle(case, x)
    at = [rows, rows, rows, index, index] + [rows] * (2 * case.entries)
    worst = 0.0
    for ours, whole, here in zip(run(transport, case, shard(case, x, plan)), exact, at, strict=True):
        expected = whole[here]
        assert ours.shape == expected.shape
        if case.dtype == torch.bfloat16:  # over the whole pack, in units of one cast of the exact result
            cast = expected.to(ours.dtype).double() - expected
            squares = torch.stack([(x.double() ** 2).sum() for x in (ours - expected, cast, expected)])
            dist.all_reduce(squares)
            error = (squares[0] / (squares[1] + 1e-12 * squares[2] + 1e-30)).sqrt()
        else:
            error = (ours.double() - expected).abs().max() if expected.numel() else torch.zeros(())
        worst = max(worst, error.item())
    return worst


def chunk(length: int) -> int:
    return length // (2 * dist.get_world_size())


TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 2.0}
LONG, SHORT = (48,), (3, 5, 2, 7, 1, 4, 6, 3, 9, 2)
TINY, ONES, MIXED = (1, 2, 3, 5, 7), (1,) * 5, (29, 1, 5, 40, 3)
GQA = ((4, 4), (8, 2), (8, 1))  # 1, 4 and 8 query heads to a k/v head


def cases() -> list[Case]:
    """Every value of every axis, and the pairs that are apt to interact."""
    found = [Case(lengths, entries=e) for lengths, e in product((LONG, SHORT, TINY, ONES, MIXED), (0, 1, 3))]
    found += [Case(MIXED, heads, kv, entries=6) for heads, kv in GQA]
    windows = (1, 3, chunk(48), chunk(48) + 5, 3 * chunk(48) + 1)
    found += [Case((48, 5, 1), entries=e, window=w) for w, e in product(windows, (0, 3, 6))]
    found += [Case(MIXED, entries=2, window=w) for w in (None, 7)]
    anchors = (0, 1, 17, 28, 29, 30, 33, 50, 50, 74, 77)
    found += [Case(MIXED, anchors=anchors, slots=4, window=w) for w in (None, 6)]
    found += [Case(MIXED, anchors=anchors, slots=3)]
    found += [Case(lengths, entries=2) for lengths in ((1,), (2,), ())]  # ranks without rows
    found += [Case(MIXED, entries=3, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)]
    return [*found, Case((200, 56), 8, 1, entries=2, dtype=torch.bfloat16, dim=16)]


def check(all_cases: list[Case]) -> None:
    for case, transport in product(all_cases, TRANSPORTS):
        error = worst_error(transport, case)
        assert error <= TOLERANCE[case.dtype], f"{transport} {case}: {error}"


def check_oracle(mesh: Mesh) -> None:
    check(cases())


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_equals_the_dense_oracle(size: int, tmp_path: Path) -> None:
    run_world(size, check_oracle, tmp_path)


def check_every_combination(mesh: Mesh) -> None:
    windows = (None, 3, chunk(48), chunk(48) + 5, 3 * chunk(48) + 1)
    axes = product((LONG, SHORT, TINY, ONES, MIXED), GQA, (0, 1, 3, 6), windows)
    check([Case(lengths, *heads, entries=e, window=w) for lengths, heads, e, w in axes])


@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_combination(size: int, tmp_path: Path) -> None:
    run_world(size, check_every_combination, tmp_path, timeout_s=900)


# ------------------------------------------------------------------------- promises beyond the values


@contextmanager
def counted_bytes() -> Iterator[list[int]]:
    """Bytes this rank sends, one entry per message, by wrapping torch.distributed's calls."""
    sent: list[int] = []
    size = dist.get_world_size()

    def wrap(name: str, count: Callable[..., int]) -> Any:
        real = getattr(dist, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            sent.append(count(*args))
            return real(*args, **kwargs)

        return mock.patch.object(dist, name, call)

    with (
        wrap("batch_isend_irecv", lambda ops: sum(o.tensor.nbytes for o in ops if o.op is dist.isend)),
        wrap("all_gather_single", lambda out, x: x.nbytes * (size - 1)),
        wrap("reduce_scatter_single", lambda out, x: out.nbytes * (size - 1)),
        wrap("all_to_all_single", lambda out, x: x.nbytes * (size - 1) // size),
    ):
        yield sent


def check_bytes(passes: int, dtype: torch.dtype) -> None:
    """K passes over one trunk, in shards of equal length."""
    size = dist.get_world_size()
    case = Case((8 * size, 4 * size), entries=passes - 1, dtype=dtype)
    x = shard(case, make(case), plan_of(case))
    sizes = dict(heads=case.heads, kv_heads=case.kv_heads, head_dim=case.dim, itemsize=x.q.element_size())
    traffic = Traffic(tokens=12 * size, queries=12 * size, size=size, passes=passes, **sizes)
    for transport in TRANSPORTS:
        call = AttentionCall(group())
        with counted_bytes() as sent:
            trunk = trunk_gather(x.k, x.v, x.cu, group=group()) if transport == "gather" else None
            outs = []
            for d in range(passes):
                branches = x.branch_k[:d], x.branch_v[:d]
                if trunk is not None:
                    outs.append(trunk_attention(x.q, trunk, *branches, x.cu, call)[0])
                else:
                    op = branch_ring_attention if transport == "ring" else branch_attention_query_ring
                    outs.append(op(x.q, x.k, x.v, *branches, x.cu, call)[0])
            torch.stack(outs).sum().backward()
        assert sum(sent) == round(get_transport(transport).sent(traffic)), transport
        if transport == "gather":
            assert len(sent) == 2  # however many passes
        if transport == "ring":
            assert len(sent) == passes * 3 * (size - 1)  # K/V twice, dK/dV once, C - 1 hops each


def check_whole_passes(case: Case, block: int) -> None:
    """K passes over one gathered trunk, a block of rows at a time, each with its own backward."""
    x, plan = make(case), plan_of(case)
    passes = case.entries + 1
    losses = []
    for d in range(passes):
        out, _ = reference.branch_attention(
            x.q, x.k, x.v, x.branch_k[:d], x.branch_v[:d], x.cu, window=case.window
        )
        losses.append((out * x.dout).sum())
    exact = torch.autograd.grad(torch.stack(losses).sum(), x.leaves)
    local = shard(case, x, plan)
    gathered = trunk_gather(local.k, local.v, x.cu, group=group())
    trunk = Trunk(gathered.kv, gathered.grad_accumulator.detach().requires_grad_())
    total = plan.rows[plan.rank]
    for start in range(0, total, block):
        # Every other row of the block has no loss in this pass; a second range does them.
        end = min(start + block, total)
        middle = (start + end) // 2
        for ranges in ([(start, middle)], [(middle, middle), (middle, end)]):
            at = torch.cat([torch.arange(a, b) for a, b in ranges])
            loss = torch.zeros((), dtype=case.dtype)
            for d in range(passes):
                branches = [[y[at] for y in branch[:d]] for branch in (local.branch_k, local.branch_v)]
                rows = torch.tensor(ranges, dtype=torch.int32)
                out, _ = trunk_attention(
                    local.q[at],
                    trunk,
                    *branches,
                    x.cu,
                    AttentionCall(group(), case.window),
                    rows,
                )
                loss = loss + (out * local.dout[at]).sum()
            loss.backward()
    grad = (
        trunk.grad_accumulator.grad
        if trunk.grad_accumulator.grad is not None
        else torch.zeros_like(trunk.grad_accumulator)
    )
    gathered.grad_accumulator.backward(grad)  # every rank, also one without rows
    index = torch.from_numpy(plan.index)
    for ours, expected in zip(local.leaves, exact, strict=True):
        grad = torch.zeros_like(ours) if ours.grad is None else ours.grad
        torch.testing.assert_close(grad, expected[index], rtol=0, atol=1e-10)


def check_bitwise(case: Case) -> None:
    x = shard(case, make(case), plan_of(case))
    for transport in TRANSPORTS:
        first, second = run(transport, case, x), run(transport, case, x)
        assert all(map(torch.equal, first, second)), transport


def check_checkpointing(case: Case) -> None:
    """Under selective activation checkpointing the forward's messages are sent once."""
    from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

    x = shard(case, make(case), plan_of(case))
    for transport in TRANSPORTS:
        plain = run(transport, case, x)
        with counted_bytes() as sent:
            run(transport, case, x)

        def forward(*leaves: Tensor, transport: str = transport) -> Tensor:
            e = case.entries
            inputs = replace(
                x,
                q=leaves[0] * 1,
                k=leaves[1],
                v=leaves[2],
                branch_k=[*leaves[3 : 3 + e]],
                branch_v=[*leaves[3 + e :]],
            )
            return attention(transport, case, inputs)[0]

        with counted_bytes() as again:
            out = checkpoint(
                forward,
                *x.leaves,
                use_reentrant=False,
                context_fn=lambda: create_selective_checkpoint_contexts(save_ops()),
            )
            grads = torch.autograd.grad(out, x.leaves, x.dout)
        assert again == sent
        assert all(map(torch.equal, grads, plain[2:]))


def check_errors(mesh: Mesh) -> None:
    """Raised on every rank before anything is sent: no rank waits for another."""
    case = Case(MIXED)
    x = shard(case, make(case), plan_of(case))
    bad: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        ("group is 'nowhere'; there is no process group", {}, dict(group="nowhere")),
        ("window is 0; it must be at least 1", {}, dict(window=0)),
        ("must have .* of this pack", dict(cu=x.cu * 2), {}),
        ("never fall|must rise", dict(cu=x.cu.flip(0)), {}),
        (r"v is torch\.float32", dict(v=x.v.float()), {}),
        ("must divide q's evenly", dict(q=x.q[:, :3]), {}),
        ("q has .* rows; rank", dict(q=x.q[1:], branch_k=[], branch_v=[]), {}),
        ("exactly one", dict(branch_k=[], branch_v=[]), dict(slots=2)),
        ("anchors is None", {}, dict(slots=2)),
        ("slots is -1", {}, dict(slots=-1)),
    ]
    with counted_bytes() as sent:
        for message, inputs, options in bad:
            for op in (branch_ring_attention, branch_attention_query_ring):
                y = replace(x, **inputs)
                with pytest.raises(ValueError, match=message):
                    op(
                        y.q,
                        y.k,
                        y.v,
                        y.branch_k,
                        y.branch_v,
                        y.cu,
                        AttentionCall(**{"group": group(), **options}),
                    )
        with pytest.raises(ValueError, match=r"k has .* rows; rank"):
            trunk_gather(x.k[1:], x.v[1:], x.cu, group=group())
        with pytest.raises(ValueError, match="must be one of gather, ring, query_ring"):
            context_attention(x.q, x.k, x.v, x.cu, AttentionCall(group()), "auto")
    assert not sent


def check_mutations(mesh: Mesh) -> None:
    """Planted bugs are far outside the tolerance on some rank."""
    from torchspec.attention import plan as plan_module

    case = Case((32, 9), entries=2, window=11)
    plan = plan_of(case)
    real = plan_module._pair

    def first_key_lost(query, run, window):
        for task in real(query, run, window):
            spare = task.k1 - task.k0 > (task.q1 - task.q0 if task.causal else 1)
            yield task._replace(k0=task.k0 + 1) if spare else task

    def window_off_by_one(query, run, window):
        return real(query, run, window + 1)

    @contextmanager
    def swapped_chunks():
        index = plan.index
        kept = index.copy()
        index[: len(index) // 2] = kept[len(index) // 2 : len(index) // 2 * 2]
        index[len(index) // 2 : len(index) // 2 * 2] = kept[: len(index) // 2]
        yield
        index[:] = kept

    @contextmanager
    def one_diagonal_dropped():
        import torchspec.attention.core as core

        hidden = core._hidden_entries
        with mock.patch.object(core, "_hidden_entries", lambda b, w: hidden(b, w) + 1):
            yield

    bugs = [
        mock.patch.object(plan_module, "_pair", first_key_lost),
        mock.patch.object(plan_module, "_pair", window_off_by_one),
        swapped_chunks(),
        one_diagonal_dropped(),
    ]
    for bug in bugs:
        plan_module._row_tasks.cache_clear()
        with bug:
            for transport in TRANSPORTS:
                worst = torch.tensor(worst_error(transport, case))
                dist.all_reduce(worst, dist.ReduceOp.MAX)
                assert worst > 1e-3, (bug, transport)
    plan_module._row_tasks.cache_clear()


def check_promises(mesh: Mesh) -> None:
    for passes, dtype in ((1, torch.float64), (4, torch.float32), (7, torch.bfloat16)):
        check_bytes(passes, dtype)
    check_bitwise(Case(MIXED, entries=2))
    check_bitwise(Case(MIXED, entries=2, dtype=torch.bfloat16))
    for lengths in (MIXED, (1,)):
        for window in (None, 4):
            check_whole_passes(Case(lengths, entries=3, window=window), block=10)
    check_checkpointing(Case(MIXED, entries=1))
    check_errors(mesh)
    check_mutations(mesh)
    case = Case(MIXED, entries=0)
    x = shard(case, make(case), plan_of(case))
    for transport in ("ring", "gather"):
        out = context_attention(x.q, x.k, x.v, x.cu, AttentionCall(group()), transport)
        assert torch.equal(out, attention(transport, case, x)[0])


@pytest.mark.parametrize("size", [2, 3])
def test_promises(size: int, tmp_path: Path) -> None:
    """Bytes on the wire, bitwise reruns, row blocks, checkpointing, errors before messages, planted bugs."""
    run_world(size, check_promises, tmp_path)


def check_compile(mesh: Mesh) -> None:
    """One graph, none more when documents move; no rank drops a collective whose result it does not use."""
    import torch._dynamo as dynamo
    from torch._dynamo.testing import CompileCounterWithBackend

    tokens = 24
    packs = [(24,), (24,), (10, 14), (3, 21), (1, 23), (12, 12)]

    def loss_of(transport: str) -> Callable[..., Tensor]:
        def loss(q: Tensor, k: Tensor, v: Tensor, bk: Tensor, bv: Tensor, cu: Tensor) -> Tensor:
            q = q * 2
            if transport == "gather":
                trunk = trunk_gather(k, v, cu, group=group(), tokens=tokens)
                first, _ = trunk_attention(q, trunk, [], [], cu, AttentionCall(group()))
                out, _ = trunk_attention(first, trunk, [bk], [bv], cu, AttentionCall(group()))
            elif transport == "ring":
                out, _ = branch_ring_attention(q, k, v, [bk], [bv], cu, AttentionCall(group()))
            else:
                out, _ = branch_attention_query_ring(q, k, v, [bk], [bv], cu, AttentionCall(group()))
            return out.square().sum()

        return loss

    def unused(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, use: bool) -> Tensor:
        out, _ = branch_ring_attention(q, k, v, [], [], cu, AttentionCall(group()))
        return out.sum() if use else q.sum()

    def inputs(lengths: tuple[int, ...]) -> Inputs:
        case = Case(lengths, dtype=torch.float32)
        return shard(case, make(case), plan_of(case))

    for transport in TRANSPORTS:
        dynamo.reset()
        counter = CompileCounterWithBackend("inductor" if transport == "gather" else "aot_eager")
        compiled = torch.compile(loss_of(transport), backend=counter, fullgraph=True)
        for i, lengths in enumerate(packs):
            x = inputs(lengths)
            arguments = (*x.leaves, x.cu)
            ours = torch.autograd.grad(compiled(*arguments), x.leaves)
            torch.testing.assert_close(ours, torch.autograd.grad(loss_of(transport)(*arguments), x.leaves))
            if i == 2:  # the second length of cu_seqlens makes it dynamic, once
                settled = counter.frame_count
        assert counter.frame_count == settled, transport
    dynamo.reset()
    x = inputs((24,))
    compiled = torch.compile(unused, fullgraph=True)
    with torch.no_grad(), counted_bytes() as sent:
        compiled(x.q, x.k, x.v, x.cu, mesh.rank == 0)
    assert sent


def test_compiles_to_one_graph(tmp_path: Path) -> None:
    run_world(2, check_compile, tmp_path)
