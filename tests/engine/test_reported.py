"""What a review found once, so that it stays found."""

from __future__ import annotations

import copy
import datetime
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from deepspeed_amsp.plan.factors import Sharding
from tests.engine.test_bad_input import amsp, refused
from tests.engine.test_seam import config
from tests.engine.test_training import SPREAD, make_case, spread
from tests.support import models
from tests.support.jobs import Case, make_engine, train_step
from tests.support.models import Outcome
from tests.support.pool import pool

NIGHTLY = os.environ.get("AMSP_NIGHTLY") == "1"

WHOLE = SPREAD[1]
"""Parameters whole, gradients and optimizer states sharded: updates travel under the next forward."""


def expected(case: Case, steps: int) -> Outcome:
    return models.reference(case.model, case.optimizer, 4, case.micro_batches, steps, case.clip)


def assert_values(state: dict[str, torch.Tensor], want: Outcome) -> None:
    for name, value in want.parameters.items():
        torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


def _after_step(case: Case, how: str) -> dict[str, torch.Tensor]:
    engine = make_engine(case)
    for step in range(2):
        train_step(engine, case, step)
    module = engine.module
    if how == "destroy":
        engine.destroy()
        return {name: p.detach().clone() for name, p in module.named_parameters()}
    copied = copy.deepcopy(module)
    engine.destroy()
    assert all(type(part._parameters) is dict for part in copied.modules())
    return {name: p.detach().clone() for name, p in copied.named_parameters()}


@pytest.mark.parametrize("how", ["destroy", "deepcopy"])
@pytest.mark.parametrize("adversarial", [True, False])
def test_the_last_update_is_not_lost(how: str, adversarial: bool) -> None:
    case = make_case(WHOLE, adversarial=adversarial)
    for state in pool(4).run(_after_step, case, how):
        assert_values(state, expected(case, 2))


class Hoarder(models.Mlp):
    """Keeps a parameter of another module in a list of its own, and reads it there."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = [self.second.weight]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = F.gelu(self.first(self.embed(tokens))) * self.gain
        return self.head(torch.tanh(F.linear(self.norm(hidden), self.kept[0])))


class Scripted(models.Mlp):
    """One of its modules is a ScriptModule, whose parameters cannot be watched."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.jit.script(self.first)


def _trained(case: Case, kind: str) -> dict[str, torch.Tensor]:
    models.MODELS["tried"] = {"hoarder": Hoarder, "scripted": Scripted}.get(kind, models.Mlp)
    engine = make_engine(case)
    if kind in ("compiled", "inductor"):
        engine.compile(backend="inductor" if kind == "inductor" else "eager")
    for step in range(3):
        if kind == "direct":
            _step_through_the_module(engine, case, step)
        else:
            train_step(engine, case, step)
    engine.optimizer.wait_for_parameters()
    state = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
    engine.destroy()
    return {name.removeprefix("_orig_mod."): value for name, value in state.items()}


def _step_through_the_module(engine: Any, case: Case, step: int) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    for micro in range(case.micro_batches):
        tokens = models.batch(step, micro, world)[rank * models.SAMPLES : (rank + 1) * models.SAMPLES]
        (models.loss_of(engine.module(tokens[:, :-1]), tokens) / case.micro_batches).backward()
        engine.step()


@pytest.mark.parametrize("kind", ["hoarder", "scripted", "compiled", "direct", *["inductor"] * NIGHTLY])
def test_parameters_read_where_nobody_sees_it(kind: str) -> None:
    case = make_case(WHOLE, model="tried", micro_batches=1 if kind == "direct" else 2, adversarial=kind == "hoarder")
    want = models.reference("mlp", case.optimizer, 4, case.micro_batches, 3, case.clip)
    for state in pool(4).run(_trained, case, kind, timeout=300 if kind == "inductor" else 60):
        assert_values(state, want)


def _zeroed(case: Case) -> list[float]:
    engine = make_engine(case)
    rank = dist.get_rank()
    tokens = models.batch(77, 0, 4)[rank * models.SAMPLES : (rank + 1) * models.SAMPLES]
    engine.backward(models.loss_of(engine(tokens[:, :-1]), tokens))
    engine.zero_grad()  # the window starts anew
    engine.micro_steps = 0
    norms = []
    for step in range(2):
        train_step(engine, case, step)
        norms.append(float(engine.get_global_grad_norm()))
    engine.destroy()
    return norms


@spread
def test_zero_grad_drops_what_was_accumulated(sharding: Sharding) -> None:
    case = make_case(sharding)
    for norms in pool(4).run(_zeroed, case):
        torch.testing.assert_close(norms, expected(case, 2).norms, rtol=1e-5, atol=0.0)


# ---- refused -----------------------------------------------------------------------------------------------


def _with_model(ds_config: dict[str, Any], kind: str) -> None:
    import deepspeed

    import deepspeed_amsp  # noqa: F401

    kwargs: dict[str, Any] = {}
    if kind == "moe":
        from deepspeed.moe.layer import MoE

        model: nn.Module = nn.Sequential(MoE(8, nn.Linear(8, 8), num_experts=4, ep_size=1))
    elif kind == "scripted":
        model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(torch.jit.script(nn.Linear(8, 8))))
    elif kind == "sparse":
        model = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 4))
    else:
        model = models.make_model("mlp")
        if kind == "mpu":
            kwargs["mpu"] = object()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=ds_config, **kwargs)
    if kind == "compile":
        engine.compile(backend="eager")
    if kind == "deepcopy":
        copy.deepcopy(engine.module)
    if kind == "sparse":
        engine.backward(engine(torch.zeros(2, 3, dtype=torch.long)).sum())
    if kind == "again":
        engine.destroy()
        deepspeed.initialize(model=model, model_parameters=model.parameters(), config=ds_config)


@pytest.mark.parametrize(
    ("kind", "sharding", "stage", "words"),
    [
        ("moe", "zero1", 1, ["MoE"]),
        ("mpu", "zero1", 1, ["mpu"]),
        ("sparse", "zero1", 1, ["0.weight", "sparse"]),
        ("compile", "zero3", 3, ["torch.compile", "amsp.sharding.parameters"]),
        ("scripted", "zero3", 3, ["1.0", "ScriptModule", "[1, 1]"]),
        ("deepcopy", "zero3", 3, ["cannot be copied"]),
        ("again", "zero3", 3, ["gain is empty", "destroyed"]),
    ],
)
def test_refused(kind: str, sharding: str, stage: int, words: list[str]) -> None:
    ds_config = config(amsp=amsp(sharding), zero_optimization={"stage": stage})
    refused(ds_config, *words, job=_with_model, kind=kind)


def _timeouts(case: Case) -> list[float]:
    from deepspeed_amsp import mesh

    given = datetime.timedelta(seconds=77)
    dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout = given  # type: ignore[union-attr]
    assert mesh._default_timeout() == given
    engine = make_engine(case)
    handles = [handle for handle in engine.amsp.mesh._handles.values() if handle is not None]
    found = [h._get_backend(torch.device("cpu")).options._timeout.total_seconds() for h in handles]
    engine.destroy()
    return found


def test_groups_inherit_the_users_timeout() -> None:
    for found in pool(4).run(_timeouts, make_case(SPREAD[2])):
        assert found and set(found) == {77.0}
