"""What DeepSpeed users do with checkpoints, from one plan to another."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import deepspeed
import pytest
import torch
import torch.distributed as dist
from torch import nn

from deepspeed_amsp.checkpoint.manifest import Manifest, TensorInfo
from deepspeed_amsp.checkpoint.restore import matched_groups, refuse_another_optimizer
from deepspeed_amsp.checkpoint.together import CheckpointError
from tests.checkpoint import runs
from tests.checkpoint.runs import Net, Spec, held_by, make_engine, make_model, merged, tokens, train_step
from tests.semantics.harness import NIGHTLY
from tests.support.pool import pool

WRITER = Spec(2, 2, "zero1")
READER = Spec(2, 1, "zero3")
BACK = Spec(2, 2, "ddp")


def saved_by(spec: Spec, folder: str, steps: int = 2, **kwargs: Any) -> Any:
    engine = make_engine(spec)
    for step in range(steps):
        train_step(engine, step)
    engine.save_checkpoint(folder, client_state={"position": steps}, **kwargs)
    held = held_by(engine)
    engine.destroy()
    return held


def loaded_by(spec: Spec, folder: str, then: int = 0, **kwargs: Any) -> Any:
    """What is held after the load (and further steps), the counters, the rate, and the client's state."""
    engine = make_engine(spec, seed=99)
    train_step(engine, 50)
    before = held_by(engine)
    path, client_state = engine.load_checkpoint(folder, **kwargs)
    assert path is not None
    after = held_by(engine)
    for step in range(2, 2 + then):
        train_step(engine, step)
    found = before, after, (engine.global_steps, engine.skipped_steps, engine.global_samples), client_state
    engine.destroy()
    return found


Written = tuple[Path, list[Any]]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """A checkpoint of WRITER after two steps, and what its ranks held."""
    folder = tmp_path_factory.mktemp("written")
    return folder, pool(2).run(saved_by, WRITER, str(folder))


# ---- which parts are loaded --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kwargs", "states", "counters"),
    [
        ({}, True, True),
        ({"load_optimizer_states": False}, False, True),
        ({"load_module_only": True}, False, False),
    ],
    ids=["all", "no states", "module only"],
)
def test_parts(kwargs: dict[str, Any], states: bool, counters: bool, written: Written) -> None:
    want = merged(written[1])
    told = pool(2).run(loaded_by, READER, str(written[0]), **kwargs)
    before, after = merged([one[0] for one in told]), merged([one[1] for one in told])
    for name, values in want.items():
        for key in values:
            source = want if states or key == "master" else before
            assert torch.equal(after[name][key], source[name][key]), f"{key} of {name}"
        assert not torch.equal(values["master"], before[name]["master"])
    for _, _, found, client_state in told:
        assert found == ((2, 0, 48) if counters else (1, 0, 24)) and client_state == {"position": 2}


def test_a_save_before_the_first_step_has_no_states(tmp_path: Path) -> None:
    pool(2).run(saved_by, WRITER, str(tmp_path), steps=0)
    told = pool(2).run(loaded_by, READER, str(tmp_path))
    assert all(set(values) == {"master"} for values in merged([one[1] for one in told]).values())


def _custom(spec: Spec, folder: str) -> Any:
    engine = make_engine(spec, seed=99)
    seen = []

    def load(src: dict[str, torch.Tensor], dst: nn.Module) -> None:
        seen.append(sorted(src))
        with torch.no_grad():
            for name, param in dst.named_parameters():
                param.copy_(src[name] if name != "scale" else torch.tensor(7.0))

    engine.load_checkpoint(folder, custom_load_fn=load)
    held = held_by(engine)
    train_step(engine, 2)
    engine.destroy()
    return held, seen


