"""Gathered copies never outlive the values that they were gathered from (s_p > 1)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.utils import safe_get_local_fp32_param, safe_set_full_fp32_param, safe_set_local_fp32_param

from deepspeed_amsp.plan.factors import Sharding
from tests.semantics import modules as m
from tests.semantics.harness import Run, assert_matches, assert_parity, few, loss_of, on_ranks, plain_loop, reference

# ---- a forward that ends early -----------------------------------------------------------------------------


class Shortcut(m.Plain):
    """In eval mode the model takes a shorter way, so that what was gathered for the long one is not used."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        if self.training:
            return super().forward(rows)
        return torch.tanh(self.first(m.features(rows)))


class Stop(Exception):
    """Raised to end a forward where its output is not wanted any more."""


def _shortcut(trainer: Any) -> None:
    trainer.train(False)
    with torch.no_grad():
        trainer(trainer.rows(70, 0))
    trainer.train()


def _stopped(trainer: Any, grad: bool) -> None:
    def stop(*_: Any) -> None:
        raise Stop

    handle = trainer.module.first.register_forward_hook(stop)
    with torch.set_grad_enabled(grad), pytest.raises(Stop):
        trainer(trainer.rows(70, 0))
    handle.remove()


def _full(trainer: Any) -> None:
    for number, param in enumerate(trainer.module.parameters()):
        value = torch.full(tuple(getattr(param, "ds_shape", param.shape)), 0.01 * (number + 1))
        if trainer.engine is None:
            param.data.copy_(value)
        else:
            safe_set_full_fp32_param(param, value)


def _local(trainer: Any) -> None:
    for param in trainer.module.parameters():
        if trainer.engine is None:
            param.data.mul_(0.5)
        else:
            safe_set_local_fp32_param(param, 0.5 * safe_get_local_fp32_param(param))


def _modified(trainer: Any) -> None:
    params = list(trainer.module.parameters())
    with nullcontext() if trainer.engine is None else deepspeed.zero.GatheredParameters(params, modifier_rank=0):
        for param in params:
            param.data.mul_(0.5)


def _nothing(trainer: Any) -> None:
    """The step itself changes the values."""


ENDS: dict[str, tuple[type[m.Plain], Callable[[Any], None]]] = {
    "branch": (Shortcut, _shortcut),
    "exception": (m.Plain, partial(_stopped, grad=False)),
    "exception_with_grad": (m.Plain, partial(_stopped, grad=True)),
}
CHANGES = {"step": _nothing, "full": _full, "local": _local, "modified": _modified}


def _ending_early(trainer: Any, end: str, change: str) -> None:
    """The order of units is known from the second step on; from then on there is something gathered ahead."""
    for step in range(5):
        rows = trainer.rows(step, 0)
        loss = loss_of(trainer(rows), rows)
        trainer.losses.append(loss.item())
        trainer.backward(loss)
        ENDS[end][1](trainer)
        trainer.step()
        if change != "step":
            ENDS[end][1](trainer)
            CHANGES[change](trainer)


@few
@pytest.mark.parametrize(
    ("end", "change"),
    [("exception", "step"), ("exception_with_grad", "step"), *(("branch", change) for change in CHANGES)],
)
def test_what_is_gathered_ahead_of_a_forward_that_ends_early(sharding: Sharding, end: str, change: str) -> None:
    """It arrives after the forward, and must not be taken for the values that are set then."""
    run = Run(sharding, ENDS[end][0], loop=partial(_ending_early, end=end, change=change), adversarial=change == "step")
    assert_parity(run)


# ---- loading -----------------------------------------------------------------------------------------------

LOADS: dict[str, dict[str, bool]] = {
    "all": {},
    "module": {"load_module_only": True},
    "weights": {"load_optimizer_states": False, "load_lr_scheduler_states": False},
}


