"""Loops: evaluation anywhere, recomputation, generation, exceptions, odd windows, 50 steps."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from deepspeed_amsp.plan.factors import Sharding
from tests.semantics import modules as m
from tests.semantics.harness import (
    DDP,
    LOCAL_STATES,
    MICS,
    MIXED,
    UNEQUAL,
    ZERO3,
    Held,
    Run,
    Trainer,
    assert_matches,
    assert_parity,
    label,
    loss_of,
    on_ranks,
    one_step,
    over,
    plain_loop,
    reference,
    short_spread,
    trio,
)

# ---- evaluation --------------------------------------------------------------------------------------------


def _evaluate(trainer: Trainer, mode: Callable[[], AbstractContextManager[Any]], step: int) -> None:
    """A forward in eval mode; its loss is noted, and its graph, if there is one, dropped."""
    rows = trainer.rows(1000 + step, 0)
    trainer.train(False)
    with mode():
        trainer.notes.append(loss_of(trainer(rows), rows).item())
    trainer.train()


def _evaluating(trainer: Trainer, mode: Callable[[], AbstractContextManager[Any]]) -> None:
    """An evaluation between forward and backward, between backward and step, and after the step."""
    run = trainer.run
    _evaluate(trainer, mode, 0)
    for step in range(run.steps):
        for micro in range(run.micro_batches):
            rows = trainer.rows(step, micro)
            loss = loss_of(trainer(rows), rows)
            _evaluate(trainer, mode, step)
            trainer.losses.append(loss.item())
            trainer.backward(loss)
            _evaluate(trainer, mode, step)
            trainer.step()
            _evaluate(trainer, mode, step)


def _no_grad(trainer: Trainer) -> None:
    _evaluating(trainer, torch.no_grad)


def _inference_mode(trainer: Trainer) -> None:
    _evaluating(trainer, torch.inference_mode)


def _with_grad(trainer: Trainer) -> None:
    _evaluating(trainer, nullcontext)


def assert_same_notes(held: Iterable[Held], want: Held) -> None:
    """The noted losses, averaged over ranks, are the reference's: no stale parameter was ever read."""
    notes = torch.tensor([mine.notes for mine in held], dtype=torch.float64).mean(dim=0)
    torch.testing.assert_close(notes, torch.tensor(want.notes, dtype=torch.float64), rtol=1e-5, atol=1e-7)


@trio
@pytest.mark.parametrize("loop", [_no_grad, _inference_mode, _with_grad], ids=lambda loop: loop.__name__.strip("_"))
def test_evaluation_anywhere(sharding: Sharding, loop: Callable[..., None]) -> None:
    """And every evaluation sees the parameters of that moment."""
    model = {_no_grad: m.Reused, _inference_mode: m.Tied, _with_grad: m.Borrowed}[loop]
    run = Run(sharding, model, loop=loop, micro_batches=2, clip=0.3, adversarial=loop is _no_grad)
    held, want = on_ranks(run), reference(run)
    assert_matches(held, want)
    assert_same_notes(held, want)


def _backwards_order(trainer: Any) -> None:
    """After every step an evaluation that uses the last module first, and one module alone."""
    run = trainer.run
    for step in range(run.steps):
        rows = trainer.rows(step, 0)
        loss = loss_of(trainer(rows), rows)
        trainer.losses.append(loss.item())
        trainer.backward(loss)
        trainer.step()
        module = trainer.module
        hidden = torch.cat([m.features(rows), m.features(rows)[:, :4]], dim=1)
        with torch.no_grad():
            trainer.notes.append(module.last(hidden).float().square().mean().item())
            trainer.notes.append(module.norm(module.inner(hidden)).float().sin().mean().item())
            trainer.notes.append(module.first(module.last(hidden)).float().square().mean().item())


@short_spread
def test_modules_called_by_themselves_right_after_a_step(sharding: Sharding) -> None:
    run = Run(sharding, m.Plain, loop=_backwards_order, steps=4, adversarial=True)
    held, want = on_ranks(run), reference(run)
    assert_matches(held, want)
    assert_same_notes(held, want)


# ---- reading after a step ----------------------------------------------------------------------------------


def _by_attribute(module: nn.Module) -> Iterable[torch.Tensor]:
    return [module.first.weight, module.inner.bias, module.last.weight]


def _by_listing(module: nn.Module) -> Iterable[torch.Tensor]:
    return list(module.parameters())


def _by_state_dict(module: nn.Module) -> Iterable[torch.Tensor]:
    return module.state_dict().values()


def _by_copy(module: nn.Module) -> Iterable[torch.Tensor]:
    return copy.deepcopy(module).parameters()


def _by_submodule_state(module: nn.Module) -> Iterable[torch.Tensor]:
    return copy.copy(module.inner).state_dict().values()


READERS = [_by_attribute, _by_listing, _by_state_dict, _by_copy, _by_submodule_state]


def _reading(trainer: Any) -> None:
    """Right after every step, one way of reading the model: a different one in each step."""
    for step in range(trainer.run.steps):
        one_step(trainer, step)
        read = READERS[step % len(READERS)](trainer.module)
        trainer.notes.append(sum(value.detach().double().abs().sum().item() for value in read))