def test_custom_load_fn(tmp_path: Path) -> None:
    want = merged(pool(2).run(saved_by, READER, str(tmp_path)))
    told = pool(2).run(_custom, WRITER, str(tmp_path))
    assert told[0][1] == [sorted(make_model().state_dict())]
    for name, values in merged([one[0] for one in told]).items():
        expected = torch.tensor(7.0) if name == "scale" else want[name]["master"]
        assert torch.equal(values["master"], expected)
        assert torch.equal(values["exp_avg"], want[name]["exp_avg"])
    errors = pool(2).run(_custom, READER, str(tmp_path), return_exceptions=True)
    assert all("custom_load_fn needs whole parameters" in str(error) for error in errors)


# ---- frozen, thawed, tied, regrouped -----------------------------------------------------------------------


def test_frozen_parameters_that_were_left_out_keep_their_values(tmp_path: Path) -> None:
    pool(2).run(saved_by, WRITER, str(tmp_path), exclude_frozen_parameters=True)
    for before, after, _, _ in pool(2).run(loaded_by, READER, str(tmp_path)):
        for name in ("fixed.weight", "fixed.bias", "codes"):
            assert torch.equal(before.working[name], after.working[name])
        assert not torch.equal(before.working["first.weight"], after.working["first.weight"])


class Odd(Net):
    """Parameters and buffers of every shape and layout that a module may have."""

    def __init__(self) -> None:
        super().__init__()
        self.none = nn.Parameter(torch.empty(0, 5))
        self.second.weight = nn.Parameter(torch.randn(26, 12).t() * 0.1)
        buffers = {
            "turned": torch.randn(4, 3).t(),
            "wide": torch.randn(1).expand(5),
            "empty": torch.empty(0, 3),
            "sparse": torch.eye(3).to_sparse(),
            "conjugated": torch.randn(3, dtype=torch.complex64).conj(),
        }
        for name, value in buffers.items():
            self.register_buffer(name, value)


def _odd(folder: str) -> list[str]:
    """What differs after a load by another plan, whose model began elsewhere."""
    held = []
    for spec, seed in ((WRITER, 7), (READER, 99)):
        engine = make_engine(spec, seed)
        train_step(engine, seed)
        if seed == 7:
            engine.save_checkpoint(folder, "a/b")
        else:
            engine.load_checkpoint(folder)
        held.append(held_by(engine))
        engine.destroy()
    wrote, read = ({**one.working, **one.buffers} for one in held)
    return [name for name, value in wrote.items() if value.to_dense().tolist() != read[name].to_dense().tolist()]


def test_tensors_of_every_kind(tmp_path: Path) -> None:
    assert pool(2).run(with_model, Odd, _odd, str(tmp_path)) == [[], []]


class Thawed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.fixed.requires_grad_(True)


class Frozen(Net):
    def __init__(self) -> None:
        super().__init__()
        self.first.requires_grad_(False)


class Untied(Net):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(12, runs.VOCABULARY, bias=False)


