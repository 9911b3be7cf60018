"""The blockwise CPU forward against dense attention in fp64; blocks are made small, so that short tasks have many."""

import pytest
import torch

from torchspec.attention import branch_attention, reference
from torchspec.attention.kernels import cpu, cpu_blocks
from torchspec.attention.plan import Task


@pytest.fixture
def calls(monkeypatch):
    """Every task goes through blocks of 4 rows and 8 keys; their list."""
    for name, value in {"MIN_KEYS": 1, "MIN_ROWS": 1, "_ROWS": 4, "_KEYS": 8}.items():
        monkeypatch.setattr(cpu_blocks, name, value)
    return spy(monkeypatch)


def spy(monkeypatch):
    tasks, forward = [], cpu_blocks.forward
    monkeypatch.setattr(cpu_blocks, "forward", lambda *args: tasks.append(args[3]) or forward(*args))
    return tasks


def rand(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def check(lengths, heads, kv_heads, dim=8, entries=0, window=None):
    """out, lse and all gradients, at fp32's tolerance."""
    cu = torch.tensor([0, *lengths]).cumsum(0).int()
    shapes = [(sum(lengths), n, dim) for n in [heads, kv_heads, kv_heads] + [kv_heads] * (2 * entries)]
    inputs = [rand(*shape, seed=i).requires_grad_() for i, shape in enumerate(shapes)]
    found = []
    for function, dtype in ((branch_attention, torch.float32), (reference.branch_attention, torch.float64)):
        q, k, v, *branches = [x.to(dtype) for x in inputs]
        out, lse = function(q, k, v, branches[:entries], branches[entries:], cu, window=window)
        grads = torch.autograd.grad(out, inputs, rand(*out.shape, seed=9, dtype=dtype))
        found.append([out, lse, *grads])
    for ours, exact in zip(*found, strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours, exact.float(), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (8, 2), (8, 1), (9, 3)])
@pytest.mark.parametrize("lengths", [[1], [3, 4, 5], [7, 8, 9], [16, 1, 17], [40]], ids=str)
def test_equals_the_dense_oracle(lengths, heads, kv_heads, calls):
    check(lengths, heads, kv_heads, entries=2)
    assert len(calls) == len(lengths)


@pytest.mark.parametrize("window", [1, 2, 4, 5, 9, 13, 300])
@pytest.mark.parametrize("entries", [0, 2])
def test_windows(window, entries, calls):
    check([9, 33, 1], 4, 2, entries=entries, window=window)
    assert calls or window <= entries  # which hides the whole trunk


TASKS = {
    "causal": Task(0, 21, 0, 21, True),
    "causal after a prefix": Task(3, 22, 2, 39, True),
    "full": Task(1, 20, 4, 37, False),
    "full, fewer keys than rows": Task(0, 23, 5, 8, False),
    "one row": Task(7, 8, 0, 40, False),
    "one key": Task(0, 23, 9, 10, False),
    "window": Task(0, 23, 0, 40, True, 10),
    "full with a window": Task(2, 21, 0, 40, False, 30),
    "window that leaves the last rows one key": Task(0, 12, 0, 12, False, 0),
}


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_tasks_of_strided_inputs(task, kv_heads, calls):
    q = rand(4, 23, 8).transpose(0, 1)
    k, v = (rand(8, kv_heads, 40, seed=i).permute(2, 1, 0) for i in (1, 2))
    ((rows, out, lse, opens),) = cpu.part_fwd(q, k, v, [task], 0.4)
    assert calls == [task]
    assert (rows, opens) == (slice(task.q0, task.q1), task.causal)
    ahead = torch.arange(task.k1 - task.k0) - torch.arange(task.q1 - task.q0)[:, None]
    ahead -= (task.k1 - task.k0) - (task.q1 - task.q0)
    seen = torch.ones_like(ahead, dtype=torch.bool)
    if task.causal:
        seen &= ahead <= 0
    if task.left is not None:
        seen &= ahead >= -task.left
    exact_inputs = [q[rows], *(x[task.k0 : task.k1] for x in (k, v))]
    exact = reference.masked_attention(*(x.double() for x in exact_inputs), seen, 0.4)
    for ours, expected in zip((out, lse), exact, strict=True):
        torch.testing.assert_close(ours, expected.float(), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("shift", [-300.0, 300.0])
def test_scores_far_from_zero(shift, calls):
    """Every row's scores fall, or rise, by e^300 from the first to the last key."""
    q, k, v = (rand(40, 1, 8, seed=i) for i in range(3))
    q[..., 0], k[..., 0] = 1.0, torch.linspace(0, shift, 40)[:, None]
    exact = reference.masked_attention(
        q.double(), k.double(), v.double(), torch.ones(40, 40).tril().bool(), 1.0
    )
    ((_, out, lse, _),) = cpu.part_fwd(q, k, v, [Task(0, 40, 0, 40, True)], 1.0)
    # A score of 300 has an ulp of 3e-5.
    torch.testing.assert_close(out, exact[0].float(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(lse, exact[1].float(), rtol=2e-5, atol=2e-5)


def test_a_document_beyond_the_real_crossover(monkeypatch):
    tasks = spy(monkeypatch)
    check([5, cpu_blocks.MIN_KEYS + 77], 4, 2, dim=16, entries=1)
    assert [task.k1 - task.k0 for task in tasks] == [cpu_blocks.MIN_KEYS + 77]


def test_reruns_are_bitwise_equal():
    q, k, v = rand(2500, 4, 16), rand(2500, 2, 16, seed=1), rand(2500, 2, 16, seed=2)
    first, second = (cpu_blocks.forward(q, k, v, Task(0, 2500, 0, 2500, True), 0.25) for _ in range(2))
    assert all(map(torch.equal, first, second))


def test_when_it_is_used(monkeypatch):
    q, k = rand(128, 4, 8), rand(2048, 2, 8)
    task = Task(0, 128, 0, 2048, False)
    assert cpu_blocks.pays(q, k, task)
    assert not cpu_blocks.pays(q, k, task._replace(k1=2047))
    assert not cpu_blocks.pays(q, k, task._replace(q1=127))
    assert not cpu_blocks.pays(q.double(), k.double(), task)
    assert not cpu_blocks.pays(q.bfloat16(), k.bfloat16(), task)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert not cpu_blocks.pays(q, k, task)


def test_the_product_is_a_true_fp32_product():
    """The op is aten's, but hardly documented: look here first when a new torch breaks `_product`."""
    assert str(torch.ops.aten.mkldnn_convolution.default._schema) == (
        "aten::mkldnn_convolution(Tensor self, Tensor weight, Tensor? bias, SymInt[] padding, "
        "SymInt[] stride, SymInt[] dilation, SymInt groups) -> Tensor"
    )
    for m, n, length in [(1024, 64, 1024), (1024, 1024, 64), (300, 7, 1), (1, 5, 3), (1, 1, 1)]:
        a, b = rand(m, n), rand(length, n, seed=1)
        ours, exact = cpu_blocks._product(a, b), a.double() @ b.double().T
        for other in (exact, torch.mm(a, b.T)):
            assert (ours - other).norm() <= 1e-6 * exact.norm()  # bf16 or tf32 would give 1e-3
