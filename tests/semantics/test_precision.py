"""Precision: fp16 with loss scaling, overflow, bf16, accumulation and wire dtypes, autocast, masters."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.lr_schedules import WarmupLR
from deepspeed.utils import logger
from torch import nn

from deepspeed_amsp.plan.factors import Sharding
from tests.semantics import modules as m
from tests.semantics.harness import (
    LOCAL_STATES,
    MIXED,
    UNEQUAL,
    ZERO3,
    Held,
    Reference,
    Run,
    assert_matches,
    assert_replicas_equal,
    held_by,
    job,
    loss_of,
    over,
    pair,
    plain_loop,
    reference,
    same,
    short_spread,
    trio,
    whole_masters,
    whole_parameters,
)
from tests.support.pool import pool

# ---- fp16 --------------------------------------------------------------------------------------------------


@contextmanager
def _half_allowed() -> Iterator[None]:
    """DeepSpeed refuses fp16 on a CPU, which can do it, slowly."""
    with mock.patch.object(type(get_accelerator()), "is_fp16_supported", return_value=True):
        yield


def _half_job(run: Run) -> Held:
    with _half_allowed():
        return job(run)


def on_ranks_in_half(run: Run, **kwargs: Any) -> list[Held]:
    return pool(4).run(_half_job, run, **kwargs)


def _fp16(sharding: Sharding, overflows: tuple[int, ...] = (), **kwargs: Any) -> Run:
    """A run whose steps in ``overflows`` meet an infinite gradient, each on another rank only."""
    scaling = kwargs.pop("fp16", {"loss_scale": 0, "initial_scale_power": 8})
    warmup = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.1, "warmup_num_steps": 100, "warmup_type": "linear"}}
    return Run(
        sharding,
        m.Plain,
        loop=_overflowing,
        dtype=torch.float16,
        optimizer="plain_sgd",
        extra={"fp16": {"enabled": True, **scaling}, "scheduler": warmup, "overflows": overflows},
        **kwargs,
    )


def _overflowing(trainer: Any) -> None:
    """Notes after every step: loss scale, skipped steps, whether the step applied, learning rate, parameters."""
    run = trainer.run
    for step in range(run.steps):
        for micro in range(run.micro_batches):
            rows = trainer.rows(step, micro)
            loss = loss_of(trainer(rows), rows)
            trainer.losses.append(loss.item())
            if step in run.extra["overflows"] and micro == 0 and dist.get_rank() == step % 4:
                loss = loss * float("inf")
            trainer.backward(loss)
            trainer.step()
        engine = trainer.engine
        scale = engine.optimizer.loss_scale
        assert scale == engine.optimizer.cur_scale
        total = sum(value.double().abs().sum().item() for value in whole_parameters(engine).values())
        trainer.notes.append((scale, engine.skipped_steps, engine.was_step_applied(), engine.get_lr()[0], total))
        assert engine.global_steps == step + 1
    assert run.steps == len(trainer.norms)


def _skipping(run: Run) -> tuple[Held, list[float]]:
    """The reference takes part only in the steps that are not skipped; DeepSpeed's schedule goes with it."""
    trainer = Reference(run)
    schedule = WarmupLR(trainer.optimizer, **run.extra["scheduler"]["params"])
    rates = []
    for step in range(run.steps):
        if step not in run.extra["overflows"]:
            for micro in range(run.micro_batches):
                rows = trainer.rows(step, micro)
                trainer.backward(loss_of(trainer(rows), rows))
                trainer.step()
            schedule.step()
        rates.append(trainer.optimizer.param_groups[0]["lr"])
    return held_by(trainer), rates


OVERFLOWS = (0, 1, 4, 8, 9, 10)
SCALERS: dict[str, dict[str, Any]] = {
    "plain": {"initial_scale_power": 8, "loss_scale_window": 2, "hysteresis": 1},
    "hysteresis": {"initial_scale_power": 6, "loss_scale_window": 2, "hysteresis": 3},
    "consecutive": {
        "initial_scale_power": 6, "loss_scale_window": 1, "hysteresis": 2, "consecutive_hysteresis": True,
    },
    "static": {"loss_scale": 64},
}  # fmt: skip


def _scales_by_hand(settings: dict[str, Any], steps: int) -> list[float]:
    """DeepSpeed's own scaler, told of the same overflows."""
    if "loss_scale" in settings:
        scaler: Any = LossScaler(scale=settings["loss_scale"])
    else:
        scaler = DynamicLossScaler(
            init_scale=2 ** settings["initial_scale_power"],
            scale_window=settings["loss_scale_window"],
            min_scale=settings.get("min_loss_scale", 1),
            delayed_shift=settings["hysteresis"],
            consecutive_hysteresis=settings.get("consecutive_hysteresis", False),
        )
    scales = []
    with mock.patch("deepspeed.runtime.fp16.loss_scaler.dist.get_rank", return_value=1):
        for step in range(steps):
            scaler.update_scale(step in OVERFLOWS)
            scales.append(float(scaler.loss_scale))
    return scales


