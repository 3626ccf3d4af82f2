"""Gradients that come after their bucket was sent, and windows that nothing was sent in."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from deepspeed_amsp.plan.factors import Sharding
from tests.semantics import modules as m
from tests.semantics.harness import (
    DDP,
    LOCAL_STATES,
    MICS,
    NIGHTLY,
    UNEQUAL,
    Run,
    assert_parity,
    loss_of,
    on_ranks,
    over,
)


class Repeated(nn.Module):
    """Ranks recompute a block once or twice, re-entrantly: the second backward of it finds its bucket sent.

    All matrices are of one size, so that collectives of different buckets could meet without an error.
    """

    def __init__(self) -> None:
        super().__init__()
        size = m.FEATURES
        self.first, self.block, self.inner, self.last = (nn.Linear(size, size, bias=False) for _ in range(4))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        # One sample of every rank's batch after the other, since in one process several ranks' branches meet.
        parts = []
        for sample, branch in zip(m.features(rows).split(1), m.branch_of(rows).tolist(), strict=True):
            hidden = torch.tanh(self.first(sample))
            for _ in range(1 + int(branch != 0)):
                hidden = hidden + torch.tanh(checkpoint(self.block, hidden, use_reentrant=True))
            parts.append(self.last(torch.tanh(self.inner(hidden))))
        return torch.cat(parts)


@over([DDP, LOCAL_STATES, UNEQUAL, MICS] if NIGHTLY else [UNEQUAL, MICS])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_ranks_may_recompute_a_block_differently_often(sharding: Sharding, micro_batches: int) -> None:
    """With s_p > 1 ranks of one param group take the same branch (see `harness.batch`), groups another."""
    assert_parity(Run(sharding, Repeated, bucket_bytes=144, micro_batches=micro_batches, clip=0.3))


def _bf16_unchecked(sharding: Sharding, **amsp: Any) -> Run:
    extra = {"bf16": {"enabled": True, "check_grad_overflow": False}}
    return Run(sharding, Repeated, bucket_bytes=72, dtype=torch.bfloat16, extra=extra, amsp=amsp)


def test_what_nobody_would_hear_of_is_refused() -> None:
    """Without overflow checking a step reads nothing, so no rank could tell the others that it has more to send."""
    errors = on_ranks(_bf16_unchecked(UNEQUAL), return_exceptions=True, timeout=60)
    said = [str(error) for error in errors if "after their bucket had been sent" in str(error)]
    assert said and all("use_reentrant=False" in text for text in said)
    assert all(isinstance(error, Exception) for error in errors)


def test_buckets_that_wait_for_the_end_of_backward_need_no_agreement() -> None:
    held = on_ranks(_bf16_unchecked(UNEQUAL, overlap={"all_reduce": False}))
    checked = on_ranks(_bf16_unchecked(UNEQUAL).but(extra={"bf16": {"enabled": True}}))
    for mine, other in zip(held, checked, strict=True):
        for name, value in mine.parameters.items():
            torch.testing.assert_close(value, other.parameters[name], rtol=2e-2, atol=1e-3)


def _nothing_but_no_sync(trainer: Any) -> None:
    for step in range(trainer.run.steps):
        for micro in range(2):
            rows = trainer.rows(step, micro)
            with trainer.no_sync() if step != 1 or micro == 0 else nullcontext():
                loss = loss_of(trainer(rows), rows)
                trainer.losses.append(loss.item())
                trainer.backward(loss)
        trainer.finish()


@over([DDP, LOCAL_STATES])
def test_a_window_inside_no_sync_is_reduced_by_the_step(sharding: Sharding) -> None:
    assert_parity(Run(sharding, m.Plain, loop=_nothing_but_no_sync, clip=0.3))
