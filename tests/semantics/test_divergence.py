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
from tests.semantics.harness import MIXED, ZERO3, Held, Run, job, loss_of, over, plain_loop
from tests.support.pool import RankError, WorkerPool

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


def _ends(workers: WorkerPool, run: Run) -> str:
    """What all ranks say: every one fails by itself within the groups' timeout, and some seconds for the rest.

    gloo aborts a rank that receives a message of another size than it expects; then the others' errors count.
    """
    start = time.monotonic()
    try:
        results = workers.run(_impatient, run, timeout=40, return_exceptions=True)
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
