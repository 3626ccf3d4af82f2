"""What DeepSpeed users do with an engine, at a spread of triples, against independent references."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from deepspeed_amsp.plan.factors import ShardFactor, Sharding
from tests.parity.cases import case_for
from tests.parity.merge import assert_replicas_equal, whole_masters, working_copies
from tests.support import models
from tests.support.jobs import Case, make_engine, report_of, train, train_plain, train_step
from tests.support.pool import pool

CLUSTER = ShardFactor(2, 2)
ONE, NODE, ALL = ShardFactor(1, 1), ShardFactor(2, 1), ShardFactor(2, 2)
SPREAD = [
    Sharding(ONE, ONE, ONE, CLUSTER),
    Sharding(ONE, NODE, ALL, CLUSTER),
    Sharding(NODE, NODE, ALL, CLUSTER),
    Sharding(ALL, ALL, ALL, CLUSTER),
]
"""Plain data parallelism, and triples with a factor of 1, the whole world, and unequal factors."""
DEFAULTS = {"reduce": "two_level", "publish": "broadcast", "micro_batches": 2, "clip": 0.4}
# The parity matrix runs plain data parallelism, too; the tests here only do in the nightly mode.
spread = pytest.mark.parametrize("sharding", SPREAD if os.environ.get("AMSP_NIGHTLY") == "1" else SPREAD[1:], ids=str)


def make_case(sharding: Sharding, **overrides: Any) -> Case:
    choices = {key: overrides.pop(key, value) for key, value in DEFAULTS.items()}
    return case_for(sharding, choices, **overrides)


def reference(case: Case, world: int = 4) -> models.Outcome:
    return models.reference(case.model, case.optimizer, world, case.micro_batches, case.steps, case.clip)


def assert_parity(reports: list[Any], case: Case, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    want = reference(case)
    assert_replicas_equal(reports)
    model = models.make_model(case.model)
    for copies in (whole_masters(reports, model), working_copies(reports, model)):
        for name, value in want.parameters.items():
            torch.testing.assert_close(
                copies[name].float(), value, rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}"
            )


# ---- models, optimizers, precision -------------------------------------------------------------------------


@spread
@pytest.mark.parametrize("model", ["convolution", "recomputed", "recomputed_reentrant"])
def test_models(sharding: Sharding, model: str) -> None:
    case = make_case(sharding, model=model, adversarial=model == "recomputed")
    assert_parity(pool(4).run(train, case), case)


@spread
@pytest.mark.parametrize("optimizer", ["adagrad", "rmsprop", "sgd"])
def test_optimizers(sharding: Sharding, optimizer: str) -> None:
    case = make_case(sharding, optimizer=optimizer)
    assert_parity(pool(4).run(train, case), case)


@pytest.mark.parametrize("sharding", SPREAD[:2], ids=str)
def test_an_optimizer_that_needs_whole_tensors(sharding: Sharding) -> None:
    """Adafactor's row and column statistics are right, since an owner has the whole tensor."""
    case = make_case(sharding, optimizer="adafactor", clip=0.0)
    assert_parity(pool(4).run(train, case), case)


@spread
def test_bf16(sharding: Sharding) -> None:
    """bf16 follows fp32 within its precision; replicas are still bit-equal, masters keep fp32."""
    case = make_case(sharding, bf16=True, optimizer="sgd", adversarial=True)
    reports = pool(4).run(train, case)
    assert_parity(reports, case, rtol=2e-2, atol=2e-2)
    want = reference(case)
    for report in reports:
        torch.testing.assert_close(report.losses, want.losses, rtol=1e-2, atol=0.0)
    assert all(value.dtype is torch.float32 for value in reports[0].masters.values())
    model = models.make_model(case.model)
    masters, working = whole_masters(reports, model), working_copies(reports, model)
    for name, value in working.items():
        assert value.dtype is torch.bfloat16
        assert torch.equal(value, masters[name].to(torch.bfloat16)), name


@spread
def test_two_runs_are_bit_equal(sharding: Sharding) -> None:
    case = make_case(sharding, adversarial=True)
    first, second = pool(4).run(train, case), pool(4).run(train, case)
    for one, other in zip(first, second, strict=True):
        assert one.losses == other.losses and one.norms == other.norms
        assert all(torch.equal(value, other.masters[piece]) for piece, value in one.masters.items())


@spread
@pytest.mark.parametrize("reduce", ["two_level", "all_reduce"])
def test_overlap_changes_nothing(sharding: Sharding, reduce: str) -> None:
    on = make_case(sharding, reduce=reduce, micro_batches=3)
    off = make_case(sharding, reduce=reduce, micro_batches=3)
    off.amsp["overlap"] = dict.fromkeys(("gather", "reduce_scatter", "all_reduce", "publish"), False)  # type: ignore[index]
    for one, other in zip(pool(4).run(train, on), pool(4).run(train, off), strict=True):
        assert one.losses == other.losses and one.norms == other.norms
        assert all(torch.equal(value, other.masters[piece]) for piece, value in one.masters.items())


# ---- the same script under DeepSpeed itself ----------------------------------------------------------------


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize(("bf16", "rtol"), [(False, 1e-5), (True, 1e-3)])
def test_losses_equal_deepspeeds_own(stage: int, bf16: bool, rtol: float) -> None:
    name = f"zero{stage}"
    ours = Case(
        amsp={"sharding": name, "topology": {"gpus_per_node": 2}}, stage=stage, micro_batches=2, clip=0.4,
        bf16=bf16, steps=6,
    )  # fmt: skip
    theirs = Case(
        amsp=None, stage=stage, micro_batches=2, clip=0.4, bf16=bf16, steps=6,
        zero={"overlap_comm": False} if stage == 1 else {},
    )  # fmt: skip
    reports = pool(4).run(train, ours)
    losses, norms = pool(4).run(train_plain, theirs)[0]
    torch.testing.assert_close(reports[0].losses, losses, rtol=rtol, atol=0.0)
    torch.testing.assert_close(reports[0].norms, norms, rtol=max(rtol * 20, 1e-5), atol=0.0)


