"""A model that is changed after its engine was made: refused by name on every rank, never half trained (B12)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from deepspeed_amsp.plan.factors import Sharding
from tests.semantics import modules as m
from tests.semantics.harness import (
    Run,
    Trainer,
    assert_parity,
    loss_of,
    on_ranks,
    one_step,
    pair,
    plain_loop,
    reference,
    trio,
)

Change = Callable[[Any], None]


def _swap_module(model: Any) -> None:
    model.inner = nn.Linear(m.WIDTH, m.WIDTH)


def _swap_parameter(model: Any) -> None:
    model.inner.weight = nn.Parameter(torch.zeros(m.WIDTH, m.WIDTH))


def _add_adapter(model: Any) -> None:
    model.inner.lora_a = nn.Linear(m.WIDTH, 2, bias=False)


def _take_out(model: Any) -> None:
    model.norm = nn.Identity()


CHANGES: dict[str, tuple[Change, list[str]]] = {
    "swap_module": (_swap_module, ["inner.bias, inner.weight came", "inner.bias, inner.weight went"]),
    "swap_parameter": (_swap_parameter, ["inner.weight came", "inner.weight went"]),
    "add_adapter": (_add_adapter, ["inner.lora_a.weight came"]),
    "take_out": (_take_out, ["norm.bias, norm.weight went"]),
}


def _changed_between_steps(trainer: Any) -> None:
    plain_loop(trainer)
    CHANGES[trainer.run.extra["comment"]][0](trainer.module)
    trainer(trainer.rows(3, 0))


def _changed_before_the_step(trainer: Any) -> None:
    rows = trainer.rows(0, 0)
    trainer.backward(loss_of(trainer(rows), rows))
    CHANGES[trainer.run.extra["comment"]][0](trainer.module)
    trainer.step()


@pair
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("loop", [_changed_between_steps, _changed_before_the_step])
def test_surgery_after_initialize_is_refused(sharding: Sharding, change: str, loop: Callable[[Any], None]) -> None:
    # DeepSpeed leaves top-level keys that it does not know alone, so the case's name can travel in one.
    errors = on_ranks(
        Run(sharding, m.Plain, loop=loop, extra={"comment": change}), return_exceptions=True, timeout=30
    )  # fmt: skip
    for error in errors:
        assert "ModelChanged" in repr(error) or "the model was changed" in str(error), error
        for words in CHANGES[change][1]:
            assert words in str(error), error
        assert "before deepspeed.initialize" in str(error)


def _grown(trainer: Any) -> None:
    """One row more than the engine knows of, by the back door."""
    trainer.module.inner.bias.data = torch.zeros(m.WIDTH + 1)
    trainer.module.inner.weight.data = torch.zeros(m.WIDTH + 1, m.WIDTH)
    rows = trainer.rows(0, 0)
    trainer.backward(trainer.module.inner(torch.ones(1, m.WIDTH)).sum() + 0 * rows.sum())


@pytest.mark.parametrize("sharding", [pytest.param(s, id=str(s)) for s in pair.args[1] if s.s_p == 1])
def test_a_parameter_that_changes_its_shape_is_refused(sharding: Sharding) -> None:
    errors = on_ranks(Run(sharding, m.Plain, loop=_grown), return_exceptions=True, timeout=30)
    for error in errors:
        assert "inner." in str(error) and f"({m.WIDTH + 1}," in str(error), error


def _harmless(trainer: Trainer) -> None:
    """Other modules around the same parameters, and modules without any, are the user's business."""
    plain_loop(trainer)
    module: Any = trainer.module
    module.norm, module.extra = nn.Sequential(module.norm), nn.Dropout(0.0)
    module.norm = module.norm[0]
    plain_loop(trainer)


@trio
def test_surgery_that_moves_no_parameter_is_none(sharding: Sharding) -> None:
    assert_parity(Run(sharding, m.Plain, loop=_harmless))


def _freeze_inner(model: Any) -> None:
    model.inner.requires_grad_(False)


def _thaw(trainer: Any) -> None:
    plain_loop(trainer)
    trainer.module.inner.requires_grad_(True)
    trainer(trainer.rows(0, 0))


@pair
def test_thawing_what_has_no_optimizer_state_is_refused(sharding: Sharding) -> None:
    run = Run(sharding, m.Plain, loop=_thaw, prepare=_freeze_inner)
    for error in on_ranks(run, return_exceptions=True, timeout=30):
        assert "inner.weight, inner.bias had requires_grad=False" in str(error), error


def _add_group(trainer: Any) -> None:
    plain_loop(trainer)
    trainer.engine.optimizer.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    plain_loop(trainer)


@pair
def test_a_param_group_added_later_is_refused(sharding: Sharding) -> None:
    for error in on_ranks(Run(sharding, m.Plain, loop=_add_group), return_exceptions=True, timeout=30):
        assert "had 2 param_groups when the engine was made and has 3 now" in str(error), error


class Renormed(m.Base):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(3, m.WIDTH, max_norm=1.0)

    def middle(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return hidden + self.table(m.branch_of(rows))


@pair
def test_a_weight_that_its_own_forward_rewrites_is_refused(sharding: Sharding) -> None:
    for error in on_ranks(Run(sharding, Renormed), return_exceptions=True, timeout=30):
        assert "table has max_norm" in str(error), error


def _functional(trainer: Trainer) -> None:
    """torch.func.functional_call puts other tensors into the module for the time of a call."""
    for step in range(trainer.run.steps):
        one_step(trainer, step)
        scaled = {name: value.detach() * 1.1 for name, value in trainer.module.named_parameters()}
        found = torch.func.functional_call(trainer.module, scaled, (trainer.rows(0, 0),))
        trainer.notes.append(found.double().square().mean().item())


@pytest.mark.parametrize("sharding", [pytest.param(s, id=str(s)) for s in trio.args[1] if s.s_p == 1])
def test_functional_call_is_no_surgery(sharding: Sharding) -> None:
    run = Run(sharding, m.Plain, loop=_functional)
    held = assert_parity(run)
    mean = torch.tensor([mine.notes for mine in held], dtype=torch.float64).mean(dim=0)
    torch.testing.assert_close(mean, torch.tensor(reference(run).notes, dtype=torch.float64), rtol=1e-5, atol=1e-6)
