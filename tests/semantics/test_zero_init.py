"""Models built under deepspeed.zero.Init: each replica starts from rank 0's values, and trains as one process does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from deepspeed_amsp.plan.factors import Sharding
from tests.engine.test_training import assert_parity
from tests.parity.cases import case_for
from tests.semantics.harness import CLUSTER, MIXED, NIGHTLY, ONE, UNEQUAL, ZERO3, label
from tests.support import models
from tests.support.jobs import Case, Report, trained
from tests.support.pool import pool

PLAIN = Sharding(ONE, ONE, ONE, CLUSTER)
VARIANTS = [(ZERO3, "world"), (MIXED, "halves"), (UNEQUAL, "world")]
if NIGHTLY:
    VARIANTS += [(MIXED, "world"), (ZERO3, "halves"), (UNEQUAL, "halves"), (PLAIN, "halves")]


def _train(case: Case, groups: str) -> tuple[Report, list[str]]:
    """Every rank has a seed of its own; zero.Init takes the values of the first rank of each group."""
    import deepspeed

    import deepspeed_amsp  # noqa: F401

    group = None
    if groups == "halves":
        members = [dist.new_group([first, first + 1]) for first in (0, 2)]
        group = members[dist.get_rank() // 2]
    torch.manual_seed(7 + dist.get_rank())
    with deepspeed.zero.Init(config_dict_or_path=case.ds_config(), data_parallel_group=group):
        model = models.MODELS[case.model]()
    assert all(param.numel() == 0 for param in model.parameters())
    # As in models.make_optimizer, where matrices decay; a cut parameter is flat, whatever its shape was.
    groups_of = {True: [p for p in model.parameters() if len(p.ds_shape) >= 2],
                 False: [p for p in model.parameters() if len(p.ds_shape) < 2]}  # fmt: skip
    optimizer = torch.optim.SGD(
        [{"params": groups_of[matrix], "weight_decay": 0.1 * matrix} for matrix in (True, False)], lr=0.1, momentum=0.9
    )
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=case.ds_config())
    report = trained(engine, case)
    left = sorted(
        {name for param in model.parameters() for name in vars(param) if "ds_" in name or "partition" in name}
    )
    return report, left


@pytest.mark.parametrize(("sharding", "groups"), VARIANTS, ids=lambda v: v if isinstance(v, str) else label(v))
def test_parity(sharding: Sharding, groups: str) -> None:
    case = case_for(sharding, {"reduce": "two_level", "publish": "broadcast", "micro_batches": 2, "clip": 0.4},
                    optimizer="sgd")  # fmt: skip
    results: list[Any] = pool(4).run(_train, case, groups)
    assert_parity([report for report, _ in results], case)
    assert [left for _, left in results] == [[]] * 4, "DeepSpeed's marks are gone"


def _second_engine(case: Case) -> str:
    """An engine of DeepSpeed's own, without an optimizer, and then one that trains, over one model."""
    import deepspeed

    import deepspeed_amsp  # noqa: F401

    model = models.make_model(case.model)
    reference, *_ = deepspeed.initialize(model=model, config=case.ds_config())
    kind = type(reference).__name__
    tokens = models.batch(0, 0, 1)[:, :-1]
    whole = models.make_model(case.model)
    torch.testing.assert_close(reference(tokens), whole(tokens))
    try:
        deepspeed.initialize(model=model, optimizer=models.make_optimizer("sgd", model), config=case.ds_config())
    except ValueError as error:
        return f"{kind}: {error}"
    return kind


def _evaluated_by_another(case: Case) -> str:
    import deepspeed

    from tests.support.jobs import make_engine

    engine = make_engine(case)
    without_block = {key: value for key, value in case.ds_config().items() if key != "amsp"}
    try:
        deepspeed.initialize(model=engine.module, config=without_block)
    except ValueError as error:
        return str(error)
    finally:
        engine.destroy()
    return "accepted"


def test_deepspeeds_engine_is_refused_a_model_that_is_ours() -> None:
    """What Lightning's validate() does after fit() at stage 3."""
    case = case_for(ZERO3, {"reduce": "two_level", "publish": "broadcast", "micro_batches": 1, "clip": 0.0})
    for said in pool(4).run(_evaluated_by_another, case):
        assert "evaluate with that engine" in said


def test_an_engine_without_an_optimizer_is_deepspeeds_own() -> None:
    """A frozen reference beside the model that is trained, or the Trainer's evaluation."""
    case = case_for(ZERO3, {"reduce": "two_level", "publish": "broadcast", "micro_batches": 1, "clip": 0.0})
    for said in pool(4).run(_second_engine, case):
        assert said.startswith("DeepSpeedEngine: ") and "stage 3 was made over this model" in said