# ---- loops -------------------------------------------------------------------------------------------------


def _loop(case: Case, kind: str) -> Any:
    engine = make_engine(case)
    rank, world = dist.get_rank(), dist.get_world_size()
    rows = slice(rank * models.SAMPLES, (rank + 1) * models.SAMPLES)

    def loss_at(step: int, micro: int) -> torch.Tensor:
        tokens = models.batch(step, micro, world)[rows]
        return models.loss_of(engine(tokens[:, :-1]), tokens)

    evaluations = []
    for step in range(case.steps):
        for micro in range(case.micro_batches):
            if kind == "exception":
                with pytest.raises((IndexError, RuntimeError)):
                    engine(torch.full((2, models.LENGTH), models.VOCABULARY + 5))
            loss = loss_at(step, micro)
            if kind == "eval_between":
                engine.eval()
                with torch.no_grad():
                    evaluations.append(float(loss_at(99, 0)))
                engine.train()
            if kind == "tensor_backward":
                loss.backward()
            else:
                engine.backward(loss)
            engine.step()
        if kind == "eval_between":
            engine.eval()
            with torch.no_grad():
                evaluations.append(float(loss_at(99, 0)))
            engine.train()
    report = report_of(engine, evaluations, [])
    engine.destroy()
    return report


@spread
@pytest.mark.parametrize(
    ("kind", "model"), [("tensor_backward", "mlp"), ("eval_between", "attention"), ("exception", "mlp")]
)
def test_loops(sharding: Sharding, kind: str, model: str) -> None:
    """loss.backward() as well as engine.backward(loss); eval anywhere; an error in forward, then training on."""
    case = make_case(sharding, model=model, adversarial=kind == "eval_between")
    reports = pool(4).run(_loop, case, kind)
    assert_parity(reports, case)
    if kind == "eval_between":
        # Parameters only change in the second micro-batch's step: an evaluation must see each update at once.
        for report in reports:
            between, after = report.losses[0], report.losses[2]
            assert report.losses[1] == between and report.losses[3] == after and between != after


def _learning_rates(case: Case) -> list[float]:
    engine = make_engine(case)
    rates = []
    for step in range(case.steps):
        train_step(engine, case, step)
        rates.append(engine.get_lr()[0])
    engine.destroy()
    return rates


@pytest.mark.parametrize(
    "scheduler",
    [
        {"type": "WarmupLR", "params": {"warmup_min_lr": 0.0, "warmup_max_lr": 0.01, "warmup_num_steps": 3}},
        {
            "type": "WarmupDecayLR",
            "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 2, "total_num_steps": 6},
        },
        {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 2, "total_num_steps": 6}},
        {"type": "StepLR", "params": {"step_size": 2, "gamma": 0.5}},
    ],
    ids=lambda scheduler: scheduler["type"],
)
def test_schedulers_follow_deepspeeds(scheduler: dict[str, Any]) -> None:
    """The learning rates are those of a DeepSpeed engine without ZeRO, which hands schedulers a torch optimizer."""
    ours = make_case(SPREAD[2], extra={"scheduler": scheduler}, steps=5)
    theirs = Case(amsp=None, stage=0, micro_batches=2, steps=5, extra={"scheduler": scheduler})
    assert pool(4).run(_learning_rates, ours) == pool(4).run(_learning_rates, theirs)


# ---- starting values ---------------------------------------------------------------------------------------


def _differently_seeded(case: Case) -> Any:
    make = models.make_model

    def seeded(name: str, seed: int = 7) -> torch.nn.Module:
        return make(name, seed + dist.get_rank())

    models.make_model = seeded  # type: ignore[assignment]
    try:
        return train(case)
    finally:
        models.make_model = make


@spread
def test_all_ranks_start_from_rank_0(sharding: Sharding) -> None:
    case = make_case(sharding)
    assert_parity(pool(4).run(_differently_seeded, case), case)


def _largest_allocations(case: Case) -> tuple[int, int]:
    """(bytes of full flat buffers alive at most at once while the engine is made, bytes of the largest unit)."""
    from deepspeed_amsp.partition.params import ShardedUnit

    alive, peak, largest = 0, 0, 0
    original: Callable[..., None] = ShardedUnit.__init__
    free: Callable[..., None] = ShardedUnit.free

    def counting_free(self: ShardedUnit) -> None:
        nonlocal alive, peak, largest
        full = self._full.untyped_storage().nbytes()
        alive += full
        peak, largest = max(peak, alive), max(largest, full)
        free(self)
        alive -= full - self._full.untyped_storage().nbytes()

    ShardedUnit.free = counting_free  # type: ignore[method-assign]
    try:
        engine = make_engine(case)
    finally:
        ShardedUnit.free = free  # type: ignore[method-assign]
        assert ShardedUnit.__init__ is original
    assert all(param.numel() == 0 for param in engine.module.parameters()), "only shards remain"
    engine.destroy()
    return peak, largest


def test_no_rank_ever_holds_the_whole_model() -> None:
    peak, largest = pool(4).run(_largest_allocations, make_case(SPREAD[3]))[0]
    total = sum(p.numel() * 4 for p in models.make_model("mlp").parameters())
    assert peak == largest < total / 2
