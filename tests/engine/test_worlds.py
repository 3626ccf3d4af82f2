"""Clusters that are no power of two, and a single rank (case H3)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from deepspeed_amsp.plan.factors import ShardFactor, Sharding
from tests.engine.test_training import make_case, reference
from tests.parity.merge import assert_replicas_equal, whole_masters, working_copies
from tests.support import models
from tests.support.jobs import train
from tests.support.pool import WorkerPool

ONE = ShardFactor(1, 1)
NODE, PAIR_OF_NODES = ShardFactor(3, 1), ShardFactor(3, 2)


@pytest.mark.parametrize(
    "sharding",
    [
        Sharding(ONE, ONE, ONE, ONE),
        Sharding(NODE, NODE, NODE, NODE),
        Sharding(NODE, NODE, PAIR_OF_NODES, PAIR_OF_NODES),
    ],
    ids=["1 rank", "3 ranks", "6 ranks"],
)
def test_parity(sharding: Sharding, fresh_pool: Callable[[int], WorkerPool]) -> None:
    world = sharding.s_dp
    case = make_case(sharding, steps=3)
    reports = fresh_pool(world).run(train, case)
    want, model = reference(case, world), models.make_model(case.model)
    assert_replicas_equal(reports)
    for copies in (whole_masters(reports, model), working_copies(reports, model)):
        for name, value in want.parameters.items():
            torch.testing.assert_close(copies[name].float(), value, rtol=1e-5, atol=1e-6)
