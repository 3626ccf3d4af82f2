"""Frozen parameters: sharded and gathered like the others, and nothing else. LoRA, frozen towers, tied heads."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from deepspeed_amsp.plan.factors import Sharding
from tests.semantics import modules as m
from tests.semantics.harness import (
    CUT,
    OnRank,
    Run,
    Trainer,
    assert_matches,
    assert_parity,
    loss_of,
    on_ranks,
    over,
    reference,
    same,
    trio,
)


def _traffic(trainer: OnRank) -> dict[str, Any]:
    sent: dict[str, int] = {}
    for entry in trainer.engine.amsp.comm.last_step:
        sent[entry.purpose.value] = sent.get(entry.purpose.value, 0) + entry.bytes
    frozen = [param for param in trainer.module.parameters() if not param.requires_grad]
    masters = {id(master.value) for master in trainer.engine.optimizer.states.all_masters()}
    return {
        "sent": sent,
        "frozen_at_rest": sum(param.numel() for param in frozen),
        "frozen_gradients": sum(param.grad is not None for param in frozen),
        "foreign_states": sum(id(param) not in masters for param in trainer.engine.optimizer.state),
    }


@trio
@pytest.mark.parametrize("model", [m.Adapted, m.OnlyEmbeddings])
def test_frozen_parameters(sharding: Sharding, model: type[nn.Module]) -> None:
    """They are gathered and sharded, and that is all: no gradient, master or state, and no traffic but gathers."""
    run = Run(sharding, model, micro_batches=2, clip=0.05, observe=_traffic)
    held = assert_parity(run)
    torch.manual_seed(7)
    start = model()
    frozen = {name: param for name, param in start.named_parameters() if not param.requires_grad}
    trained = sum(param.numel() for param in start.parameters() if param.requires_grad)
    for mine in held:
        for name, value in frozen.items():
            assert same(mine.parameters[name], value.detach()), f"{name} moved"
        assert not {piece[0] for piece in mine.masters} & frozen.keys()
        assert mine.seen["frozen_gradients"] == mine.seen["foreign_states"] == 0
        assert (mine.seen["frozen_at_rest"] == 0) == (sharding.s_p > 1)
        # Two micro-batches, up to two stages, and padding up to the wire's alignment: the frozen part would not fit.
        reduced = sum(mine.seen["sent"].get(purpose, 0) for purpose in ("param_reduce", "grad_reduce"))
        assert reduced <= 4 * 4 * (trained + 64 * 7)
        assert mine.seen["sent"].get("publish", 0) <= 4 * (trained + 64)


class FrozenTied(m.Base):
    """A frozen input projection whose weight is read again, as the head, by the model itself: LoRA's usual shape."""

    def __init__(self) -> None:
        super().__init__()
        self.first.requires_grad_(False)
        self.inner = nn.Linear(m.WIDTH, m.WIDTH)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.inner(torch.tanh(self.first(m.features(rows)))))
        return F.linear(hidden, self.first.weight.t(), self.last.bias)


class TrainedTied(FrozenTied):
    """The same with a trained weight, for units that are kept for the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first.requires_grad_(True)


def _looking_before_backward(trainer: Trainer) -> None:
    """Evaluations between forward and backward gather and free the same units."""
    for step in range(trainer.run.steps):
        rows = trainer.rows(step, 0)
        loss = loss_of(trainer(rows), rows)
        trainer.losses.append(loss.item())
        for mode in (nullcontext, torch.inference_mode, torch.no_grad):
            with mode():
                trainer.notes.append(loss_of(trainer(rows), rows).item())
        trainer.backward(loss)
        trainer.step()


@trio
@pytest.mark.parametrize(("model", "keep"), [(FrozenTied, "none"), (TrainedTied, "none"), (TrainedTied, "all")])
def test_a_weight_that_the_model_reads_again(sharding: Sharding, model: type[nn.Module], keep: str) -> None:
    """The unit is still there, or there again, when the backward of the second use needs it."""
    run = Run(sharding, model, loop=_looking_before_backward, amsp={"keep_after_forward": keep})
    held, want = on_ranks(run), reference(run)
    assert_matches(held, want)
    for mine in held:
        assert mine.notes == [loss for loss in mine.losses for _ in range(3)]


class Tower(m.Base):
    """A frozen tower in front: its outputs need no gradient, so no backward will ever use it."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Sequential(*(nn.Linear(m.FEATURES, m.FEATURES) for _ in range(4))).requires_grad_(False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(self.tower(m.features(rows)))))


def _whole_after_forward(trainer: Any) -> None:
    """Notes the frozen parameters that are whole between forward and backward."""
    for step in range(trainer.run.steps):
        rows = trainer.rows(step, 0)
        loss = loss_of(trainer(rows), rows)
        trainer.losses.append(loss.item())
        if trainer.engine is not None:
            trainer.notes += [
                name for name, param in trainer.module.named_parameters() if not param.requires_grad and param.numel()
            ]
        trainer.backward(loss)
        trainer.step()


@over(CUT)
@pytest.mark.parametrize("model", [Tower, m.Adapted])
def test_frozen_parts_are_freed_after_their_forward(sharding: Sharding, model: type[nn.Module]) -> None:
    """With a frozen tower of some billion parameters it matters."""
    for mine in assert_parity(Run(sharding, model, loop=_whole_after_forward)):
        assert mine.notes == []