def _loading(trainer: Any, folder: str, load: str, before: str) -> None:
    """Trains, goes back to what was saved, and trains on; with gathered copies of all kinds about at the load."""

    def look() -> None:
        rows = trainer.rows(500, 0)
        trainer.losses.append(loss_of(trainer(rows), rows).item())

    plain_loop(trainer)
    if trainer.engine is None:
        saved = {name: value.clone() for name, value in trainer.module.state_dict().items()}
    else:
        trainer.engine.save_checkpoint(folder, tag="x")
    plain_loop(trainer)
    if before == "stopped":
        _stopped(trainer, grad=False)
    else:
        with torch.set_grad_enabled(before == "grad"):
            look()
    if trainer.engine is None:
        trainer.module.load_state_dict(saved)
    else:
        trainer.engine.load_checkpoint(folder, tag="x", **LOADS[load])
    with torch.no_grad():
        look()
    plain_loop(trainer)


GATHERED: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "ahead": ("stopped", {}, {}),
    "kept": ("grad", {"keep_after_forward": "all"}, {}),
    "persistent": ("no_grad", {}, {"stage3_param_persistence_threshold": 10**6}),
}


@few
@pytest.mark.parametrize(
    ("load", "gathered"), [("all", "ahead"), ("module", "ahead"), ("module", "kept"), ("weights", "persistent")]
)
def test_loading(sharding: Sharding, load: str, gathered: str, tmp_path: Path) -> None:
    """Whole or in part: nobody computes with a copy from before. Plain SGD has no states that could differ."""
    before, amsp, zero = GATHERED[gathered]
    loop = partial(_loading, folder=str(tmp_path), load=load, before=before)
    assert_parity(Run(sharding, m.Plain, loop=loop, optimizer="plain_sgd", amsp=amsp, zero=zero))


# ---- pinned copies -----------------------------------------------------------------------------------------


def _pinned(trainer: Any, some: bool) -> None:
    """Steps inside GatheredParameters; where parameters are sharded its references show every new value."""
    params = dict(trainer.module.named_parameters())
    names = [name for name in params if not some or name.startswith("inner")]
    pinned = [params[name] for name in names]

    def values() -> torch.Tensor:
        if trainer.run.sharding.s_p == 1:
            # Nobody sees a reference being read, so whole parameters are read through the module.
            return torch.cat([trainer.module.get_parameter(name).detach().flatten() for name in names])
        return torch.cat([param.detach().flatten() for param in pinned])

    with nullcontext() if trainer.engine is None else deepspeed.zero.GatheredParameters(pinned):
        plain_loop(trainer)
        trainer.notes.append(values())
        if trainer.engine is None:
            params["inner.weight"].data.fill_(0.01)
        else:
            safe_set_full_fp32_param(params["inner.weight"], torch.full((m.WIDTH, m.WIDTH), 0.01))
        trainer.notes.append(values())
        plain_loop(trainer)
        trainer.notes.append(values())
    plain_loop(trainer)


@few
@pytest.mark.parametrize("some", [False, True], ids=["all", "some"])
@pytest.mark.parametrize("publish", ["broadcast", "all_gather"])
def test_steps_inside_gathered_parameters(sharding: Sharding, some: bool, publish: str) -> None:
    run = Run(sharding, m.Plain, loop=partial(_pinned, some=some), publish=publish)
    held, want = on_ranks(run), reference(run)
    assert_matches(held, want)
    for mine in held:
        for found, wanted in zip(mine.notes, want.notes, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def _pinned_load(trainer: Any, folder: str) -> None:
    """A load inside of the context, of everything or of the module only, shows in its references, too."""
    params = list(trainer.module.parameters())
    saved: list[torch.Tensor] = []
    with nullcontext() if trainer.engine is None else deepspeed.zero.GatheredParameters(params):
        for load in LOADS.values():
            plain_loop(trainer)
            saved = [param.detach().clone() for param in trainer.module.parameters()]
            if trainer.engine is not None:
                trainer.engine.save_checkpoint(folder, tag="x")
            plain_loop(trainer)
            if trainer.engine is None:
                for param, value in zip(params, saved, strict=True):
                    param.data.copy_(value)
            else:
                trainer.engine.load_checkpoint(folder, tag="x", **load)
                assert all(torch.equal(param, value) for param, value in zip(params, saved, strict=True))
            plain_loop(trainer)


@few
def test_loads_inside_gathered_parameters(sharding: Sharding, tmp_path: Path) -> None:
    loop = partial(_pinned_load, folder=str(tmp_path))
    assert_parity(Run(sharding, m.Plain, loop=loop, optimizer="plain_sgd"))
