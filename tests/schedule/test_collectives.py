"""The collectives of a step, one by one, against closed formulas. This is what keeps later work honest."""

from __future__ import annotations

from collections import Counter

import pytest

from deepspeed_amsp.plan.factors import ShardFactor, Sharding, enumerate_shardings
from tests.parity.cases import case_for
from tests.support.jobs import train
from tests.support.models import Even
from tests.support.pool import pool

FP32 = 4
PHI = Even.LAYERS * Even.WIDTH**2
"""Parameters of the model; every unit, bucket and section of it is even."""

CLUSTERS = [(2, 2), (2, 4)]
SHARDINGS = [s for r, n in CLUSTERS for s in enumerate_shardings(ShardFactor(r, n))]
Log = Counter[tuple[str, str, str, int, int]]


def gathers(sharding: Sharding, micro_batches: int) -> Log:
    """Over ``param``: every unit is gathered for forward and backward, and its gradient reduced."""
    log: Log = Counter()
    if sharding.s_p > 1:
        unit = Even.WIDTH**2 * FP32
        log["all_gather", "gather", "param", sharding.s_p, unit] = 2 * micro_batches * Even.LAYERS
        log["reduce_scatter", "param_reduce", "param", sharding.s_p, unit] = micro_batches * Even.LAYERS
    return log


def scalars(sharding: Sharding) -> Log:
    """The squared norm, one fp64 value; which parameters were used, and by param group the order of gathers as
    (hash, -hash), int64 each."""
    s_p, s_os, s_dp = sharding.s_p, sharding.s_os, sharding.s_dp
    orders = 2 * s_dp // s_p if s_p > 1 else 0
    log: Log = Counter({("all_reduce", "scalars", "world", s_dp, 8 * (Even.LAYERS + orders)): 1})
    if s_os > 1:
        log["all_reduce", "scalars", "shards", s_os, 8] = 1
    return log


def formula(sharding: Sharding, reduce: str, publish: str, micro_batches: int) -> Log:
    """(op, purpose, axis, group size, bytes) -> how often in one step, by one rank.

    Everything is one bucket of PHI / s_p elements (T_p, T_g, T_os^0 and T_os^1 of the paper as bytes).
    """
    log = gathers(sharding, micro_batches) + scalars(sharding)

    def issue(op: str, purpose: str, axis: str, size: int, elements: int, count: int) -> None:
        if size > 1 and count:
            log[op, purpose, axis, size, elements * FP32] += count

    s_p, s_g, s_os, s_dp = sharding.s_p, sharding.s_g, sharding.s_os, sharding.s_dp
    bucket = PHI // s_p
    if reduce == "all_reduce":
        issue("all_reduce", "grad_reduce", "inner", s_g // s_p, bucket, micro_batches - 1)
        issue("all_reduce", "grad_reduce", "data", s_dp // s_p, bucket, 1)
    else:
        issue("reduce_scatter", "grad_reduce", "inner", s_g // s_p, bucket, micro_batches)
        issue("reduce_scatter", "grad_reduce", "outer", s_os // s_g, PHI // s_g, 1)
        issue("all_reduce", "grad_reduce", "replicate", s_dp // s_os, PHI // s_os, 1)
    if publish == "broadcast":
        issue("broadcast", "publish", "optim", s_os // s_p, PHI // s_os, s_os // s_p)
    else:
        issue("all_gather", "publish", "optim", s_os // s_p, bucket, 1)
    return log


MODES = [("two_level", "broadcast", 3), ("all_reduce", "all_gather", 2)]
# Both on four ranks; on eight, where only the sizes of the axes differ, by turns.
CASES = [(s, *mode) for number, s in enumerate(SHARDINGS) for mode in (MODES if s.s_dp == 4 else [MODES[number % 2]])]


@pytest.mark.parametrize(("sharding", "reduce", "publish", "micro_batches"), CASES, ids=str)
def test_a_step_issues_exactly_these(sharding: Sharding, reduce: str, publish: str, micro_batches: int) -> None:
    choices = {"reduce": reduce, "publish": publish, "micro_batches": micro_batches}
    case = case_for(sharding, choices, model="even", steps=2)
    case.amsp["bucket_bytes"] = 10**12  # type: ignore[index]
    for report in pool(sharding.s_dp).run(train, case):
        assert Counter(report.log) == formula(sharding, reduce, publish, micro_batches)


@pytest.mark.parametrize(("micro_batches", "factors"), [(2, ([1, 1], [2, 1], [2, 1])), (1, ([2, 1], [2, 1], [2, 2]))])
def test_small_buckets_move_the_same_bytes(micro_batches: int, factors: tuple[list[int], ...]) -> None:
    """Cutting buckets smaller changes how many collectives there are, not what they carry."""
    sharding = Sharding(*(ShardFactor(*factor) for factor in factors), ShardFactor(2, 2))
    totals = []
    for bucket_bytes in (1, 10**12):
        choices = {"reduce": "two_level", "publish": "broadcast", "micro_batches": micro_batches}
        case = case_for(sharding, choices, model="even", steps=2)
        case.amsp["bucket_bytes"] = bucket_bytes  # type: ignore[index]
        report = pool(4).run(train, case)[0]
        by_purpose: Counter[str] = Counter()
        for _, purpose, _, _, size in report.log:
            by_purpose[purpose] += size
        totals.append(by_purpose)
    assert totals[0] == totals[1]
