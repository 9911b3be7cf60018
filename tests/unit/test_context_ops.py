"""The context-parallel ops on one rank, without a process group: their contracts with torch.library."""

import pytest
import torch

from torchspec.attention import AttentionCall, Trunk, trunk_attention, trunk_gather
from torchspec.attention.transports.query_ring import branch_attention_query_ring
from torchspec.attention.transports.ring import branch_ring_attention

CU = torch.tensor([0, 3, 4, 9], dtype=torch.int32)
ANCHORS = torch.tensor([1, 5, 8], dtype=torch.int32)


def make(entries=2, slots=0):
    generator = torch.Generator().manual_seed(0)
    queries = len(ANCHORS) * slots if slots else 9

    def rand(rows, heads):
        return torch.randn(rows, heads, 4, generator=generator, dtype=torch.float64, requires_grad=True)

    branches = [[rand(queries, 1) for _ in range(entries)] for _ in range(2)]
    return rand(queries, 2), rand(9, 1), rand(9, 1), *branches


@pytest.mark.parametrize("slots", [0, 2])
@pytest.mark.parametrize(
    "name", ["branch_ring_attention", "branch_attention_query_ring", "trunk_attention", "trunk_gather"]
)
def test_opcheck(name, slots):
    q, k, v, branch_k, branch_v = make(1 if slots else 2, slots)
    anchors = ANCHORS if slots else None
    rest = (CU, anchors, AttentionCall(slots=slots, scale=0.5).key())
    if name == "trunk_gather":
        args = (k, v, CU, 9, "")
    elif name == "trunk_attention":
        trunk = trunk_gather(k.detach(), v.detach(), CU, group="")
        args = (q, trunk.kv, trunk.grad_accumulator.clone().requires_grad_(), branch_k, branch_v, *rest)
    else:
        args = (q, k, v, branch_k, branch_v, *rest)
    torch.library.opcheck(getattr(torch.ops.torchspec, name).default, args)


@pytest.mark.parametrize("slots", [0, 2])
@pytest.mark.parametrize("transport", ["ring", "gather", "query_ring"])
def test_gradcheck(transport, slots):
    q, k, v, branch_k, branch_v = make(1 if slots else 2, slots)
    options = (AttentionCall(slots=slots), ANCHORS) if slots else (AttentionCall(window=4),)

    def flat(q, k, v, *branches):
        half = len(branches) // 2
        lists = list(branches[:half]), list(branches[half:])
        if transport == "gather":
            return trunk_attention(q, trunk_gather(k, v, CU, group=""), *lists, CU, *options)[0]
        op = branch_ring_attention if transport == "ring" else branch_attention_query_ring
        return op(q, k, v, *lists, CU, *options)[0]

    assert torch.autograd.gradcheck(flat, (q, k, v, *branch_k, *branch_v))


def test_the_grad_accumulator_takes_no_memory_and_sums_in_fp32():
    k = torch.randn(9, 1, 4, dtype=torch.bfloat16, requires_grad=True)
    trunk = trunk_gather(k, k.detach(), CU, group="")
    assert trunk.grad_accumulator.dtype == torch.float32
    assert trunk.grad_accumulator.untyped_storage().nbytes() == 4
    assert not trunk.kv.requires_grad
    leaf = Trunk(trunk.kv, trunk.grad_accumulator.detach().requires_grad_())
    q = torch.randn(9, 2, 4, dtype=torch.bfloat16)
    for _ in range(2):
        trunk_attention(q, leaf, [], [], CU, AttentionCall())[0].sum().backward()
    assert leaf.grad_accumulator.grad.dtype == torch.float32
    trunk.grad_accumulator.backward(leaf.grad_accumulator.grad)
    torch.testing.assert_close(k.grad, leaf.grad_accumulator.grad[0].bfloat16())


def test_rows_are_checked():
    q, k, v, branch_k, branch_v = make()
    trunk = trunk_gather(k, v, CU, group="")
    rows = torch.tensor([[0, 3], [5, 7]], dtype=torch.int32)
    with pytest.raises(ValueError, match="q has 9 rows; rank 0 of 1 must have 5"):
        trunk_attention(q, trunk, branch_k, branch_v, CU, AttentionCall(), rows)
    with pytest.raises(
        ValueError, match=r"rows is torch\.int64 \[2, 2\] on cpu; it must be int32 \[ranges, 2\]"
    ):
        trunk_attention(q, trunk, branch_k, branch_v, CU, AttentionCall(), rows.long())
    with pytest.raises(ValueError, match="ascending ranges of the 9 local rows"):
        trunk_attention(q[:5], trunk, [], [], CU, AttentionCall(), rows.flip(0))


@pytest.mark.parametrize("call", [AttentionCall(), AttentionCall("cp 'x'", 3, 4, 64**-0.5)])
def test_the_key_spells_the_call_out(call):
    assert AttentionCall.of_key(call.key()) == call
