"""Engines that are destroyed, made again, made side by side; and what they leave behind: nothing."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from torch import nn

from deepspeed_amsp.plan.factors import Sharding
from tests.semantics import modules as m
from tests.semantics.harness import (
    CUT,
    LOCAL_STATES,
    MIXED,
    NIGHTLY,
    OPTIMIZERS,
    ROWS,
    TRIO,
    UNEQUAL,
    WHOLE,
    ZERO3,
    Held,
    OnRank,
    Reference,
    Run,
    assert_matches,
    batch,
    groups_of,
    held_by,
    job,
    label,
    loss_of,
    over,
    plain_loop,
    reference,
    same,
    whole_parameters,
)
from tests.semantics.test_uses import RECOMPUTATIONS, FrozenAgain, PromptedTwice
from tests.support.leftovers import wait_until_closed
from tests.support.pool import pool

ENGINES = 30
STEPS = 1000 if os.environ.get("AMSP_NIGHTLY") == "1" else 60

# ---- leaks -------------------------------------------------------------------------------------------------


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _footprint() -> dict[str, int]:
    """What must not grow: process groups, threads of Python and of the system, live tensors."""
    gc.collect()
    wait_until_closed()
    return {
        "groups": len(dist.distributed_c10d._world.pg_map),
        "python threads": threading.active_count(),
        "threads": len(os.listdir("/proc/self/task")),
        "tensors": sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects()),
    }


def _made_and_destroyed(runs: list[Run]) -> tuple[list[dict[str, int]], list[int], list[str]]:
    """Footprints after a third, two thirds and all of the engines, resident bytes, and engines still alive."""
    footprints, resident = [], []
    engines: list[weakref.ref[Any]] = []
    for number in range(ENGINES):
        trainer = OnRank(runs[number % len(runs)].but(steps=1))
        plain_loop(trainer)
        trainer.engine.destroy()
        engines.append(weakref.ref(trainer.engine))
        del trainer
        if (number + 1) % (ENGINES // 3) == 0:
            footprints.append(_footprint())
            resident.append(_resident_bytes())
    alive = [str(number) for number, engine in enumerate(engines) if engine() is not None]
    return footprints, resident, alive


def test_thirty_engines_leave_nothing_behind() -> None:
    """No group, thread, tensor or memory more after 30 engines than after 10; and no engine stays alive."""
    runs = [Run(sharding, m.Tied, micro_batches=2) for sharding in TRIO]
    for footprints, resident, alive in pool(4).run(_made_and_destroyed, runs, timeout=120):
        assert footprints[2] == footprints[1] == footprints[0]
        assert resident[2] - resident[0] < 8 * 2**20
        assert not alive, f"engines {', '.join(alive)} are still alive"


KINDS: list[Callable[[], nn.Module]] = [
    m.Tied,
    m.Adapted,
    m.Reused,
    m.Borrowed,
    *(partial(FrozenAgain, uses, recompute) for uses in ("ccc", "tcpt") for recompute in RECOMPUTATIONS),
    *(partial(PromptedTwice, recompute) for recompute in RECOMPUTATIONS),
]


def _every_kind(runs: list[Run]) -> list[tuple[str, dict[str, int], dict[str, int]]]:
    """By model, footprints after its first and its second engine."""
    found = []
    for run in runs:
        footprints = []
        for _ in range(2):
            job(run)
            footprints.append(_footprint())
        found.append((repr(run.model), footprints[0], footprints[1]))
    return found


@over(CUT if NIGHTLY else [ZERO3])
def test_no_kind_of_model_leaves_anything_behind(sharding: Sharding) -> None:
    """A graph that holds itself through one of our hooks would keep its engine and its groups' threads for ever."""
    runs = [Run(sharding, kind, steps=1, micro_batches=2) for kind in KINDS]
    for found in pool(4).run(_every_kind, runs, timeout=200):
        for name, before, after in found:
            assert after == before, name


