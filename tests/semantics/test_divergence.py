"""Ranks that run different modules under s_p > 1: the run ends soon, with the unit's name and the ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from deepspeed_amsp.plan.factors import Sharding
from tests.semantics import modules as m
from tests.semantics.harness import (
    MICS,
    MIXED,
    UNEQUAL,
    ZERO3,
    Held,
    Run,
    assert_matches,
    assert_parity,
    job,
    loss_of,
    one_step,
    over,
    plain_loop,
    reference,
)
from tests.support.pool import RankError, WorkerPool, pool

TIMEOUT_S = 3


def _impatient(run: Run) -> Held:
    """The groups of the engine give up after TIMEOUT_S, as init_distributed(timeout=...) would have them do."""
    with mock.patch("deepspeed_amsp.mesh._default_timeout", return_value=timedelta(seconds=TIMEOUT_S)):
        return job(run)


class ByRank(m.Routed):
    """Every rank calls another expert, and nobody has marked the mixture as a leaf module."""

    def middle(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        branch = torch.full((len(rows),), dist.get_rank() % 3)
        return hidden + self.mixture(hidden, branch)


def _ends(workers: WorkerPool, run: Run, impatient: Callable[[Run], Held] = _impatient) -> str:
    """What all ranks say: every one fails by itself within the groups' timeout, and some seconds for the rest.

    gloo aborts a rank that receives a message of another size than it expects; then the others' errors count.
    """
    start = time.monotonic()
    try:
        results = workers.run(impatient, run, timeout=40, return_exceptions=True)
    except RankError as error:
        results = [error]
    assert time.monotonic() - start < 3 * TIMEOUT_S + 5
    assert all(isinstance(result, Exception) for result in results), results
    assert all(getattr(result, "type_name", "") != "hung" for result in results), results
    return "\n".join(str(result) for result in results)


@over([MIXED, ZERO3])
def test_a_branch_that_differs_by_rank(sharding: Sharding, fresh_pool: Callable[[int], WorkerPool]) -> None:
    text = _ends(fresh_pool(4), Run(sharding, ByRank))
    assert "mixture.experts." in text, text
    assert "rank" in text and "leaf" in text, "what to do about it"


class Skipping(m.Plain):
    """One rank leaves a module out, so it makes one gather less than the others."""

    def middle(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return hidden if dist.get_rank() == 1 else super().middle(hidden, rows)


@over([ZERO3])
def test_a_module_that_one_rank_leaves_out(sharding: Sharding, fresh_pool: Callable[[int], WorkerPool]) -> None:
    text = _ends(fresh_pool(4), Run(sharding, Skipping))
    assert "inner" in text or "norm" in text, text
    assert "rank" in text


def _different_lengths(trainer: Any) -> None:
    """Generation without GatheredParameters: rank r goes through r + 1 forwards. Then training."""
    rows = trainer.rows(0, 0)
    with torch.no_grad():
        for _ in range(1 + dist.get_rank()):
            trainer(rows)
    plain_loop(trainer)


@over([ZERO3])
def test_generation_of_different_lengths_without_gathering_first(
    sharding: Sharding, fresh_pool: Callable[[int], WorkerPool]
) -> None:
    run = Run(sharding, m.Plain, loop=_different_lengths)
    text = _ends(fresh_pool(4), run)
    assert "rank" in text and any(name in text for name in ("first", "norm", "inner", "last")), text


def _one_backward_less(trainer: Any) -> None:
    """Rank 0 leaves out the backward of step 1."""
    for step in range(3):
        rows = trainer.rows(step, 0)
        loss = loss_of(trainer(rows), rows)
        if dist.get_rank() != 0 or step != 1:
            trainer.backward(loss)
        trainer.step()


@pytest.mark.parametrize("sharding", [ZERO3], ids=["zero3"])
def test_a_backward_that_one_rank_leaves_out(sharding: Sharding, fresh_pool: Callable[[int], WorkerPool]) -> None:
    text = _ends(fresh_pool(4), Run(sharding, m.Plain, loop=_one_backward_less))
    assert "rank" in text


def _one_batch_less(trainer: Any) -> None:
    """Rank 0 has no batch for step 2, and waits; the others cannot end that step without it (case H5)."""
    for step in range(3):
        if dist.get_rank() == 0 and step == 2:
            time.sleep(TIMEOUT_S + 1)
            raise RuntimeError("rank 0 had fewer batches")
        one_step(trainer, step)


def _one_raises(trainer: Any) -> None:
    """Rank 0 fails in step 1 (case H6)."""
    one_step(trainer, 0)
    if dist.get_rank() == 0:
        raise ZeroDivisionError("the first cause")
    one_step(trainer, 1)


@pytest.mark.parametrize(
    ("loop", "sharding", "cause"),
    [(_one_batch_less, UNEQUAL, "rank 0 had fewer batches"), (_one_raises, ZERO3, "the first cause")],
    ids=["a batch less, whole parameters", "a rank raises, sharded parameters"],
)
def test_the_others_of_a_rank_that_stops_end_soon(
    loop: Callable[[Any], None], sharding: Sharding, cause: str, fresh_pool: Callable[[int], WorkerPool]
) -> None:
    """They name what they waited for, and the first cause is said once."""
    text = _ends(fresh_pool(4), Run(sharding, m.Plain, loop=loop))
    assert text.count(cause) == 1
    assert "did not complete" in text and "over ranks [" in text and "the same number of batches" in text


def _groups_evaluate_differently(trainer: Any) -> None:
    """Group g, ranks 2g and 2g + 1, looks at g + 1 batches between the steps."""
    for step in range(trainer.run.steps):
        if trainer.engine is not None:
            with torch.no_grad():
                for _ in range(1 + dist.get_rank() // 2):
                    trainer(trainer.rows(9, 0))
        rows = trainer.rows(step, 0)
        loss = loss_of(trainer(rows), rows)
        trainer.losses.append(loss.item())
        trainer.backward(loss)
        trainer.step()


@over([MICS, MIXED])
def test_param_groups_may_differ_from_each_other(sharding: Sharding) -> None:
    """Experts (`harness.batch` chooses by pairs of ranks) and lengths of evaluations differ between groups only."""
    assert_parity(Run(sharding, m.Routed, loop=_groups_evaluate_differently))


def _long_evaluation(trainer: Any) -> None:
    """Notes the length of the logs during an evaluation that is longer than they may be."""
    from deepspeed_amsp import comm
    from deepspeed_amsp.schedule import agreement

    engine = trainer.engine
    with torch.no_grad():
        for _ in range(40):
            trainer(trainer.rows(0, 0))
    trainer.notes += [len(engine.amsp.comm.running), len(engine.optimizer._agreement._order)]
    assert trainer.notes == [comm.RUNNING_LOG, agreement.REMEMBERED]
    plain_loop(trainer)


def _short_memory(run: Run) -> Held:
    with (
        mock.patch("deepspeed_amsp.comm.RUNNING_LOG", 50),
        mock.patch("deepspeed_amsp.schedule.agreement.REMEMBERED", 30),
    ):
        return job(run)


@over([ZERO3])
def test_logs_do_not_grow_while_nobody_steps(sharding: Sharding) -> None:
    held = pool(4).run(_short_memory, Run(sharding, m.Plain, loop=_long_evaluation))
    for mine in held:
        assert mine.notes == [50, 30]
    want = reference(Run(sharding, m.Plain))
    for mine in held:
        mine.notes.clear()
    assert_matches(held, want)


def _apart_after_a_long_evaluation(trainer: Any) -> None:
    """More equal actions than are remembered, then a backward that one rank leaves out."""
    with torch.no_grad():
        for _ in range(20):
            trainer(trainer.rows(0, 0))
    _one_backward_less(trainer)


def _impatient_and_forgetful(run: Run) -> Held:
    with mock.patch("deepspeed_amsp.schedule.agreement.REMEMBERED", 30):
        return _impatient(run)


@over([ZERO3])
def test_divergence_is_named_after_a_long_evaluation(
    sharding: Sharding, fresh_pool: Callable[[int], WorkerPool]
) -> None:
    run = Run(sharding, m.Plain, loop=_apart_after_a_long_evaluation)
    text = _ends(fresh_pool(4), run, _impatient_and_forgetful)
    assert "rank" in text


class Swapped(m.Base):
    """Two modules of one size; rank 1 takes them the other way round in step 0."""

    def __init__(self) -> None:
        super().__init__()
        self.one = torch.nn.Linear(m.WIDTH, m.WIDTH)
        self.two = torch.nn.Linear(m.WIDTH, m.WIDTH)

    def middle(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        both = [self.one, self.two]
        if dist.get_rank() == 1 and m.step_of(rows) == 0:
            both.reverse()
        return both[1](both[0](hidden))


class _Copied:
    """`LateRead` without an accelerator: the values are there at once on some ranks only, if anybody asks."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._values = tensor.tolist()
        self.ready = dist.get_rank() == 1

    def values(self) -> list[float]:
        return list(self._values)


