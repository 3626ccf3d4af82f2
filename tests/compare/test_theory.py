"""Bytes out of a node against the closed formulas of ring collectives."""

from __future__ import annotations

from typing import Any

import pytest

from deepspeed_amsp.compare.catalog import Strategy, built_in, from_block
from deepspeed_amsp.compare.theory import Case, crossing, sent_per_node
from deepspeed_amsp.plan.curves import Op
from deepspeed_amsp.plan.factors import ShardFactor
from deepspeed_amsp.plan.routes import Message
from tests.plan.worlds import matrices

MODEL = matrices(*[64] * 8, columns=64, layers=(0, 0, 1, 1, 2, 2, 3, 3))
PHI = 2.0 * 8 * 64 * 64


def bytes_of(name: str | dict[str, Any], nodes: int = 2, ranks: int = 2, count: int = 1, fair: bool = True) -> float:
    shape = (ranks, nodes)
    strategy: Strategy = built_in(name, shape) if isinstance(name, str) else from_block("amsp", None, name, shape)
    return sent_per_node(strategy, Case(MODEL, ShardFactor(ranks, nodes), count, 1 << 20, fair))


@pytest.mark.parametrize(("nodes", "ranks"), [(2, 2), (4, 2), (2, 4)])
def test_baselines(nodes: int, ranks: int) -> None:
    world = nodes * ranks
    ring = (world - 1) / world
    exchange = ranks * (nodes - 1) / nodes  # every rank's share for the other nodes
    across = 2 * (nodes - 1) / nodes
    expected = {
        "limit": 0.0,
        "ddp": 2 * ring,
        "zero1": 3 * ring,
        "zero2": 3 * ring,
        "zero3": 2 * ring + exchange,
        "fsdp2": 2 * ring + exchange,
        "hpz": ring + exchange,
        "hsdp": across,
        "mics": across,
    }
    for name, times in expected.items():
        assert bytes_of(name, nodes, ranks) == pytest.approx(times * PHI), name


def test_the_table_that_was_measured() -> None:
    """2 nodes of 2: 2.25, 1.5 and 1.0 Phi; gloo's own reduce-scatter sends twice a ring's."""
    assert bytes_of("zero1") == 2.25 * PHI and bytes_of("ddp") == 1.5 * PHI and bytes_of("mics") == PHI
    assert bytes_of("zero3", fair=False) == 3 * PHI


def test_our_engine_never_uses_gloos_own_reduce_scatter() -> None:
    block = {"sharding": "zero3"}
    assert bytes_of(block, fair=False) == bytes_of(block, fair=True)


def test_micro_batches() -> None:
    assert bytes_of("ddp", count=4) == bytes_of("ddp")
    assert bytes_of("zero1", count=4) == bytes_of("zero1")
    assert bytes_of("hpz", count=4) == pytest.approx((0.75 + 4 * 1.0) * PHI)  # gathered across nodes once
    assert bytes_of("zero2", count=4) == (4 * 1.5 + 0.75) * PHI
    assert bytes_of("zero3", count=4) == 4 * bytes_of("zero3")
    assert bytes_of("mics", count=4) == PHI


@pytest.mark.parametrize(
    ("block", "times"),
    [
        ({"sharding": {"optimizer_states": [2, 1]}}, 1.0),  # only what an owner has crosses, once each way
        ({"sharding": {"optimizer_states": [2, 2]}, "hierarchical": True}, 1.0),  # half there, half back
        ({"sharding": {"optimizer_states": [2, 2]}}, 1.0 + 1.25),  # flat: gloo's trees cross five times for four owners
        ({"sharding": "ddp"}, 1.5),
        ({"sharding": "mics"}, 1.0),
        ({"sharding": "zero3"}, 0.75 * 2 + 1.0),
    ],
)
def test_our_plans(block: dict[str, Any], times: float) -> None:
    assert bytes_of(block) == pytest.approx(times * PHI, rel=0.01)


def test_broadcast_trees() -> None:
    """gloo's tree from root r over 2 nodes of 2, by hand: node 0 sends to the other node 2, 2, 0 and 1 times."""
    assert crossing(Message(Op.BROADCAST, 8.0, ShardFactor(2, 2), 4)) == [40.0, 40.0]
    assert crossing(Message(Op.BROADCAST, 8.0, ShardFactor(1, 2), 2)) == [8.0, 8.0]
    assert crossing(Message(Op.BROADCAST, 8.0, ShardFactor(2, 1), 2)) == [0.0]
