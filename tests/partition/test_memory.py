"""Bytes of P, G, masters and moments that each rank really holds, for every triple."""

from __future__ import annotations

import pytest

from deepspeed_amsp.plan.factors import ShardFactor, Sharding, enumerate_shardings
from tests.parity.cases import case_for
from tests.support.jobs import Report, train
from tests.support.models import Even, make_model
from tests.support.pool import pool

PHI = Even.LAYERS * Even.WIDTH**2
SHARDINGS = [s for r, n in [(2, 2), (2, 4)] for s in enumerate_shardings(ShardFactor(r, n))]


def _run(sharding: Sharding, model: str, micro_batches: int, bf16: bool) -> list[Report]:
    choices = {"reduce": "two_level", "publish": "broadcast", "micro_batches": micro_batches}
    return pool(sharding.s_dp).run(train, case_for(sharding, choices, model=model, steps=1, bf16=bf16))


@pytest.mark.parametrize("sharding", SHARDINGS, ids=str)
def test_an_even_model_is_cut_as_the_paper_says(sharding: Sharding) -> None:
    """2 PHI / s_p + 2 PHI / s_g + 12 PHI / s_os bytes a rank, over all ranks of a replica (Section 3.4)."""
    reports = _run(sharding, "even", micro_batches=2, bf16=True)
    for report in reports:
        assert report.memory["P"]["held"] == 2 * PHI // sharding.s_p
    replicas = sharding.replicate
    # With small buckets single ranks may own more than an even share; a whole replica owns exactly PHI.
    assert sum(r.memory["master"]["held"] for r in reports) == 4 * PHI * replicas
    assert sum(r.memory["moments"]["held"] for r in reports) == 8 * PHI * replicas
    copies_of_g = sharding.s_dp // sharding.s_g
    held = sum(r.memory["G"]["held"] for r in reports)
    assert 2 * PHI * copies_of_g <= held <= 2 * PHI * copies_of_g * 1.25  # sections may be padded that far


ON_FOUR = [s for r, n in [(2, 2), (4, 1)] for s in enumerate_shardings(ShardFactor(r, n))]
CASES = [(s, 1 + number % 2) for number, s in enumerate(ON_FOUR)] + [(s, 2) for s in ON_FOUR[:10]]


@pytest.mark.parametrize(("sharding", "micro_batches"), CASES, ids=str)
def test_held_bytes_equal_the_formula_with_true_owner_loads(sharding: Sharding, micro_batches: int) -> None:
    """Without accumulation G is what the owner has before the step, else what rests between micro-batches."""
    reports = _run(sharding, "mlp", micro_batches, bf16=False)
    for report in reports:
        for kind in ("P", "G", "master", "moments"):
            assert report.memory[kind]["held"] == report.memory[kind]["formula"], kind
    numel = sum(p.numel() for p in make_model("mlp").parameters())
    assert sum(r.memory["master"]["held"] for r in reports) == 4 * numel * sharding.replicate
