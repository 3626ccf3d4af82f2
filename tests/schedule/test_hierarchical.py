"""Collectives in two stages, in node and across nodes: the same training, and these collectives exactly."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from deepspeed_amsp.plan.factors import ShardFactor, Sharding, enumerate_shardings
from tests.parity.cases import NIGHTLY, case_for
from tests.parity.test_parity import check
from tests.schedule.test_collectives import FP32, PHI, Log, gathers, scalars
from tests.semantics import modules as m
from tests.semantics.harness import Run, Trainer, assert_matches, job, one_step, reference
from tests.support.jobs import Case, Report, make_engine, report_of, train_step
from tests.support.models import Even
from tests.support.pool import pool

MODES = [("two_level", "broadcast", 3), ("all_reduce", "all_gather", 2)]


def spans_nodes(sharding: Sharding) -> bool:
    """Whether some axis but ``param`` has several ranks both in a node and across nodes."""
    p, g, os, dp = sharding.parameters, sharding.gradients, sharding.optimizer_states, sharding.data_parallel
    axes = [(p, g), (p, os), (os, dp), (p, dp)]
    return any(high.s0 // low.s0 > 1 and high.s1 // low.s1 > 1 for low, high in axes)


def _shardings(*clusters: tuple[int, int]) -> list[Sharding]:
    return [s for r, n in clusters for s in enumerate_shardings(ShardFactor(r, n)) if spans_nodes(s)]


# On eight ranks, in the normal suite, every fifth: a node of four ranks has axes that are split inside it, too.
ALL = _shardings((2, 2)) + (_shardings((4, 2), (2, 4)) if NIGHTLY else _shardings((4, 2), (2, 4))[::5])


def staged(sharding: Sharding, reduce: str, publish: str, micro_batches: int, **overrides: object) -> Case:
    choices = {"reduce": reduce, "publish": publish, "micro_batches": micro_batches}
    case = case_for(sharding, choices, **overrides)
    return replace(case, amsp={**case.amsp, "hierarchical": True})  # type: ignore[dict-item]


@pytest.mark.parametrize("sharding", ALL, ids=str)
def test_parity(sharding: Sharding) -> None:
    """Half of them on the adversarial groups, which poison what is in flight."""
    number = ALL.index(sharding)
    for turn, mode in enumerate(MODES if sharding.s_dp == 4 or NIGHTLY else MODES[number % 2 :][:1]):
        model = ("mlp", "attention")[turn]
        adversarial = bool((number + turn) % 2)
        check(staged(sharding, *mode, model=model, clip=0.4, adversarial=adversarial), sharding.s_dp)


def _whole_run(case: Case) -> Report:
    """The report after all publishes have arrived, so that their second stages are in the log."""
    engine = make_engine(case)
    losses = [train_step(engine, case, step) for step in range(case.steps)]
    report = report_of(engine, losses, [])
    engine.destroy()
    return report


def formula(sharding: Sharding, reduce: str, publish: str, micro_batches: int) -> Log:
    """(op, purpose, axis, group size, bytes) -> how often; one even bucket, see test_collectives."""
    log = gathers(sharding, micro_batches) + scalars(sharding)
    p, g, os, dp = sharding.parameters, sharding.gradients, sharding.optimizer_states, sharding.data_parallel

    def issue(op: str, purpose: str, axis: str, size: int, elements: int, count: int) -> None:
        if size > 1 and count:
            log[op, purpose, axis, size, elements * FP32] += count

    def all_reduce(axis: str, low: ShardFactor, high: ShardFactor, elements: int, count: int) -> None:
        node, cross = high.s0 // low.s0, high.s1 // low.s1
        if node > 1 and cross > 1:
            issue("reduce_scatter", "grad_reduce", f"{axis}_node", node, elements, count)
            issue("all_reduce", "grad_reduce", f"{axis}_cross", cross, elements // node, count)
            issue("all_gather", "grad_gather", f"{axis}_node", node, elements, count)
        else:
            issue("all_reduce", "grad_reduce", axis, node * cross, elements, count)

    bucket = PHI // sharding.s_p
    if reduce == "all_reduce":
        all_reduce("inner", p, g, bucket, micro_batches - 1)
        all_reduce("data", p, dp, bucket, 1)
    else:
        for axis, low, high, held, count in (("inner", p, g, bucket, micro_batches), ("outer", g, os, None, 1)):
            elements = held or PHI // sharding.s_g
            node = high.s0 // low.s0
            issue("reduce_scatter", "grad_reduce", f"{axis}_node", node, elements, count)
            issue("reduce_scatter", "grad_reduce", f"{axis}_cross", high.s1 // low.s1, elements // node, count)
        all_reduce("replicate", os, dp, PHI // sharding.s_os, 1)
    node, cross, section = os.s0 // p.s0, os.s1 // p.s1, PHI // sharding.s_os
    if node == 1 or cross == 1:
        if publish == "broadcast":
            issue("broadcast", "publish", "optim", node * cross, section, node * cross)
        else:
            issue("all_gather", "publish", "optim", node * cross, bucket, 1)
    elif publish == "broadcast":
        issue("broadcast", "publish", "optim_cross", cross, section, cross)
        issue("broadcast", "publish", "optim_node", node, section * cross, node)
    else:
        issue("all_gather", "publish", "optim_cross", cross, section * cross, 1)
        issue("all_gather", "publish", "optim_node", node, bucket, 1)
    return log


def _modes(number: int, sharding: Sharding) -> list[tuple[str, str, int]]:
    """With more owners than tensors these are cut, and what is cut is broadcast block by block."""
    if sharding.s_os // sharding.s_p > Even.LAYERS:
        return [MODES[1]]
    return MODES if sharding.s_dp == 4 else [MODES[number % 2]]


@pytest.mark.parametrize(
    ("sharding", "mode"), [(s, mode) for number, s in enumerate(ALL) for mode in _modes(number, s)], ids=str
)
def test_a_step_issues_exactly_these(sharding: Sharding, mode: tuple[str, str, int]) -> None:
    case = staged(sharding, *mode, model="even", steps=2)
    case = replace(case, amsp={**case.amsp, "bucket_bytes": 10**12})  # type: ignore[dict-item]
    for report in pool(sharding.s_dp).run(_whole_run, case):
        assert Counter(report.log) == formula(sharding, *mode)


def _rank_zero_looks(trainer: Trainer) -> None:
    """Between two steps rank 0 alone reads every parameter, and then all meet at a barrier."""
    import torch.distributed as dist

    for step in range(trainer.run.steps):
        one_step(trainer, step)
        if dist.get_rank() == 0:
            sum(float(param.detach().sum()) for param in trainer.module.parameters())
        dist.barrier()


@pytest.mark.parametrize("publish", ["broadcast", "all_gather"])
def test_one_rank_alone_may_read(publish: str) -> None:
    """The second stage of a publish does not wait for the others to come by (it would wait for ever)."""
    one, whole = ShardFactor(1, 1), ShardFactor(2, 2)
    run = Run(Sharding(one, one, whole, whole), m.Plain, publish=publish, amsp={"hierarchical": True})
    held = pool(4).run(job, run.but(loop=_rank_zero_looks), timeout=30)
    assert_matches(held, reference(run))