def _many_steps(run: Run) -> tuple[list[dict[str, int]], list[int], list[tuple[int, ...]]]:
    """Footprints at a half and at the end of a long run, with evaluations; and the hooks of all modules."""
    trainer = OnRank(run)
    footprints, resident, hooks = [], [], []
    for step in range(STEPS):
        rows = trainer.rows(step, 0)
        trainer.backward(loss_of(trainer(rows), rows))
        trainer.step()
        with torch.no_grad():
            trainer(rows)
        if step in (STEPS // 2, STEPS - 1):
            footprints.append(_footprint())
            resident.append(_resident_bytes())
            hooks.append(tuple(_hooks_of(module) for module in trainer.module.modules()))
    trainer.engine.destroy()
    return footprints, resident, hooks


def _hooks_of(module: nn.Module) -> int:
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    on_params = [getattr(param, "_post_accumulate_grad_hooks", None) or () for param in dict.values(module._parameters)]
    return sum(len(getattr(module, kind)) for kind in kinds) + sum(len(hooks) for hooks in on_params)


@over([UNEQUAL, ZERO3])
def test_many_steps_leave_nothing_behind(sharding: Sharding) -> None:
    for footprints, resident, hooks in pool(4).run(_many_steps, Run(sharding, m.Reused), timeout=300):
        assert footprints[1] == footprints[0]
        assert resident[1] - resident[0] < 4 * 2**20
        assert hooks[1] == hooks[0]


# ---- after the engine --------------------------------------------------------------------------------------


def _bare(run: Run) -> dict[str, Any]:
    """The module after its engine was destroyed right after a step, without waiting for anything."""
    from tests.support import adversarial

    trainer = OnRank(run)
    plain_loop(trainer)
    module = trainer.engine.module
    trainer.engine.destroy()
    adversarial.assert_all_waited()
    values = {name: param.detach().clone() for name, param in module.named_parameters()}
    traces = [
        f"{name}: {key}"
        for name, param in module.named_parameters()
        for key in vars(param)
        if key.startswith(("ds_", "_z3", "_hp")) or "amsp" in key
    ]
    hooks = {name: _hooks_of(part) for name, part in module.named_modules() if _hooks_of(part)}
    watched = [name for name, part in module.named_modules() if type(part._parameters) is not dict]
    rows = batch(50, 0, 4)[:ROWS]
    loss_of(module(rows), rows).backward()
    gradients = {name: param.grad.clone() for name, param in module.named_parameters()}
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    optimizer.step()
    moved = all(not same(param.detach(), values[name]) for name, param in module.named_parameters())
    return {"values": values, "traces": traces, "hooks": hooks, "watched": watched, "grads": gradients, "moved": moved}


@over(WHOLE)
def test_the_bare_module_works_after_destroy(sharding: Sharding) -> None:
    """With the last step's values, without a hook, a watcher or a mark; it trains with any optimizer."""
    run = Run(sharding, m.Plain, adversarial=True)
    want = Reference(run)
    plain_loop(want)
    rows = batch(50, 0, 4)[:ROWS]
    loss_of(want.module(rows), rows).backward()
    for found in pool(4).run(_bare, run):
        assert found["traces"] == [] and found["hooks"] == {} and found["watched"] == []
        assert found["moved"]
        for name, param in want.module.named_parameters():
            torch.testing.assert_close(found["values"][name], param.detach(), rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(found["grads"][name], param.grad, rtol=1e-4, atol=1e-6)


def _again(run: Run, second: Run) -> Held:
    """Another engine, of another plan, over the module that the first one has trained."""
    trainer = OnRank(run)
    plain_loop(trainer)
    module = trainer.engine.module
    trainer.engine.destroy()
    engine, *_ = deepspeed.initialize(
        model=module, optimizer=OPTIMIZERS[run.optimizer](groups_of(module)), config=second.ds_config()
    )
    trainer.engine, trainer.module, trainer.norms, trainer.losses = engine, engine.module, [], []
    plain_loop(trainer)
    held = held_by(trainer)
    engine.destroy()
    return held


@pytest.mark.parametrize("second", TRIO, ids=label)
def test_a_second_engine_over_the_same_module(second: Sharding) -> None:
    run = Run(LOCAL_STATES, m.Tied)
    held = pool(4).run(_again, run, Run(second, m.Tied))
    first = Reference(run)
    plain_loop(first)
    assert_matches(held, reference(run, module=first.module))


def _twice(run: Run) -> None:
    trainer = OnRank(run)
    plain_loop(trainer)
    trainer.engine.destroy()
    trainer.engine.destroy()


@pytest.mark.parametrize("sharding", [UNEQUAL, MIXED], ids=label)
def test_destroying_twice_is_harmless(sharding: Sharding) -> None:
    pool(4).run(_twice, Run(sharding, m.Plain))


# ---- side by side ------------------------------------------------------------------------------------------


def _interleaved(runs: list[Run]) -> list[Held]:
    """Three engines whose forwards, backwards and steps are woven into each other; the middle one ends first."""
    trainers = [OnRank(run) for run in runs]
    for step in range(3):
        alive = trainers if step < 2 else [trainers[0], trainers[2]]
        losses = []
        for trainer in alive:
            rows = trainer.rows(step, 0)
            losses.append(loss_of(trainer(rows), rows))
            trainer.losses.append(losses[-1].item())
        for trainer, loss in reversed(list(zip(alive, losses, strict=True))):
            trainer.backward(loss)
        for trainer in alive:
            trainer.step()
        if step == 1:
            middle = held_by(trainers[1])
            trainers[1].engine.destroy()
    held = [held_by(trainers[0]), middle, held_by(trainers[2])]
    for trainer in (trainers[0], trainers[2]):
        trainer.engine.destroy()
    return held


@pytest.mark.parametrize(
    "shardings", [(UNEQUAL, ZERO3, MIXED), (ZERO3, LOCAL_STATES, ZERO3)], ids=lambda s: "+".join(map(label, s))
)
def test_several_engines_in_one_process(shardings: tuple[Sharding, ...]) -> None:
    models = (m.Plain, m.Reused, m.Tied)
    runs = [Run(sharding, model, adversarial=True) for sharding, model in zip(shardings, models, strict=True)]
    by_rank = pool(4).run(_interleaved, runs)
    for number, run in enumerate(runs):
        assert_matches([held[number] for held in by_rank], reference(run.but(steps=2 if number == 1 else 3)))


def _one_model_scores_the_other(runs: list[Run]) -> Held:
    """As in preference training: a second engine, in eval mode, runs inside the first one's step."""
    trainer, judge = OnRank(runs[0]), OnRank(runs[1])
    judge.train(False)
    for step in range(3):
        rows = trainer.rows(step, 0)
        with torch.no_grad():
            before = judge(rows).float().mean()
        output = trainer(rows)
        with torch.no_grad():
            score = judge(rows).float().mean()
        assert torch.equal(before, score)
        loss = loss_of(output, rows) + 0 * score
        trainer.losses.append(loss.item())
        trainer.backward(loss)
        trainer.step()
    held = held_by(trainer)
    held.notes = [whole_parameters(judge.engine)]
    trainer.engine.destroy()
    judge.engine.destroy()
    return held


@over([MIXED, ZERO3])
def test_an_engine_that_only_scores(sharding: Sharding) -> None:
    runs = [Run(sharding, m.Plain), Run(ZERO3, m.Borrowed)]
    held = pool(4).run(_one_model_scores_the_other, runs)
    assert_matches(held, reference(runs[0]))
    torch.manual_seed(7)
    for name, param in m.Borrowed().named_parameters():
        assert same(held[0].notes[0][name], param.detach())