def _steps_until_divergence(trainer: Any) -> None:
    from deepspeed_amsp.schedule.agreement import DivergenceError

    for step in range(5):
        rows = trainer.rows(step, 0)
        trainer.backward(loss_of(trainer(rows), rows))
        try:
            trainer.step()
        except DivergenceError as error:
            trainer.notes += [step, str(error)]
            return


def _as_on_an_accelerator(run: Run) -> Held:
    with (
        mock.patch("deepspeed_amsp.optimizer.waits_on_host", return_value=False),
        mock.patch("deepspeed_amsp.schedule.agreement.LateRead", _Copied),
        # Rank 0 reads what the others used, for one of its own parameters had no gradient here.
        mock.patch("deepspeed_amsp.schedule.agreement.Agreement.must_read", return_value=dist.get_rank() == 0),
    ):
        return job(run)


@over([MICS, ZERO3])
def test_where_the_host_does_not_wait_all_ranks_find_it_in_the_same_step(sharding: Sharding) -> None:
    """The orders of step 0 are compared in step 2, also by a rank that reads what was used in step 0."""
    unchecked = {"bf16": {"enabled": True, "check_grad_overflow": False}}
    run = Run(sharding, Swapped, loop=_steps_until_divergence, dtype=torch.bfloat16, extra=unchecked)
    for mine in pool(4).run(_as_on_an_accelerator, run):
        step, text = mine.notes
        assert step == 2
        assert "one" in text and "two" in text and "rank" in text
