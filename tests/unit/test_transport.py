"""Which transport: the byte formulas of the three, and the decision."""

import logging

import pytest

from torchspec.attention import Traffic, choose_transport, get_transport

# 256K tokens of an 8B-like draft layer in bf16: S = 1 GiB of K and V.
TTT = Traffic(1 << 18, 1 << 18, size=8, heads=32, kv_heads=8, head_dim=128, itemsize=2, passes=7)
S = 1 << 30


def test_closed_forms():
    share = 7 / 8
    assert get_transport("ring").sent(TTT) == 7 * share * (2 * S + 2 * S)
    assert get_transport("gather").sent(TTT) == share * 3 * S
    assert get_transport("gather").gathered(TTT) == 3 * S
    blocks = Traffic(1 << 18, 8192, size=8, heads=32, kv_heads=8, head_dim=128, itemsize=2)
    assert get_transport("query_ring").sent(blocks) == share * 8192 * 57600  # bytes a query row costs


@pytest.mark.parametrize(
    ("traffic", "budget", "expected"),
    [
        (TTT, 4 << 30, "gather"),
        (TTT, 2 << 30, "ring"),
        (Traffic(1 << 18, 8192, 8, 32, 8, 128, 2), 4 << 30, "query_ring"),
        (Traffic(1 << 18, 1 << 17, 8, 32, 8, 128, 2), 4 << 30, "gather"),
        (Traffic(1 << 18, 70000, 8, 32, 8, 128, 2), 1, "query_ring"),  # 0.28 L is where the ring is worse
        (Traffic(1 << 18, 77000, 8, 32, 8, 128, 2), 1, "ring"),
        (Traffic(64, 64, 1, 4, 2, 8, 4), 4 << 30, "gather"),  # one rank sends nothing
    ],
)
def test_auto(traffic, budget, expected):
    assert choose_transport(traffic, "auto", budget) == expected


def test_the_decision_is_logged_once(caplog):
    traffic = Traffic(1000, 1000, 2, 4, 2, 8, 4)
    with caplog.at_level(logging.INFO):
        assert {choose_transport(traffic) for _ in range(3)} == {"gather"}
    assert len(caplog.records) == 1
    assert caplog.records[0].message.startswith(
        "attention transport gather: MB sent per rank (MB gathered, of a budget of 4295.0): gather 0.1 (0.3), ring 0.2"
    )


def test_explicit_and_wrong():
    assert choose_transport(TTT, "ring") == "ring"
    with pytest.raises(
        ValueError, match="transport is 'rings'; it must be one of auto, gather, ring, query_ring"
    ):
        choose_transport(TTT, "rings")
    with pytest.raises(ValueError, match="passes is 0; it must be at least 1"):
        choose_transport(Traffic(1, 1, 1, 1, 1, 1, 1, passes=0))
