"""Reading and editing state: safe_get and safe_set, GatheredParameters, zero_grad, param_groups, offloading."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_grad,
    safe_set_local_optimizer_state,
)
from torch import nn

from deepspeed_amsp.plan.factors import Sharding
from tests.semantics import modules as m
from tests.semantics.harness import (
    LOCAL_STATES,
    Held,
    Run,
    Trainer,
    assert_matches,
    assert_parity,
    loss_of,
    masters_of,
    on_ranks,
    pair,
    plain_loop,
    reference,
    same,
    short_spread,
    trio,
    whole_parameters,
)


def _backward(trainer: Trainer, step: int) -> None:
    for micro in range(trainer.run.micro_batches):
        rows = trainer.rows(step, micro)
        loss = loss_of(trainer(rows), rows)
        trainer.losses.append(loss.item())
        trainer.backward(loss)
        if micro + 1 < trainer.run.micro_batches:
            trainer.step()


def assert_same_notes(held: list[Held], want: Held) -> None:
    """Every note is a dictionary of tensors; they are the reference's on every rank."""
    for rank, mine in enumerate(held):
        for number, (found, wanted) in enumerate(zip(mine.notes, want.notes, strict=True)):
            assert found.keys() == wanted.keys()
            for name, value in wanted.items():
                torch.testing.assert_close(
                    found[name], value, rtol=1e-5, atol=1e-6, msg=lambda t, w=(rank, number, name): f"{w}: {t}"
                )


# ---- whole values ------------------------------------------------------------------------------------------


def _full(trainer: Any) -> None:
    """Reads gradients, masters and moments of all parameters, and edits some of each between the steps."""
    params = dict(trainer.module.named_parameters())
    on_engine = trainer.engine is not None
    shape = (m.WIDTH, m.FEATURES)
    pattern = torch.linspace(-0.5, 0.5, shape[0] * shape[1]).view(shape)
    if on_engine:
        assert safe_get_full_optimizer_state(params["first.weight"], "exp_avg") is None, "no step was made yet"
        assert safe_get_full_grad(params["first.weight"]) is None

    _backward(trainer, 0)
    gradients = {n: safe_get_full_grad(p) if on_engine else p.grad.clone() for n, p in params.items()}
    trainer.notes.append(gradients)
    for name in ("first.weight", "norm.bias"):
        if on_engine:
            safe_set_full_grad(params[name], 2 * gradients[name])
        else:
            params[name].grad.mul_(2)
    trainer.step()

    state = {} if on_engine else trainer.optimizer.state
    for key in ("exp_avg", "exp_avg_sq"):
        trainer.notes.append(
            {
                n: safe_get_full_optimizer_state(p, key) if on_engine else state[p][key].clone()
                for n, p in params.items()
            }
        )
    trainer.notes.append(
        {n: safe_get_full_fp32_param(p) if on_engine else p.detach().clone() for n, p in params.items()}
    )
    if on_engine:
        assert all(value.dtype is torch.float32 for note in trainer.notes for value in note.values())
        safe_set_full_fp32_param(params["first.weight"], pattern)
        safe_set_full_optimizer_state(params["inner.weight"], torch.full((m.WIDTH, m.WIDTH), 1e-3), "exp_avg")
    else:
        params["first.weight"].data.copy_(pattern)
        state[params["inner.weight"]]["exp_avg"].fill_(1e-3)

    for step in (1, 2):
        _backward(trainer, step)
        trainer.step()
    trainer.notes.append(
        {n: safe_get_full_fp32_param(p) if on_engine else p.detach().clone() for n, p in params.items()}
    )


@short_spread
def test_whole_values_are_read_and_set(sharding: Sharding) -> None:
    run = Run(sharding, m.Plain, loop=_full, micro_batches=2, clip=0.2)
    held, want = on_ranks(run), reference(run)
    assert_same_notes(held, want)
    assert_matches(held, want)


# ---- the part of a rank ------------------------------------------------------------------------------------


