"""Checkpoints that DeepSpeed's own ZeRO has written, loaded by an amsp engine, and what is refused of them."""

from __future__ import annotations

import shutil
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import deepspeed
import pytest
import torch
from deepspeed.checkpoint import ds_to_universal
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from torch import nn

from deepspeed_amsp.checkpoint.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint as by_our_function
from tests.checkpoint import runs
from tests.checkpoint.runs import Net, Spec, held_by, make_engine, merged, train_step
from tests.checkpoint.test_bad_input import everywhere, refused_loads, save
from tests.semantics.harness import NIGHTLY
from tests.support.pool import pool

SCHEDULER = {"type": "WarmupLR", "params": {"warmup_min_lr": 0.0, "warmup_max_lr": 0.02, "warmup_num_steps": 9}}
EXTRA = {"scheduler": SCHEDULER}
BEFORE, AFTER = 3, 3


class Plain(Net):
    """Without a 0-dim parameter, which DeepSpeed 0.19.8 does not take."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([1.5]))


@dataclass
class Theirs:
    """What DeepSpeed says of its run: states by parameter at the save, losses after it, and the weights at the end."""

    states: Mapping[str, Mapping[str, Any]]
    losses: list[float]
    rate: float
    end: Mapping[str, torch.Tensor]


def _theirs(stage: int, bf16: bool, folder: str) -> Theirs:
    config = Spec(2, 2, "zero1", bf16=bf16, extra=EXTRA).ds_config()
    del config["amsp"]
    config["zero_optimization"] = {"stage": stage}
    with mock.patch.object(runs, "Net", Plain):
        model = runs.make_model()
    engine, *_ = deepspeed.initialize(model=model, optimizer=runs.make_optimizer(model), config=config)
    for step in range(BEFORE):
        train_step(engine, step)
    engine.save_checkpoint(folder, "theirs", client_state={"position": BEFORE})
    # In stages 1 and 2 of DeepSpeed 0.19.8 this fails after a save; there the steps that follow show what was loaded.
    moments = ("exp_avg", "exp_avg_sq") if stage == 3 else ()
    trained = {name: param for name, param in engine.module.named_parameters() if param.requires_grad}
    states = {
        name: {
            "master": deepspeed.utils.safe_get_full_fp32_param(param).clone(),
            **{key: deepspeed.utils.safe_get_full_optimizer_state(param, key) for key in moments},
        }
        for name, param in trained.items()
    }
    losses = [train_step(engine, BEFORE + step) for step in range(AFTER)]
    end = {name: deepspeed.utils.safe_get_full_fp32_param(param).clone() for name, param in trained.items()}
    told = Theirs(states, losses, engine.get_lr()[-1], end)
    engine.destroy()
    return told


def _ours(spec: Spec, folder: str) -> Any:
    with mock.patch.object(runs, "Net", Plain):
        engine = make_engine(spec, seed=99)
        train_step(engine, 50)
        path, client_state = engine.load_checkpoint(folder)
        assert path.endswith("_model_states.pt") and client_state == {"position": BEFORE}
        then, steps = held_by(engine), engine.global_steps
        losses = [train_step(engine, BEFORE + step) for step in range(AFTER)]
        found = then, steps, losses, engine.get_lr()[-1], held_by(engine)
        # And from there on it is a checkpoint of ours.
        engine.save_checkpoint(folder, "ours", save_latest=False)
        engine.load_checkpoint(folder, "ours")
        engine.destroy()
        return found


CASES = [
    (2, False, [Spec(2, 2, "zero2"), Spec(4, 2, ((1, 1), (2, 1), (2, 2)))]),
    (1, True, [Spec(2, 1, "zero3")]),
    (3, False, [Spec(2, 2, "zero1")]),
    *([(1, False, [Spec(4, 2, "zero3")]), (3, True, [Spec(4, 2, "mics")])] if NIGHTLY else []),
]


@pytest.mark.parametrize(
    ("stage", "bf16", "specs"), CASES, ids=[f"zero{s}-{'bf16' if b else 'fp32'}" for s, b, _ in CASES]
)
def test_training_goes_on_as_deepspeeds(stage: int, bf16: bool, specs: list[Spec], tmp_path: Path) -> None:
    """Masters (and moments) are those that DeepSpeed holds and that its tool exports; losses, rate and weights after
    further steps are those of DeepSpeed's own run. For fewer or more ranks than wrote it."""
    theirs: Theirs = pool(2).run(_theirs, stage, bf16, str(tmp_path))[0]
    exported = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path), "theirs")
    with mock.patch.object(runs, "Net", Plain):
        frozen = {name: value.detach() for name, value in runs.make_model().named_parameters()}
    same = by_our_function(str(tmp_path), "theirs")
    assert all(torch.equal(value, same[name]) for name, value in exported.items())
    for spec in specs:
        with mock.patch.object(runs, "Net", Plain):
            told = pool(spec.world).run(_ours, spec.but(bf16=bf16, extra=EXTRA), str(tmp_path))
            then, end = merged([one[0] for one in told]), merged([one[4] for one in told])
        for name, states in theirs.states.items():
            assert torch.equal(then[name]["master"], exported[name]), name
            for key, value in states.items():
                assert torch.equal(then[name][key], value), f"{key} of {name}"
            assert float(then[name]["step"]) == BEFORE
            torch.testing.assert_close(end[name]["master"], theirs.end[name], rtol=1e-5, atol=2e-3 if bf16 else 1e-6)
        for held, steps, losses, rate, _ in told:
            assert steps == BEFORE and rate == pytest.approx(theirs.rate, rel=1e-12)
            # DeepSpeed's tool leaves the frozen ones of stage 1 out; they are as they were made.
            for name in ("fixed.weight", "fixed.bias", "codes"):
                assert torch.equal(held.working[name], frozen[name].to(held.working[name].dtype)), name
            torch.testing.assert_close(losses, theirs.losses, rtol=5e-3 if bf16 else 1e-6, atol=0.0)


