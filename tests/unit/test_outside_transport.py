"""A transport that is not of this package, through the registry alone; and what the registry promises."""

from typing import get_args, get_type_hints

import pytest
import torch

from torchspec.attention import (
    AttentionCall,
    Context,
    Traffic,
    Transport,
    choose_transport,
    context_attention,
    layer_attention,
    packed_attention,
    reference,
    register_transport,
    save_ops,
)
from torchspec.attention.transports.registry import TRANSPORTS
from torchspec.config.schema import Parallel

CU = torch.tensor([0, 3, 4, 9], dtype=torch.int32)


class Alone(Transport):
    """For tests: a group of one rank, which sends one byte."""

    name = "alone"

    def attend(self, q, k, v, cu_seqlens, call):
        return packed_attention(q, k, v, cu_seqlens, call.scale, call.window)

    def sent(self, traffic):
        return 1.0

    def running(self, traffic):
        return {}


@pytest.fixture(autouse=True)
def alone():
    register_transport(Alone())
    yield
    del TRANSPORTS["alone"]
    choose_transport.cache_clear()


def make():
    generator = torch.Generator().manual_seed(0)
    return (
        torch.randn(9, heads, 4, generator=generator, dtype=torch.float64, requires_grad=True)
        for heads in (4, 2, 2)
    )


@pytest.mark.parametrize("call", [AttentionCall(), AttentionCall(window=2, scale=0.3)])
def test_a_layer_attends_through_it(call):
    q, k, v = make()
    out = context_attention(q, k, v, CU, call, "alone")
    expected, _ = reference.branch_attention(q, k, v, [], [], CU, call.scale, call.window)
    torch.testing.assert_close(out, expected)
    for ours, exact in zip(*(torch.autograd.grad(x.sum(), (q, k, v)) for x in (out, expected)), strict=True):
        torch.testing.assert_close(ours, exact)


def test_a_policy_layer_reaches_it_by_its_name():
    q, k, v = make()
    out = layer_attention(q, k, v, Context(CU, "some group", "alone"))
    assert torch.equal(out, packed_attention(q, k, v, CU))


def test_it_is_chosen_where_it_sends_least():
    traffic = Traffic(1 << 18, 1 << 18, size=8, heads=32, kv_heads=8, head_dim=128, itemsize=2)
    assert choose_transport(traffic) == "alone"
    assert choose_transport(traffic, "alone") == "alone"


def test_a_name_is_taken_once():
    for name in ("alone", "ring", "auto"):
        other = Alone()
        other.name = name
        with pytest.raises(ValueError, match=f"transport '{name}' is already registered"):
            register_transport(other)


def test_the_setting_lists_the_transports_of_this_package():
    names = get_args(get_type_hints(Parallel)["attention"])
    assert set(names) == {"auto", *TRANSPORTS} - {"alone"}


def test_checkpointing_saves_the_ops_of_every_transport():
    names = {op.name() for op in save_ops()}
    assert names == {
        "torchspec::branch_attention",
        "torchspec::branch_ring_attention",
        "torchspec::branch_attention_query_ring",
        "torchspec::trunk_gather",
        "torchspec::trunk_attention",
    }
