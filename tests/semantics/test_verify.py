"""amsp.verify_every: replicas are compared, and a difference stops all ranks with the tensor's name."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from deepspeed_amsp.plan.factors import Sharding
from tests.semantics import modules as m
from tests.semantics.harness import (
    DDP,
    LOCAL_STATES,
    MICS,
    MIXED,
    UNEQUAL,
    ZERO3,
    Run,
    assert_matches,
    label,
    loss_of,
    on_ranks,
    one_step,
    over,
    plain_loop,
    reference,
    spread,
)


def _checks(trainer: Any) -> None:
    """Notes per step whether anything was sent that a run without verifying does not send."""
    for step in range(trainer.run.steps):
        one_step(trainer, step)
        if trainer.engine is not None:
            trainer.notes.append(sum("checksum" in entry.label for entry in trainer.engine.amsp.comm.last_step))


@spread
def test_equal_replicas_pass_and_are_compared_every_n_steps(sharding: Sharding) -> None:
    run = Run(sharding, m.Tied, loop=_checks, steps=7, amsp={"verify_every": 3}, adversarial=True)
    held = on_ranks(run)
    assert_matches(held, reference(run))
    replicas = 4 // sharding.s_p
    for mine in held:
        assert sum(mine.notes) == (2 if replicas > 1 else 0)


def test_nothing_is_compared_unless_asked_for() -> None:
    assert not any(sum(mine.notes) for mine in on_ranks(Run(UNEQUAL, m.Tied, loop=_checks)))


def _change_a_working_copy(trainer: Any, name: str, rank: int) -> None:
    """Adds 1e-3 to the first element of a parameter, in this rank's working copy only."""
    if dist.get_rank() != rank:
        return
    trainer.engine.optimizer.wait_for_parameters()
    for unit in trainer.engine.amsp.units:
        for spec in unit.layout.params:
            if spec.name == name and unit.sharded:
                assert unit.layout.offsets[unit.layout.params.index(spec)] == 0
                unit.shard[0] += 1e-3
            elif spec.name == name:
                dict(trainer.module.named_parameters())[name].data.view(-1)[0] += 1e-3


def _planted(trainer: Any) -> None:
    """The difference is planted after the second step, and is gone with the publish of the third."""
    for step in range(trainer.run.steps):
        rows = trainer.rows(step, 0)
        trainer.backward(loss_of(trainer(rows), rows))
        if step == 2:
            _change_a_working_copy(trainer, "inner.weight", 2)
        trainer.step()


@over([DDP, LOCAL_STATES, UNEQUAL, MICS, MIXED])
def test_a_changed_working_copy_stops_all_ranks(sharding: Sharding) -> None:
    errors = on_ranks(Run(sharding, m.Plain, loop=_planted, amsp={"verify_every": 1}), return_exceptions=True)
    for error in errors:
        assert isinstance(error, Exception) and "inner.weight" in str(error), error
        assert "inner.bias" not in str(error) and "first" not in str(error), "only what differs is named"


def _planted_for_good(trainer: Any) -> None:
    """A frozen parameter is never published again, so the difference stays until somebody looks."""
    for step in range(trainer.run.steps):
        rows = trainer.rows(step, 0)
        trainer.backward(loss_of(trainer(rows), rows))
        if step == 1:
            _change_a_working_copy(trainer, "backbone.1.weight", 2)
        try:
            trainer.step()
        except Exception as error:
            error.args = (f"step {step}: {error}",)
            raise


@pytest.mark.parametrize("sharding", [UNEQUAL, MIXED], ids=label)
def test_the_check_comes_within_n_steps(sharding: Sharding) -> None:
    run = Run(sharding, m.Adapted, loop=_planted_for_good, steps=8, amsp={"verify_every": 3})
    for error in on_ranks(run, return_exceptions=True):
        assert isinstance(error, Exception) and "backbone.1.weight" in str(error), error
        assert any(f"step {step}:" in str(error) for step in (1, 2, 3, 4)), error


def _planted_master(trainer: Any) -> None:
    """One replica's owner has another master: its copies differ from the next publish on."""
    for step in range(trainer.run.steps):
        rows = trainer.rows(step, 0)
        trainer.backward(loss_of(trainer(rows), rows))
        if step == 1 and dist.get_rank() in (2, 3):
            for master in trainer.engine.optimizer.states.all_masters():
                if master.slot.piece.param.name == "last.weight":
                    master.value.data.view(-1)[0] += 1e-3
        trainer.step()


@over([LOCAL_STATES, MICS])
def test_a_master_that_differs_between_replicas_is_found(sharding: Sharding) -> None:
    run = Run(sharding, m.Plain, loop=_planted_master, steps=4, amsp={"verify_every": 1})
    for error in on_ranks(run, return_exceptions=True):
        assert isinstance(error, Exception) and "last.weight" in str(error), error


@over([ZERO3])
def test_without_replicas_there_is_nothing_to_compare(sharding: Sharding) -> None:
    run = Run(sharding, m.Plain, amsp={"verify_every": 1})
    assert_matches(on_ranks(run), reference(run.but(loop=plain_loop)))
