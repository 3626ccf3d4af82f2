"""The planner's messages are the engine's: against the schedules that the scale tests hold the real engine to."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from deepspeed_amsp.plan.cost import executor_cost
from deepspeed_amsp.plan.layout import ParamSpec
from deepspeed_amsp.plan.profile import Op
from deepspeed_amsp.plan.resolve import Plan, PublishMode, ReduceMode
from deepspeed_amsp.plan.specs import ModelSpec, TrainSpec, UnitSpec
from tests.plan.worlds import priced
from tests.scale.formulas import Expected, llama
from tests.scale.support.cases import CASES, Case


def spec(case: Case) -> ModelSpec:
    units = [UnitSpec(f"u{n}", (ParamSpec(f"u{n}.w", tuple(m)),)) for n, m in enumerate(llama(case.model))]
    return ModelSpec(case.model.name, tuple(units), case.model.dim, case.model.vocab)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_bytes_of_every_term_are_those_of_the_engine(case: Case, micro_batches: int) -> None:
    """By term and op, the mean over all owners: within 1 %, since shards end in some padding."""
    asked = replace(case.plan, micro_batches=micro_batches)
    s = asked.sharding
    plan = Plan(
        s,
        ReduceMode(asked.reduce),
        PublishMode(asked.publish),
        hierarchical=asked.hierarchical,
        bucket_bytes=asked.bucket_bytes,
    )
    ours: Counter[tuple[str, Op]] = Counter()
    for line in executor_cost(spec(case), plan, TrainSpec(micro_batches=micro_batches), priced()).lines:
        ours[line.term, line.message.op] += line.calls * line.message.size  # type: ignore[assignment]
    # Owners differ in what they send to replicas, so it takes all of one shard's owners to compare.
    engine: Counter[tuple[str, Op]] = Counter()
    for owner in range(s.optim):
        for (op, purpose, axis, _, size), count in Expected(asked, case.model, owner * s.s_p).schedule().items():
            if purpose == "scalars":
                continue
            engine[purpose if axis != "inner" else "inner", Op(op)] += count * size / s.optim  # type: ignore[assignment]
    for op, purpose, term in (
        (Op.ALL_GATHER, "gather", "T_p"),
        (Op.REDUCE_SCATTER, "param_reduce", "T_p"),
        (Op.BROADCAST, "publish", "T_os^1"),
        (Op.ALL_GATHER, "publish", "T_os^1"),
    ):
        assert engine[purpose, op] == pytest.approx(ours[term, op], rel=0.01), purpose
    for op in (Op.REDUCE_SCATTER, Op.ALL_REDUCE):  # the last micro-batch uses the same groups as the others
        reduced = engine["grad_reduce", op] + engine["inner", op]
        assert reduced == pytest.approx(ours["T_g", op] + ours["T_os^0", op], rel=0.01), op
