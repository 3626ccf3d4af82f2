"""Clusters that are no power of two, uneven or scattered hosts, and a single rank (cases H1, H3)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from deepspeed_amsp.plan.factors import ShardFactor, Sharding
from tests.engine.test_bad_input import _initialize
from tests.engine.test_placement import on_hosts
from tests.engine.test_seam import config
from tests.engine.test_training import make_case, reference
from tests.parity.merge import assert_replicas_equal, whole_masters, working_copies
from tests.support import models
from tests.support.jobs import Case, make_engine, train
from tests.support.pool import WorkerPool

ONE = ShardFactor(1, 1)
NODE, PAIR_OF_NODES = ShardFactor(3, 1), ShardFactor(3, 2)


PAIR, PAIRS = ShardFactor(2, 1), ShardFactor(2, 3)


@pytest.mark.parametrize(
    ("sharding", "hosts"),
    [
        (Sharding(ONE, ONE, ONE, ONE), "a"),
        (Sharding(NODE, NODE, NODE, NODE), "aaa"),
        (Sharding(NODE, NODE, PAIR_OF_NODES, PAIR_OF_NODES), "aaabbb"),
        (Sharding(PAIR, PAIR, PAIRS, PAIRS), "aabbaa"),
    ],
    ids=["1 rank", "3 ranks", "6 ranks", "4 and 2 ranks, scattered by twos"],
)
def test_parity(sharding: Sharding, hosts: str, fresh_pool: Callable[[int], WorkerPool]) -> None:
    world = sharding.s_dp
    case = make_case(sharding, steps=3)  # it says gpus_per_node, which is what uneven hosts need
    reports = fresh_pool(world).run(on_hosts, train, case, hosts=hosts)
    want, model = reference(case, world), models.make_model(case.model)
    assert_replicas_equal(reports)
    for copies in (whole_masters(reports, model), working_copies(reports, model)):
        for name, value in want.parameters.items():
            torch.testing.assert_close(copies[name].float(), value, rtol=1e-5, atol=1e-6)


def _counting_groups(ds_config: dict[str, Any], hosts: str) -> str:
    """The error, and that no group had been made by then."""
    with mock.patch.object(dist, "new_group", side_effect=AssertionError("a group was made")):
        return on_hosts(_initialize, ds_config, hosts=hosts)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("hosts", "words"),
    [
        ("aab", ["a: 2, b: 1", "start the same number of ranks on every host", '{"gpus_per_node": 1}']),
        ("aba", ["a has ranks [0, 2]", "host by host", '{"gpus_per_node": 1}']),
        ("aaaabb", ["a: 4, b: 2", '{"gpus_per_node": 2}', "s0 may then be 1, 2"]),
        ("aabbaa", ["a has ranks [0, 1, 4, 5]", "host by host", '{"gpus_per_node": 2}']),
    ],
)
def test_hosts_that_form_no_even_nodes(hosts: str, words: list[str], fresh_pool: Callable[[int], WorkerPool]) -> None:
    """One error, the same on every rank: the hosts, their ranks, and what to write."""
    ds_config = config(amsp={"sharding": "zero1"})
    errors = fresh_pool(len(hosts)).run(_counting_groups, ds_config, hosts, return_exceptions=True)
    (text,) = {f"{type(error).__name__}: {error}" for error in errors}
    assert text.startswith("TopologyError") and all(word in text for word in words), text


def _groups_made(case: Case) -> list[tuple[int, ...]]:
    """The ranks of every group that an engine makes, in order."""
    make, made = dist.new_group, []

    def recorded(ranks: Sequence[int], *args: Any, **kwargs: Any) -> Any:
        made.append(tuple(ranks))
        return make(ranks, *args, **kwargs)

    with mock.patch.object(dist, "new_group", recorded):
        make_engine(case).destroy()
    return made


def test_all_ranks_make_the_same_groups_in_the_same_order(fresh_pool: Callable[[int], WorkerPool]) -> None:
    """Of 3 nodes of 2: pairs of a node, ranks of one shard, everybody; those of a kind of traffic once (case H8)."""
    case = make_case(Sharding(PAIR, PAIR, PAIRS, PAIRS))
    made, *others = fresh_pool(6).run(_groups_made, case)
    assert others == [made] * 5
    nodes, shards, everybody = {(0, 1), (2, 3), (4, 5)}, {(0, 2, 4), (1, 3, 5)}, {tuple(range(6))}
    assert set(made) == nodes | shards | everybody
    times = Counter(made)
    for kind, traffic in ((nodes, 2), (shards, 2), (everybody, 3)):
        assert all(times[ranks] <= traffic for ranks in kind), times
