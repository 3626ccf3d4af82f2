"""Gradients: accumulation, several backwards before a step, no_sync, the norm, clipping, averaging."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from deepspeed_amsp.plan.factors import Sharding
from tests.semantics import modules as m
from tests.semantics.harness import (
    CUT,
    DDP,
    LOCAL_STATES,
    MIXED,
    UNEQUAL,
    WORLD,
    ZERO3,
    OnRank,
    Run,
    Trainer,
    assert_matches,
    assert_parity,
    label,
    loss_of,
    on_ranks,
    over,
    pair,
    plain_loop,
    reference,
    short_spread,
)

# ---- accumulation ------------------------------------------------------------------------------------------


def _same_rows_in_pieces(trainer: Trainer) -> None:
    """Every step sees the same four blocks of rows, in as many micro-batches as the run has."""
    per_micro = 4 // trainer.run.micro_batches
    for step in range(trainer.run.steps):
        blocks = [trainer.rows(step, block) for block in range(4)]
        for micro in range(trainer.run.micro_batches):
            rows = torch.cat(blocks[micro * per_micro : (micro + 1) * per_micro])
            loss = loss_of(trainer(rows), rows)
            trainer.losses.append(loss.item())
            trainer.backward(loss)
            trainer.step()


@short_spread
def test_accumulating_is_a_larger_batch(sharding: Sharding) -> None:
    """16 rows as 1, 2 or 4 micro-batches: one norm, one result."""
    run = Run(sharding, m.Plain, loop=_same_rows_in_pieces, optimizer="sgd", clip=0.2)
    want = reference(run)
    for micro_batches in (1, 2, 4):
        held = on_ranks(run.but(micro_batches=micro_batches))
        for mine in held:
            mine.losses = want.losses  # of parts of the batch; the whole is compared below
        assert_matches(held, want, norm_rtol=2e-6)


# ---- norm and clipping -------------------------------------------------------------------------------------


def _norms(trainer: Any) -> None:
    """The reported norm, before the first step, and after every one."""
    if trainer.engine is not None:
        trainer.notes.append(trainer.engine.get_global_grad_norm())
    plain_loop(trainer)


@short_spread
@pytest.mark.parametrize("model", [m.Tied, m.Adapted])
def test_the_norm_is_of_the_whole_gradient_before_clipping(sharding: Sharding, model: type[nn.Module]) -> None:
    """Every element counts once, whatever is replicated, cut, padded, tied or frozen. Clipping does not show."""
    clip = 1e-2
    held = assert_parity(
        Run(sharding, model, loop=_norms, micro_batches=2, optimizer="sgd", clip=clip, steps=4), norm_rtol=1e-6
    )
    for mine in held:
        assert mine.notes == [None], "there is no norm before the first step"
        assert min(mine.norms) > 3 * clip


def _summed(trainer: Any) -> None:
    """The same loop with the gradient of all ranks summed: the reference scales it up from the mean."""
    for step in range(trainer.run.steps):
        rows = trainer.rows(step, 0)
        loss = loss_of(trainer(rows), rows)
        trainer.losses.append(loss.item())
        trainer.backward(loss * WORLD if trainer.engine is None else loss)
        trainer.step()


@over([LOCAL_STATES, UNEQUAL])
@pytest.mark.parametrize("reduce", ["two_level", "all_reduce"])
def test_gradients_can_be_summed(sharding: Sharding, reduce: str) -> None:
    """DeepSpeed itself refuses this next to stage 3."""
    extra = {"gradient_allreduce_op": "sum"}
    assert_parity(Run(sharding, m.Plain, loop=_summed, optimizer="sgd", clip=0.5, reduce=reduce, extra=extra))


@pair
@pytest.mark.parametrize(
    "extra",
    [{"prescale_gradients": True}, {"gradient_predivide_factor": 2.0}],
    ids=lambda extra: next(iter(extra)),
)
def test_scaling_before_the_reduction_changes_nothing_in_fp32(sharding: Sharding, extra: dict[str, Any]) -> None:
    assert_parity(Run(sharding, m.Plain, optimizer="sgd", clip=0.2, extra=extra))


# ---- several forwards, several backwards -------------------------------------------------------------------


def _two_forwards_one_backward(trainer: Trainer) -> None:
    run = trainer.run
    for step in range(run.steps):
        for micro in range(run.micro_batches):
            one, other = trainer.rows(step, micro), trainer.rows(step, 50 + micro)
            loss = loss_of(trainer(one), one) + 0.5 * loss_of(trainer(other), other)
            trainer.losses.append(loss.item())
            trainer.backward(loss)
            trainer.step()


def _two_backwards_one_step(trainer: Trainer) -> None:
    run = trainer.run
    for step in range(run.steps):
        for micro in range(run.micro_batches):
            for part in (micro, 50 + micro):
                rows = trainer.rows(step, part)
                loss = loss_of(trainer(rows), rows)
                trainer.losses.append(loss.item())
                trainer.backward(loss)
            trainer.step()


def _two_forwards_two_backwards(trainer: Trainer) -> None:
    """Both forwards first; the backwards in the other order."""
    run = trainer.run
    for step in range(run.steps):
        for micro in range(run.micro_batches):
            parts = [trainer.rows(step, part) for part in (micro, 50 + micro)]
            losses = [loss_of(trainer(rows), rows) for rows in parts]
            trainer.losses.append(losses[0].item() + losses[1].item())
            for loss in reversed(losses):
                trainer.backward(loss)
            trainer.step()


def _one_graph_two_backwards(trainer: Trainer) -> None:
    """Two losses of one output: the graph is kept for the second."""
    run = trainer.run
    for step in range(run.steps):
        for micro in range(run.micro_batches):
            rows = trainer.rows(step, micro)
            output = trainer(rows)
            first, second = loss_of(output, rows), output.float().square().mean()
            trainer.losses.append(first.item())
            trainer.backward(first, retain_graph=True)
            trainer.backward(second)
            trainer.step()


def _gradient_of_the_output(trainer: Any) -> None:
    """output.backward(gradient), as pipelines and losses outside autograd do."""
    run = trainer.run
    for step in range(run.steps):
        for micro in range(run.micro_batches):
            rows = trainer.rows(step, micro)
            output = trainer(rows)
            free = output.detach().requires_grad_()
            loss = loss_of(free, rows)
            trainer.losses.append(loss.item())
            (gradient,) = torch.autograd.grad(loss, free)
            output.backward(gradient / run.micro_batches if trainer.engine is None else gradient)
            trainer.step()


SEVERAL = [
    _two_forwards_one_backward, _two_backwards_one_step, _two_forwards_two_backwards, _one_graph_two_backwards,
    _gradient_of_the_output,
]  # fmt: skip


@pytest.mark.parametrize(
    ("sharding", "micro_batches"),
    [(LOCAL_STATES, 1), (UNEQUAL, 2), (MIXED, 2), (ZERO3, 1)],
    ids=lambda value: label(value) if isinstance(value, Sharding) else str(value),
)
@pytest.mark.parametrize("loop", SEVERAL, ids=lambda loop: loop.__name__.strip("_"))
def test_several_forwards_and_backwards(sharding: Sharding, loop: Callable[..., None], micro_batches: int) -> None:
    """What is not stepped yet accumulates, at every stage (DeepSpeed's stage 1 drops the first loss)."""
    reduce = "two_level" if micro_batches == 1 else "all_reduce"
    assert_parity(Run(sharding, m.Plain, loop=loop, micro_batches=micro_batches, clip=0.3, reduce=reduce))


@over([LOCAL_STATES, MIXED])
@pytest.mark.parametrize("model", [m.Reused, m.Sometimes, m.Tied])
def test_two_backwards_of_models_with_shared_and_unused_parts(sharding: Sharding, model: type[nn.Module]) -> None:
    assert_parity(Run(sharding, model, loop=_two_backwards_one_step, micro_batches=2, adversarial=True))


# ---- no_sync -----------------------------------------------------------------------------------------------


def _no_sync(trainer: Any) -> None:
    """Windows of three, scaled by hand, all but the last backward inside no_sync. Traffic is noted."""
    for step in range(trainer.run.steps):
        for micro in range(3):
            with trainer.no_sync() if micro < 2 else nullcontext():
                _forward_backward(trainer, trainer.rows(step, micro), 1 / 3)
            if trainer.engine is not None and micro < 2:
                running = [entry.purpose.value for entry in trainer.engine.amsp.comm.running]
                trainer.notes += [purpose for purpose in running if purpose != "setup"]
        trainer.finish()


def _forward_backward(trainer: Trainer, rows: torch.Tensor, scale: float = 1.0) -> None:
    loss = loss_of(trainer(rows), rows)
    trainer.losses.append(loss.item())
    trainer.backward(loss * scale)


def _accelerate(trainer: Any) -> None:
    """Accelerate's accumulate(): no_sync where it may, the boundary set by hand, a step after the last backward."""
    run = trainer.run
    for step in range(run.steps):
        for micro in range(run.micro_batches):
            last = micro + 1 == run.micro_batches
            engine = trainer.engine
            if engine is not None:
                engine.set_gradient_accumulation_boundary(is_boundary=last)
            may_defer = engine is not None and not engine.zero_optimization_partition_gradients()
            with trainer.no_sync() if may_defer and not last else nullcontext():
                _forward_backward(trainer, trainer.rows(step, micro))
        trainer.finish()


@over([DDP, LOCAL_STATES])
@pytest.mark.parametrize("model", [m.Plain, m.Sometimes])
def test_no_sync_defers_all_traffic(sharding: Sharding, model: type[nn.Module]) -> None:
    held = assert_parity(Run(sharding, model, loop=_no_sync, clip=0.3))
    for mine in held:
        assert mine.notes == [], "nothing is sent inside no_sync"


@short_spread
def test_accelerates_loop(sharding: Sharding) -> None:
    assert_parity(Run(sharding, m.Plain, loop=_accelerate, micro_batches=3, clip=0.3))


def _refused_no_sync(trainer: OnRank) -> None:
    with pytest.raises(RuntimeError, match="gradient_accumulation_steps"), trainer.no_sync():
        pass
    plain_loop(trainer)


@over([UNEQUAL, *CUT])
def test_no_sync_is_refused_where_gradients_are_sharded(sharding: Sharding) -> None:
    """With a message that says what to do; and training goes on afterwards."""
    run = Run(sharding, m.Plain, loop=_refused_no_sync)
    assert_matches(on_ranks(run), reference(run.but(loop=plain_loop)))
