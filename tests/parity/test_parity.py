"""Every legal sharding triple trains like one process with plain torch on the concatenated batch."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from deepspeed_amsp.plan.factors import Sharding
from tests.parity.cases import CHOICES, NIGHTLY, matrix
from tests.parity.merge import assert_replicas_equal, whole_masters, working_copies
from tests.support import models
from tests.support.jobs import Case, train
from tests.support.models import Outcome
from tests.support.pool import pool

ALL = {world: list(matrix(world)) for world in (4, 8)}


@cache
def _reference(model: str, optimizer: str, ranks: int, micro_batches: int, steps: int, clip: float) -> Outcome:
    return models.reference(model, optimizer, ranks, micro_batches, steps, clip)


def expected(case: Case, world: int) -> Outcome:
    return _reference(case.model, case.optimizer, world, case.micro_batches, case.steps, case.clip)


def check(case: Case, world: int) -> None:
    """Train ``case`` on ``world`` ranks and compare everything with one process."""
    reports = pool(world).run(train, case)
    want = expected(case, world)
    assert_replicas_equal(reports)
    for report in reports:
        torch.testing.assert_close(report.norms, want.norms, rtol=1e-6, atol=0.0)
        torch.testing.assert_close(report.losses, want.losses, rtol=1e-5, atol=0.0)
    model = models.make_model(case.model)
    for copies in (whole_masters(reports, model), working_copies(reports, model)):
        assert copies.keys() == want.parameters.keys()
        for name, value in want.parameters.items():
            torch.testing.assert_close(copies[name], value, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize(("sharding", "case"), [row[1:] for row in ALL[4]], ids=[row[0] for row in ALL[4]])
def test_four_ranks(sharding: Sharding, case: Case) -> None:
    check(case, 4)


@pytest.mark.parametrize(("sharding", "case"), [row[1:] for row in ALL[8]], ids=[row[0] for row in ALL[8]])
def test_eight_ranks(sharding: Sharding, case: Case) -> None:
    check(case, 8)


@pytest.mark.parametrize("world", [4, 8])
def test_the_matrix_covers_every_pair(world: int) -> None:
    """The matrix is only worth its name if any two choices, and any choice with any triple, meet."""
    values = [
        {"triple": str(sharding), "reduce": case.amsp["reduce"], "publish": case.amsp["publish"]}
        | {key: getattr(case, key) for key in CHOICES if key not in ("reduce", "publish")}
        for _, sharding, case in ALL[world]
    ]
    binary = list(CHOICES)
    for position, first in enumerate(binary):
        for second in binary[position + 1 :]:
            pairs = {(row[first], row[second]) for row in values}
            assert len(pairs) == 4, (first, second, pairs)
    triples = {row["triple"] for row in values}
    assert len(triples) == {4: 20, 8: 40}[world]
    for choice in CHOICES if world == 4 or NIGHTLY else ():
        assert len({(row["triple"], row[choice]) for row in values}) == 2 * len(triples), choice