def with_model(model: type[nn.Module], job: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with mock.patch.object(runs, "Net", model):
        return job(*args, **kwargs)


@pytest.mark.parametrize("spec", [READER, BACK] if NIGHTLY else [READER], ids=str)
def test_thawed_on_resume(spec: Spec, written: Written) -> None:
    """The values are loaded; the states of what is new begin afresh, at step 0, the others go on."""
    held = written[1]
    told = pool(2).run(with_model, Thawed, loaded_by, spec, str(written[0]), then=1)
    after = merged([one[1] for one in told])
    assert torch.equal(after["fixed.weight"]["master"], held[0].working["fixed.weight"])
    assert set(after["fixed.weight"]) == {"master"} and float(after["second.weight"]["step"]) == 2


@pytest.mark.parametrize("spec", [READER, BACK] if NIGHTLY else [READER], ids=str)
def test_frozen_on_resume(spec: Spec, written: Written) -> None:
    held = written[1]
    for _, after, _, _ in pool(2).run(with_model, Frozen, loaded_by, spec, str(written[0]), then=1):
        assert torch.equal(after.working["first.weight"], held[0].working["first.weight"])
        assert not any(name.startswith("first") for name, _, _ in after.pieces)


def test_untied_on_resume(written: Written) -> None:
    """Both copies begin with the values and states of the one; and back again."""
    want = merged(written[1])
    told = pool(2).run(with_model, Untied, loaded_by, READER, str(written[0]), then=1)
    for _, after, _, _ in told:
        assert torch.equal(after.working["head.weight"], want["embed.weight"]["master"])
        assert torch.equal(after.working["embed.weight"], want["embed.weight"]["master"])
    owned = {name for _, after, _, _ in told for name, _, _ in after.pieces}
    assert {"head.weight", "embed.weight"} <= owned


def _reversed_groups(model: nn.Module) -> list[dict[str, Any]]:
    others, decaying = (group for group in _PLAIN_GROUPS(model) if group["params"])
    return [{**decaying, "params": decaying["params"][::-1]}, others]


_PLAIN_GROUPS = runs.groups_of


def _with_groups(job: Callable[..., Any], *args: Any) -> Any:
    with mock.patch.object(runs, "groups_of", _reversed_groups):
        return job(*args)


def test_groups_in_another_order(written: Written) -> None:
    """Group by group what the parameters had: rates, decay; and tensor by tensor the states."""
    held = written[1]
    told = pool(2).run(_with_groups, loaded_by, READER, str(written[0]))
    for _, after, _, _ in told:
        assert after.groups == held[0].groups[::-1]
    after, want = merged([one[1] for one in told]), merged(held)
    assert all(torch.equal(value, after[name][key]) for name, values in want.items() for key, value in values.items())


def test_groups_keep_their_implementation() -> None:
    """A fused optimizer's groups, loaded where there is none, say of rates what they said, and not how to compute."""
    manifest = Manifest("t", {}, 0, {"master/w": TensorInfo((2,), "float32")}, {}, (), (), {}, {})
    saved = {"group_names": [["w"]], "groups": [{"lr": 0.5, "maximize": True, "fused": True, "capturable": True}]}
    assert matched_groups([["w"]], manifest, saved) == [{"lr": 0.5, "maximize": True}]


# ---- what goes on around a load ----------------------------------------------------------------------------


def _edits(spec: Spec, folder: str) -> Any:
    """A group that somebody holds is still the optimizer's after a load, and an edit takes effect."""
    engine = make_engine(spec, seed=99)
    groups = list(engine.optimizer.param_groups)
    engine.load_checkpoint(folder)
    same = all(one is other for one, other in zip(groups, engine.optimizer.param_groups, strict=True))
    for group in groups:
        group["lr"], group["weight_decay"] = 0.0, 0.0
    before = held_by(engine)
    train_step(engine, 2)
    after = held_by(engine)
    engine.destroy()
    return same, all(torch.equal(value, after.working[name]) for name, value in before.working.items())


@pytest.mark.parametrize(
    ("wrote", "reads", "refused"),
    [
        ("SGD", "AdamW", "betas"),
        ("AdamW", "SGD", "momentum"),
        ("Adam", "AdamW", ""),
        ("RMSprop", "Adagrad", "lr_decay"),
    ],
)
def test_another_optimizer_is_told_by_its_groups(wrote: str, reads: str, refused: str) -> None:
    """At the first step it would miss its states, on ranks that own some, while the others wait."""
    one = [torch.nn.Parameter(torch.ones(2))]
    here = getattr(torch.optim, reads)(one, lr=0.1)
    groups = getattr(torch.optim, wrote)(one, lr=0.1).state_dict()["param_groups"]
    stored = [{key: value for key, value in group.items() if key != "params"} for group in groups]
    with pytest.raises(CheckpointError, match=refused) if refused else nullcontext():
        refuse_another_optimizer(here, stored)
    ours = {key: value for key, value in here.param_groups[0].items() if key != "params"}
    refuse_another_optimizer(here, [{**ours, "initial_lr": 0.1, "name": "head"}])  # a scheduler's, the user's
    refuse_another_optimizer(here, [{key: ours[key] for key in ("lr", "weight_decay")}])  # an older release's
    refuse_another_optimizer(here, [{}])  # a new group


def test_groups_stay_the_same_objects(written: Written) -> None:
    assert pool(2).run(_edits, READER, str(written[0])) == [(True, True)] * 2


def _accumulating(spec: Spec, folder: str | None, load: bool, dirty: bool) -> Any:
    """Two steps of two micro-batches (of one row set each), perhaps after a load and a half-done window."""
    config = {"gradient_accumulation_steps": 2, "train_micro_batch_size_per_gpu": runs.ROWS // spec.world // 2}
    engine = make_engine(spec.but(extra=config), seed=99)
    rank, world = dist.get_rank(), dist.get_world_size()

    def micro(step: int, half: int) -> None:
        rows = tokens(step).chunk(world)[rank].chunk(2)[half]
        engine.backward(runs.loss_of(engine(rows[:, :-1]), rows))
        engine.step()

    if dirty:
        micro(60, 0)
    if load:
        engine.load_checkpoint(folder)
    for step in (2, 3):
        micro(step, 0)
        micro(step, 1)
    held, steps = held_by(engine), engine.global_steps
    engine.destroy()
    return held, steps


def test_a_window_begins_after_a_load(tmp_path: Path) -> None:
    """With other accumulation than the run that saved, and in the middle of a window, whose gradients are dropped."""
    pool(2).run(saved_by, WRITER, str(tmp_path), steps=1)
    clean = pool(2).run(_accumulating, READER, str(tmp_path), True, False)
    dirty = pool(2).run(_accumulating, READER, str(tmp_path), True, True)
    assert [steps for _, steps in clean + dirty] == [3] * 4
    want, found = merged([held for held, _ in clean]), merged([held for held, _ in dirty])
    assert all(torch.equal(value, found[name][key]) for name, values in want.items() for key, value in values.items())


def _read_after(spec: Spec, folder: str) -> Any:
    """The getters and gathered parameters show what was loaded, at once."""
    engine = make_engine(spec, seed=99)
    engine.load_checkpoint(folder)
    found = {}
    for name, param in engine.module.named_parameters():
        if not param.requires_grad:
            continue
        master = deepspeed.utils.safe_get_full_fp32_param(param)
        moment = deepspeed.utils.safe_get_full_optimizer_state(param, "exp_avg")
        with deepspeed.zero.GatheredParameters([param]):
            found[name] = master, moment, param.detach().clone()
    engine.destroy()
    return found


@pytest.mark.parametrize("spec", [READER, BACK] if NIGHTLY else [READER], ids=str)
def test_reading_right_after_a_load(spec: Spec, written: Written) -> None:
    want = merged(written[1])
    for found in pool(2).run(_read_after, spec, str(written[0])):
        assert found.keys() == want.keys()
        for name, (master, moment, working) in found.items():
            assert torch.equal(master, want[name]["master"]) and torch.equal(working, want[name]["master"])
            assert torch.equal(moment, want[name]["exp_avg"])


def _averaged(spec: Spec) -> dict[str, torch.Tensor]:
    """The recipe of docs/checkpoints.md."""
    engine = make_engine(spec)
    average: dict[str, torch.Tensor] = {}
    for step in range(3):
        train_step(engine, step)
        for name, param in engine.module.named_parameters():
            if param.requires_grad:
                with deepspeed.zero.GatheredParameters([param]):
                    average.setdefault(name, param.detach().clone()).lerp_(param.detach(), 0.1)
    engine.destroy()
    return average


def test_an_average_of_the_weights() -> None:
    """Case G8: on every rank, of sharded parameters, equal to that of one process."""
    model = make_model()
    optimizer = runs.make_optimizer(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    want: dict[str, torch.Tensor] = {}
    for step in range(3):
        rows = tokens(step)
        optimizer.zero_grad()
        runs.loss_of(model(rows[:, :-1]), rows).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.7)
        optimizer.step()
        scheduler.step()
        for name, param in model.named_parameters():
            if param.requires_grad:
                want.setdefault(name, param.detach().clone()).lerp_(param.detach(), 0.1)
    for found in pool(2).run(_averaged, READER):
        assert found.keys() == want.keys()
        for name, value in want.items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


def _scaled(spec: Spec, folder: str, load: bool) -> Any:
    from deepspeed.accelerator import get_accelerator

    config = {"fp16": {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2, "hysteresis": 1}}
    with mock.patch.object(type(get_accelerator()), "is_fp16_supported", return_value=True):
        engine = make_engine(spec.but(extra=config))
        if load:
            engine.load_checkpoint(folder)
            before = engine.optimizer.loss_scale
            train_step(engine, 3)
        else:
            for step in range(3):
                train_step(engine, step)
            engine.save_checkpoint(folder)
            before = engine.optimizer.loss_scale
            train_step(engine, 3)
        found = before, engine.optimizer.loss_scale, engine.global_steps, engine.skipped_steps
        engine.destroy()
    return found


def test_the_loss_scale_goes_on(tmp_path: Path) -> None:
    """fp16 with a scale that doubles every second step: the window's count goes on, too."""
    straight = pool(2).run(_scaled, WRITER, str(tmp_path), False)
    assert straight[0][0] > 256.0
    assert pool(2).run(_scaled, READER, str(tmp_path), True) == straight


def _adafactor(spec: Spec, folder: str, load: bool) -> Any:
    with mock.patch.object(runs, "make_optimizer", lambda model: torch.optim.Adafactor(model.parameters(), lr=5e-3)):
        engine = make_engine(spec, seed=99 if load else 7)
        if load:
            engine.load_checkpoint(folder)
        else:
            train_step(engine, 0)
            train_step(engine, 1)
            engine.save_checkpoint(folder)
        losses = [train_step(engine, step) for step in (2, 3)]
        states = {
            (master.slot.piece.param.name, key): value.clone()
            for master in engine.optimizer.states.all_masters()
            for key, value in engine.optimizer.state[master.value].items()
        }
        engine.destroy()
    return losses, states


def test_states_that_are_not_elementwise(tmp_path: Path) -> None:
    """Adafactor's rows and columns, from an owner of whole tensors to another."""
    straight = pool(2).run(_adafactor, WRITER, str(tmp_path), False)
    resumed = pool(1).run(_adafactor, Spec(1, 1, "ddp"), str(tmp_path), True)
    torch.testing.assert_close(resumed[0][0], straight[0][0], rtol=1e-6, atol=0.0)
    want = {key: value for _, states in straight for key, value in states.items()}
    assert want.keys() == resumed[0][1].keys() and any(key == "row_var" for _, key in want)
    for key, value in want.items():
        torch.testing.assert_close(resumed[0][1][key], value, rtol=1e-5, atol=1e-7)


# ---- bytes -------------------------------------------------------------------------------------------------


class Large(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(500, 700)
        self.last = nn.Linear(700, 500)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(rows))


def _bytes(spec: Spec, folder: str) -> None:
    with mock.patch.object(runs, "Net", Large):
        engine = make_engine(spec)
    engine.backward(engine(torch.ones(2, 500)).square().mean())
    engine.step()
    engine.save_checkpoint(folder, "x")
    engine.destroy()


@pytest.mark.parametrize("spec", [Spec(4, 2, "ddp"), Spec(4, 2, "mics")][: 2 if NIGHTLY else 1], ids=str)
def test_one_copy_is_written_by_all_ranks_together(spec: Spec, tmp_path: Path) -> None:
    pool(4).run(_bytes, spec, str(tmp_path))
    sizes = [path.stat().st_size for path in (tmp_path / "x").glob("*.distcp")]
    everything = sum(path.stat().st_size for path in (tmp_path / "x").iterdir())
    copy = 12 * sum(p.numel() for p in Large().parameters())
    assert copy <= everything <= 1.02 * copy
    assert len(sizes) == 4 and max(sizes) <= 0.34 * copy