def _local(trainer: Any) -> None:
    """Reads what this rank owns, then doubles masters, zeroes moments and negates a gradient, each everywhere."""
    engine = trainer.engine
    params = dict(trainer.module.named_parameters())
    _backward(trainer, 0)
    for param in params.values():
        gradient = safe_get_local_grad(param)
        safe_set_local_grad(param, -gradient)
        trainer.notes.append(gradient.numel())
    trainer.step()
    for name, param in params.items():
        mine = [value for (owner, _, _), value in masters_of(engine).items() if owner == name]
        whole = torch.cat(mine) if mine else torch.empty(0)
        assert torch.equal(safe_get_local_fp32_param(param).flatten(), whole), name
        moment = safe_get_local_optimizer_state(param, "exp_avg")
        assert moment.numel() == whole.numel()
        safe_set_local_optimizer_state(param, torch.zeros_like(moment), "exp_avg")
        assert not safe_get_local_optimizer_state(param, "exp_avg").any()
        safe_set_local_fp32_param(param, 2 * safe_get_local_fp32_param(param))
    trainer.notes = [sum(trainer.notes)]


def _local_by_hand(trainer: Any) -> None:
    _backward(trainer, 0)
    for param in trainer.module.parameters():
        param.grad.neg_()
    trainer.step()
    for param in trainer.module.parameters():
        param.data.mul_(2)


@short_spread
def test_the_part_that_a_rank_owns(sharding: Sharding) -> None:
    held = on_ranks(Run(sharding, m.Plain, loop=_local))
    assert_matches(held, reference(Run(sharding, m.Plain, loop=_local_by_hand)))
    numel = sum(param.numel() for param in m.Plain().parameters())
    assert sum(mine.notes[0] for mine in held) == numel * sharding.replicate


# ---- GatheredParameters ------------------------------------------------------------------------------------


def _gathered(trainer: Any) -> None:
    """Reads everything, one parameter, and writes two on rank 0 only; with a step before, between and after."""
    params = dict(trainer.module.named_parameters())
    on_engine = trainer.engine is not None
    for step in range(3):
        _backward(trainer, step)
        trainer.step()
        with deepspeed.zero.GatheredParameters(list(params.values())) if on_engine else nullcontext():
            trainer.notes.append({name: param.detach().clone() for name, param in params.items()})
        with deepspeed.zero.GatheredParameters(params["backbone.0.weight"]) if on_engine else nullcontext():
            assert params["backbone.0.weight"].shape == (40, 40)
        edited = [params["down.1.weight"], params["norm.weight"]]  # a trained and a frozen one
        with deepspeed.zero.GatheredParameters(edited, modifier_rank=0) if on_engine else nullcontext():
            if not on_engine or dist.get_rank() == 0:
                with torch.no_grad():
                    edited[0].mul_(0.5)
                    edited[1].copy_(torch.linspace(0.5, 1.5, 40))
        if on_engine:
            at_rest = sum(param.numel() for param in params.values())
            assert (at_rest == 0) == (trainer.run.sharding.s_p > 1), "sharded again on leaving"


@trio
@pytest.mark.parametrize("publish", ["broadcast", "all_gather"])
def test_gathered_parameters(sharding: Sharding, publish: str) -> None:
    """What rank 0 writes reaches all replicas and the masters, and the next steps start from it."""
    run = Run(sharding, m.Adapted, loop=_gathered, publish=publish, adversarial=publish == "broadcast")
    held, want = on_ranks(run), reference(run)
    assert_same_notes(held, want)
    assert_matches(held, want)


# ---- dropping gradients ------------------------------------------------------------------------------------