@pytest.mark.parametrize(
    ("sharding", "scaling"),
    [(LOCAL_STATES, "plain"), (UNEQUAL, "hysteresis"), (MIXED, "consecutive"), (ZERO3, "plain"), (UNEQUAL, "static"),
     (ZERO3, "static"), (ZERO3, "hysteresis")],
    ids=str,
)  # fmt: skip
def test_overflow_on_one_rank_skips_the_step_on_all(sharding: Sharding, scaling: str) -> None:
    """Scale, counters, learning rate and parameters follow DeepSpeed's scaler; the schedule waits."""
    settings = SCALERS[scaling]
    run = _fp16(sharding, OVERFLOWS, steps=14, micro_batches=2, fp16=settings, clip=0.05)
    held = on_ranks_in_half(run)
    want, rates = _skipping(run)
    scales = _scales_by_hand(settings, run.steps)
    assert_replicas_equal(held)
    skipped, before = 0, None
    for step, (scale, rate) in enumerate(zip(scales, rates, strict=True)):
        overflow = step in OVERFLOWS
        skipped += overflow
        for mine in held:
            found_scale, found_skipped, applied, found_rate, total = mine.notes[step]
            assert (found_scale, found_skipped, applied) == (scale, skipped, not overflow), (step, scaling)
            assert found_rate == pytest.approx(rate, abs=1e-9), step
            assert not overflow or before is None or total == before, "a skipped step moves nothing"
        before = held[0].notes[step][4]
    clean = [norm for step, norm in enumerate(held[0].norms) if step not in OVERFLOWS]
    torch.testing.assert_close(torch.tensor(clean), torch.tensor(want.norms), rtol=1e-2, atol=1e-4)
    masters = whole_masters(held, want.parameters)
    for name, value in want.parameters.items():
        assert masters[name].dtype is torch.float32
        torch.testing.assert_close(masters[name], value, rtol=1e-2, atol=1e-3)
        assert same(held[0].parameters[name], masters[name].half()), name


@pair
def test_overflow_at_the_smallest_scale_ends_the_run_as_in_deepspeed(sharding: Sharding) -> None:
    settings = {"initial_scale_power": 6, "min_loss_scale": 32, "hysteresis": 1}
    errors = on_ranks_in_half(_fp16(sharding, (0, 1), steps=3, fp16=settings), return_exceptions=True)
    for error in errors:
        assert "already at minimum" in str(error), error


@trio
def test_fp16_follows_fp32(sharding: Sharding) -> None:
    run = _fp16(sharding, steps=4, micro_batches=2, clip=0.2)
    run = run.but(loop=plain_loop, extra={"fp16": run.extra["fp16"]})
    held, want = on_ranks_in_half(run), reference(run)
    assert_matches(held, want, rtol=1e-2, atol=2e-3)


# ---- bf16 --------------------------------------------------------------------------------------------------


def _poisoned_step(trainer: Any) -> None:
    """In step 1 rank 2 alone has a NaN; the log of this rank is noted."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        for step in range(3):
            before = whole_parameters(trainer.engine)
            rows = trainer.rows(step, 0)
            loss = loss_of(trainer(rows), rows)
            trainer.losses.append(loss.item())
            poisoned = step == 1
            trainer.backward(loss * float("nan") if poisoned and dist.get_rank() == 2 else loss)
            lines.clear()
            trainer.step()
            said = [line for line in lines if "skip" in line.lower()]
            after = whole_parameters(trainer.engine)
            unmoved = all(same(value, after[name]) for name, value in before.items())
            clean = not any(value.isnan().any() for value in after.values())
            trainer.notes.append((trainer.engine.skipped_steps, unmoved, clean, len(said)))
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


@short_spread
def test_a_nan_on_one_rank_skips_the_step_and_says_so(sharding: Sharding) -> None:
    extra = {"bf16": {"enabled": True, "check_grad_overflow": True}}
    held = pool(4).run(job, Run(sharding, m.Plain, loop=_poisoned_step, dtype=torch.bfloat16, extra=extra))
    assert_replicas_equal(held)
    for rank, mine in enumerate(held):
        one_line = int(rank == 0)
        assert mine.notes == [(0, False, True, 0), (1, True, True, one_line), (1, False, True, 0)]


class Weight(nn.Module):
    """The gradient of each element is the mean of a column of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, 8))

    def forward(self, columns: torch.Tensor) -> torch.Tensor:
        return (self.weight * columns).sum()


def _tiny_after_large(trainer: Any) -> None:
    """65 micro-batches: a gradient of 1, then 64 of 2^-9, which bf16 would lose against the 1."""
    for micro in range(65):
        value = 1.0 if micro == 0 else 2.0**-9
        loss = trainer(torch.full((1, 8), value, dtype=torch.bfloat16))
        trainer.backward(loss, scale_wrt_gas=False)
        trainer.step()