@pytest.mark.parametrize(
    ("sharding", "publish"),
    [(LOCAL_STATES, "all_gather"), (UNEQUAL, "broadcast"), (UNEQUAL, "all_gather")],
    ids=lambda value: label(value) if isinstance(value, Sharding) else value,
)
def test_whole_parameters_are_ordinary_tensors_right_after_a_step(sharding: Sharding, publish: str) -> None:
    run = Run(sharding, m.Plain, loop=_reading, steps=len(READERS), publish=publish, adversarial=True)
    held, want = on_ranks(run), reference(run)
    assert_matches(held, want)
    for mine in held:
        for reader, found, wanted in zip(READERS, mine.notes, want.notes, strict=True):
            assert found == pytest.approx(wanted, rel=1e-6), reader.__name__


def _averaging(trainer: Any) -> None:
    """A moving average over references to the parameters that were taken once."""
    kept = list(trainer.module.parameters())
    average = [param.detach().clone() for param in kept]
    for step in range(trainer.run.steps):
        one_step(trainer, step)
        for mean, param in zip(average, kept, strict=True):
            mean.lerp_(param.detach(), 0.5)
    trainer.notes.append(sum(mean.double().abs().sum().item() for mean in average))


@over([LOCAL_STATES, UNEQUAL])
def test_kept_references_are_current_when_publishing_does_not_overlap(sharding: Sharding) -> None:
    run = Run(sharding, m.Plain, loop=_averaging, steps=5, amsp={"overlap": {"publish": False}})
    held, want = on_ranks(run), reference(run)
    for mine in held:
        assert mine.notes[0] == pytest.approx(want.notes[0], rel=1e-6)


# ---- recomputation -----------------------------------------------------------------------------------------