class Discarded(m.Base):
    """``extra`` is used in the rows that are discarded, and never again."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(m.WIDTH, m.WIDTH)

    def middle(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return hidden + torch.tanh(self.extra(hidden)) if m.step_of(rows) >= 50 else hidden


def _zero_grad(trainer: Any) -> None:
    """Before every window a backward whose gradient is dropped."""
    for step in range(trainer.run.steps):
        if trainer.engine is not None:
            rows = trainer.rows(50 + step, 0)
            trainer.backward(loss_of(trainer(rows), rows))
            getattr(trainer.engine, trainer.run.extra["through"], trainer.engine).zero_grad()
        _backward(trainer, step)
        trainer.step()


@trio
@pytest.mark.parametrize(("through", "micro_batches"), [("optimizer", 1), ("optimizer", 2), ("engine", 2)])
def test_zero_grad_drops_the_window(sharding: Sharding, through: str, micro_batches: int) -> None:
    """And with it that a parameter was used: one that only the dropped backward used is left alone."""
    run = Run(sharding, Discarded, loop=_zero_grad, micro_batches=micro_batches, extra={"through": through})
    held = assert_parity(run)
    torch.manual_seed(7)
    start = dict(Discarded().named_parameters())
    assert same(held[0].parameters["extra.weight"], start["extra.weight"].detach())


# ---- param_groups ------------------------------------------------------------------------------------------


def _edited_groups(trainer: Any) -> None:
    """Learning rate, weight decay and betas change between steps, through the engine's and the user's optimizer."""
    for step in range(5):
        groups = trainer.optimizer.param_groups if trainer.engine is None else trainer.engine.optimizer.param_groups
        if trainer.engine is not None and step >= 3:
            groups = trainer.engine.basic_optimizer.param_groups
        for number, group in enumerate(groups):
            group["lr"] = 0.02 / (1 + step + number)
            group["weight_decay"] = 0.3 * (step % 2)
            group["betas"] = (0.9 - 0.1 * step, 0.99)
        _backward(trainer, step)
        trainer.step()
        if trainer.engine is not None:
            assert trainer.engine.get_lr() == [0.02 / (1 + step + number) for number in range(2)]


@short_spread
def test_edited_param_groups_count_from_the_next_step(sharding: Sharding) -> None:
    assert_parity(Run(sharding, m.Plain, loop=_edited_groups))


# ---- caches and offloading ---------------------------------------------------------------------------------


def _emptying(trainer: Any) -> None:
    for step in range(trainer.run.steps):
        for micro in range(trainer.run.micro_batches):
            rows = trainer.rows(step, micro)
            loss = loss_of(trainer(rows), rows)
            trainer.losses.append(loss.item())
            trainer.backward(loss)
            if trainer.engine is not None:
                trainer.engine.empty_partition_cache()
            trainer.step()
            if trainer.engine is not None:
                trainer.engine.empty_partition_cache()
                at_rest = sum(param.numel() for param in trainer.module.parameters())
                assert (at_rest == 0) == (trainer.run.sharding.s_p > 1)


@trio
def test_emptying_the_partition_cache_anywhere(sharding: Sharding) -> None:
    assert_parity(Run(sharding, m.Tied, loop=_emptying, micro_batches=2))


def _offloading(trainer: Any) -> None:
    """All states, then some, leave the device between two steps; values are what they were."""
    engine = trainer.engine
    for step in range(trainer.run.steps):
        if engine is not None:
            before = {**whole_parameters(engine), **{str(key): value for key, value in masters_of(engine).items()}}
            include = None if step % 2 else [OffloadStateTypeEnum.optim_states, OffloadStateTypeEnum.hp_params]
            engine.offload_states(include=include, pin_memory=False)
            engine.reload_states()
            after = {**whole_parameters(engine), **{str(key): value for key, value in masters_of(engine).items()}}
            assert all(same(value, after[name]) for name, value in before.items())
        _backward(trainer, step)
        trainer.step()


@pair
def test_states_leave_and_come_back(sharding: Sharding) -> None:
    assert_parity(Run(sharding, m.Plain, loop=_offloading, micro_batches=2))


def _nothing(trainer: Any) -> None:
    plain_loop(trainer)
    for param in trainer.module.parameters():
        assert not param.requires_grad or safe_get_full_grad(param) is None, "after the step there is no gradient"


@pytest.mark.parametrize("sharding", [LOCAL_STATES], ids=["local"])
def test_no_gradient_after_the_step(sharding: Sharding) -> None:
    assert_matches(on_ranks(Run(sharding, m.Plain, loop=_nothing)), reference(Run(sharding, m.Plain)))