def test_deepspeeds_tools_refuse_ours(tmp_path: Path) -> None:
    """They find none of their files, rather than wrong weights (case F6)."""
    pool(2).run(save, Spec(2, 2, "zero1"), str(tmp_path), "ours")
    with pytest.raises(FileNotFoundError):
        get_fp32_state_dict_from_zero_checkpoint(str(tmp_path), "ours")
    with pytest.raises((FileNotFoundError, IndexError)):
        ds_to_universal.main(Namespace(input_folder=str(tmp_path / "ours"), output_folder=str(tmp_path / "universal")))
    assert not (tmp_path / "universal").exists()


def _elastic(folder: str) -> None:
    config = Spec(2, 2, "zero1", extra=EXTRA).ds_config()
    del config["amsp"]
    config["zero_optimization"] = {"stage": 2, "elastic_checkpoint": True}
    with mock.patch.object(runs, "Net", Plain):
        model = runs.make_model()
    engine, *_ = deepspeed.initialize(model=model, optimizer=runs.make_optimizer(model), config=config)
    train_step(engine, 0)
    engine.save_checkpoint(folder, "here")
    engine.destroy()


def _refused(spec: Spec, folders: list[str], elastic: str) -> tuple[list[str], list[str]]:
    with mock.patch.object(runs, "Net", Plain):
        texts = refused_loads(spec, [*folders, elastic])
        engine = make_engine(spec, seed=99)
        engine.load_checkpoint(elastic, "here", load_optimizer_states=False)
        names = sorted(name for name, _, _ in held_by(engine).pieces)
        engine.destroy()
    with_another = refused_loads(spec, [elastic], load_optimizer_states=False)
    return [*texts, *with_another], names


def test_what_cannot_be_loaded_says_why(tmp_path: Path) -> None:
    """Elastic optimizer states (the weights can), universal checkpoints, experts, model parallelism, a lost file,
    another model, and a checkpoint without ZeRO."""
    pool(2).run(_elastic, str(tmp_path / "elastic"))
    kinds = ("universal", "experts", "parallel", "lost", "plain")
    for kind in kinds:
        shutil.copytree(tmp_path / "elastic", tmp_path / kind)
    (tmp_path / "universal" / "here" / "zero").mkdir()
    (tmp_path / "experts" / "here" / "layer_0_expert_0_mp_rank_00_model_states.pt").touch()
    (tmp_path / "parallel" / "here" / "mp_rank_01_model_states.pt").touch()
    (tmp_path / "lost" / "here" / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    for path in (tmp_path / "plain" / "here").glob("*_optim_states.pt"):
        path.unlink()
    words = [
        ("universal checkpoint", "load the one that it was converted from"),
        ("experts", "cannot be loaded"),
        ("model", "parallelism"),
        ("of 1 ranks, and 2 ranks wrote it",),
        ("without ZeRO", "deepspeed.initialize"),
        ("elastic checkpoint", "load_optimizer_states=False"),
        ("of another model", "scale has shape () here and (1,) there"),
    ]
    told = pool(2).run(
        _refused, Spec(2, 2, "zero1"), [str(tmp_path / kind) for kind in kinds], str(tmp_path / "elastic")
    )
    for number, one in enumerate(words):
        everywhere(*one, texts=[texts[number] for texts, _ in told])
    assert "embed.weight" in {name for _, names in told for name in names}