@trio
@pytest.mark.parametrize("reduce", ["two_level", "all_reduce"])
def test_accumulating_in_fp32_under_bf16(sharding: Sharding, reduce: str) -> None:
    run = Run(
        sharding, Weight, loop=_tiny_after_large, micro_batches=65, dtype=torch.bfloat16, optimizer="plain_sgd",
        reduce=reduce, extra={"data_types": {"grad_accum_dtype": "fp32"}},
    )  # fmt: skip
    held = pool(4).run(job, run)
    total = 1 + 64 * 2.0**-9
    masters = whole_masters(held, {"weight": torch.ones(1, 8)})
    torch.testing.assert_close(masters["weight"], torch.full((1, 8), 1 - 0.1 * total), rtol=1e-6, atol=0.0)
    for mine in held:
        assert mine.norms == [pytest.approx(total * 8**0.5, rel=1e-6)]


def _small_updates(trainer: Any) -> None:
    """Every update is a 16th of what bf16 can tell from 1."""
    for _ in range(trainer.run.steps):
        loss = trainer(torch.full((1, 8), 10 * 2.0**-12, dtype=torch.bfloat16))
        trainer.backward(loss)
        trainer.step()


@short_spread
def test_masters_keep_what_bf16_loses(sharding: Sharding) -> None:
    run = Run(sharding, Weight, loop=_small_updates, steps=40, dtype=torch.bfloat16, optimizer="plain_sgd")
    held = pool(4).run(job, run)
    masters = whole_masters(held, {"weight": torch.ones(1, 8)})
    torch.testing.assert_close(masters["weight"], torch.full((1, 8), 1 - 40 * 2.0**-12), rtol=1e-6, atol=0.0)
    for mine in held:
        assert torch.equal(mine.parameters["weight"], masters["weight"].bfloat16())
        assert float(mine.parameters["weight"][0, 0]) < 1


# ---- wires, autocast, buffers ------------------------------------------------------------------------------


@pair
@pytest.mark.parametrize(
    ("dtype", "wire", "rtol"),
    [(torch.bfloat16, "fp32", 2e-2), (torch.float32, "bf16", 1e-2), (torch.float32, "fp32", 1e-5)],
    ids=str,
)
def test_gradients_travel_in_the_dtype_that_is_asked_for(
    sharding: Sharding, dtype: torch.dtype, wire: str, rtol: float
) -> None:
    run = Run(
        sharding, m.Plain, dtype=dtype, optimizer="plain_sgd", extra={"communication_data_type": wire},
        observe=_bytes_reduced, bucket_bytes=10**6, reduce="all_reduce",
    )  # fmt: skip
    held = pool(4).run(job, run)
    assert_matches(held, reference(run), rtol=rtol, atol=max(rtol, 1e-6))
    numel = sum(param.numel() for param in m.Plain().parameters())
    size = 4 if wire == "fp32" else 2
    purpose = "grad_reduce" if sharding.s_p == 1 else "param_reduce"
    for mine in held:
        assert numel * size <= mine.seen[purpose] < numel * size * 1.4, "padding, and no other dtype"


def _bytes_reduced(trainer: Any) -> dict[str, int]:
    sent: dict[str, int] = {}
    for entry in trainer.engine.amsp.comm.last_step:
        sent[entry.purpose.value] = sent.get(entry.purpose.value, 0) + entry.bytes
    return sent


class Curious(m.Plain):
    """Writes down under which autocast, and with which dtypes, it ran."""

    seen: tuple[Any, ...] = ()

    def middle(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        type(self).seen = (torch.is_autocast_enabled("cpu"), hidden.dtype, self.inner.weight.dtype)
        return super().middle(hidden, rows)


def _what_it_saw(trainer: Any) -> Any:
    return Curious.seen


def _with_autocast(trainer: Any) -> None:
    for step in range(trainer.run.steps):
        rows = trainer.rows(step, 0)
        with torch.autocast("cpu", torch.bfloat16, enabled=trainer.engine is None):
            output = trainer(rows)
        loss = loss_of(output, rows)
        trainer.losses.append(loss.item())
        trainer.backward(loss)
        trainer.step()


@trio
def test_torch_autocast_in_bf16(sharding: Sharding) -> None:
    extra = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
    run = Run(sharding, Curious, loop=_with_autocast, optimizer="plain_sgd", extra=extra, observe=_what_it_saw)
    held = pool(4).run(job, run)
    assert_matches(held, reference(run), rtol=1e-2, atol=1e-3)
    for mine in held:
        assert mine.seen == (True, torch.bfloat16, torch.float32)
        assert mine.parameters["inner.weight"].dtype is torch.float32


def _buffer_dtypes(trainer: Any) -> dict[str, torch.dtype]:
    return {name: value.dtype for name, value in trainer.module.named_buffers()}


@over([UNEQUAL, MIXED])
def test_buffers_that_are_kept_in_fp32(sharding: Sharding) -> None:
    extra = {"data_types": {"buffer_dtype": "bf16", "keep_in_fp32_modules": ["frequency"]}}
    held = pool(4).run(job, Run(sharding, m.Buffers, dtype=torch.bfloat16, extra=extra, observe=_buffer_dtypes))
    for mine in held:
        assert mine.seen["frequency"] is torch.float32 and mine.seen["scratch"] is torch.bfloat16
        assert mine.seen["count"] is torch.int64