class Recomputed(m.Base):
    """Blocks under activation checkpointing, each with a frozen LayerNorm; a block within a block is, too."""

    reentrant = False

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(m.WIDTH), nn.Linear(m.WIDTH, m.WIDTH), nn.Tanh()) for _ in range(3)
        )
        for block in self.blocks:
            block[0].requires_grad_(False)

    def middle(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            hidden = hidden + checkpoint(block, hidden, use_reentrant=self.reentrant)
        return hidden


class RecomputedReentrant(Recomputed):
    reentrant = True


class RecomputedAndReused(RecomputedReentrant):
    """One block three times: its gradient arrives in three backwards within the backward."""

    def middle(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        for block in (self.blocks[0], self.blocks[1], self.blocks[0], self.blocks[2], self.blocks[0]):
            hidden = hidden + checkpoint(block, hidden, use_reentrant=True)
        return hidden


class RecomputedTwice(Recomputed):
    """A checkpoint around everything, with checkpoints inside."""

    def middle(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().middle, hidden, rows, use_reentrant=False)


def _non_scalar(trainer: Any) -> None:
    for step in range(trainer.run.steps):
        rows = trainer.rows(step, 0)
        output = trainer(rows)
        free = output.detach().requires_grad_()
        loss = loss_of(free, rows)
        trainer.losses.append(loss.item())
        loss.backward()
        output.backward(free.grad)
        trainer.step()


@trio
@pytest.mark.parametrize("model", [Recomputed, RecomputedReentrant, RecomputedAndReused, RecomputedTwice])
def test_recomputation_with_frozen_norms(sharding: Sharding, model: type[nn.Module]) -> None:
    loop = _non_scalar if model is RecomputedReentrant else plain_loop
    micro_batches = 1 if loop is _non_scalar else 2
    assert_parity(Run(sharding, model, loop=loop, micro_batches=micro_batches, clip=0.3))


# ---- generation --------------------------------------------------------------------------------------------


def _generate(trainer: Any) -> float:
    """Rows that feed on themselves: three rounds on rank 0, two more on each next rank. Of rank 0's rows only
    in the reference, which is then comparable with rank 0."""
    rank = 0 if trainer.engine is None else dist.get_rank()
    rows = trainer.rows(77, 0)[:2].clone()
    first = rows.clone()
    with torch.no_grad():
        for round_ in range(3 + 2 * rank):
            rows[:, : m.FEATURES] = trainer.module(rows)
            if round_ == 2:
                first = rows.clone()
    return first.double().sum().item()


def _generating(trainer: Any) -> None:
    for step in range(trainer.run.steps):
        rows = trainer.rows(step, 0)
        loss = loss_of(trainer(rows), rows)
        trainer.losses.append(loss.item())
        trainer.backward(loss)
        trainer.step()
        trainer.train(False)
        if trainer.engine is None:
            trainer.notes.append(_generate(trainer))
        else:
            whole = deepspeed.zero.GatheredParameters(list(trainer.module.parameters()))
            with whole if trainer.run.sharding.s_p > 1 else nullcontext():
                before = len(trainer.engine.amsp.comm.running)
                trainer.notes.append(_generate(trainer))
                assert len(trainer.engine.amsp.comm.running) == before, "generation needs no collective"
        trainer.train()


@short_spread
def test_generation_between_steps_with_different_lengths(sharding: Sharding) -> None:
    """Ranks go through different numbers of forwards, so a single collective there would hang."""
    run = Run(sharding, m.Plain, loop=_generating, adversarial=sharding is UNEQUAL)
    held, want = on_ranks(run, timeout=40), reference(run)
    assert_matches(held, want)
    assert held[0].notes == pytest.approx(want.notes, rel=1e-5)


# ---- exceptions --------------------------------------------------------------------------------------------


class Fragile(m.Base):
    """Fails in the middle of a forward or of a backward when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(m.WIDTH, m.WIDTH)
        self.fails = ""

    def middle(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.inner(hidden))
        if self.fails == "forward":
            raise KeyError("forward")
        return Failing.apply(hidden, self.fails)


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, fails: str) -> torch.Tensor:
        ctx.fails = fails
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        if ctx.fails == "backward":
            raise KeyError("backward")
        return gradient, None


def _failing_forward(trainer: Any) -> None:
    _with_failures(trainer, "forward")


def _failing_backward(trainer: Any) -> None:
    _with_failures(trainer, "backward")


def _with_failures(trainer: Any, where: str) -> None:
    """A failure before every micro-batch. After one in backward the window starts again, with zero_grad."""
    run = trainer.run
    for step in range(run.steps):
        for attempt in range(2):
            for micro in range(run.micro_batches):
                if attempt == 0 and trainer.engine is not None and (where == "forward" or micro == 0):
                    _fail(trainer, where, trainer.rows(step, 80 + micro))
                if attempt == 1:
                    rows = trainer.rows(step, micro)
                    loss = loss_of(trainer(rows), rows)
                    trainer.losses.append(loss.item())
                    trainer.backward(loss)
                    trainer.step()


def _fail(trainer: Any, where: str, rows: torch.Tensor) -> None:
    trainer.module.fails = where
    with pytest.raises(KeyError, match=where):
        trainer.backward(loss_of(trainer(rows), rows))
    trainer.module.fails = ""
    if where == "backward":
        trainer.engine.optimizer.zero_grad()


@short_spread
@pytest.mark.parametrize("loop", [_failing_forward, _failing_backward], ids=lambda loop: loop.__name__.strip("_"))
def test_training_goes_on_after_an_exception(sharding: Sharding, loop: Callable[..., None]) -> None:
    assert_parity(Run(sharding, Fragile, loop=loop, micro_batches=2))


# ---- windows -----------------------------------------------------------------------------------------------

WINDOWS = (3, 2, 1)


def _windows(trainer: Any) -> None:
    """Windows of 3, 2 and 1 micro-batches, scaled by hand; the loop says when one is over."""
    managed = trainer.run.extra.get("managed_gradient_accumulation", True)
    for step, length in enumerate(WINDOWS):
        for micro in range(length):
            rows = trainer.rows(step, micro)
            loss = loss_of(trainer(rows), rows)
            trainer.losses.append(loss.item())
            if trainer.engine is not None and managed:
                trainer.engine.set_gradient_accumulation_boundary(micro + 1 == length)
            trainer.backward(loss / length)
        trainer.finish()


@short_spread
@pytest.mark.parametrize("managed", [True, False])
def test_windows_of_different_lengths(sharding: Sharding, managed: bool) -> None:
    """The last, partial window of an epoch is a window; with managed accumulation or without."""
    extra: dict[str, Any] = {} if managed else {"managed_gradient_accumulation": False}
    reduce = "two_level" if managed else "all_reduce"
    run = Run(
        sharding, m.Plain, loop=_windows, clip=0.3, extra=extra, zero={"overlap_comm": False}, reduce=reduce
    )  # fmt: skip
    assert_parity(run)


# ---- many steps --------------------------------------------------------------------------------------------


@over([LOCAL_STATES, UNEQUAL, MICS, MIXED, ZERO3])
def test_fifty_steps(sharding: Sharding) -> None:
    """The loss curve is the reference's, step by step, and the norm is never 0 or NaN."""
    publish = "all_gather" if sharding in (MICS, UNEQUAL) else "broadcast"
    held = assert_parity(Run(sharding, m.Plain, steps=50, clip=0.5, publish=publish), atol=2e-6)
    assert len(held[0].losses) == 50 and all(0 < norm < 10 for norm in held[0].norms)
    early, late = sum(held[0].losses[:10]), sum(held[0].losses[-10:])
    assert late < early, "the model learns"


@over([UNEQUAL, ZERO3])
def test_fifty_steps_in_bf16(sharding: Sharding) -> None:
    """The curve of plain data parallelism, up to what bf16 rounds (case I1)."""
    run = Run(sharding, m.Plain, steps=50, clip=0.5, dtype=torch.bfloat16)
    held, plain = on_ranks(run), on_ranks(run.but(sharding=DDP))
    for mine, other in zip(held, plain, strict=True):
        torch.testing.assert_close(mine.losses, other.losses, rtol=2e-2, atol=5e-3)
        assert all(0 < norm < 10 for norm in mine.norms)
