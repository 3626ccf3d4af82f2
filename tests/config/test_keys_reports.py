"""Every key that an amsp run honours, compared with DeepSpeed itself: logs, monitors, profilers, data, files."""

from __future__ import annotations

import contextlib
import copy
import csv
import gc
import io
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from deepspeed_amsp.trace.breakdown import UPDATE, exposed
from deepspeed_amsp.trace.reading import KINDS
from tests.config.observe import configs, listening
from tests.config.trial import merged, start, window
from tests.support import models
from tests.support.pool import pool

WORLD = 2

# ---- the log -----------------------------------------------------------------------------------------------------


def _words(cases: Mapping[str, Mapping[str, Any]], windows: int) -> dict[str, tuple[list[str], list[str]]]:
    """(log, standard output) of an engine from its start to its end, with other numbers than counts taken out."""
    found = {}
    for name, config in cases.items():
        printed = io.StringIO()
        with listening() as lines, contextlib.redirect_stdout(printed):
            engine = start(copy.deepcopy(dict(config)))
            for step in range(windows):
                window(engine, step)
            engine.destroy()
        found[name] = tuple([re.sub(r"\d+\.\d+(e[-+]\d+)?", "#", line) for line in text]
                            for text in (lines, printed.getvalue().splitlines()))  # fmt: skip
    return found  # type: ignore[return-value]


def test_steps_per_print() -> None:
    intervals = [1, 2, 1e5, float("inf")]
    cases = {
        f"{interval} {label}": config
        for interval in intervals
        for label, config in configs({"steps_per_print": interval}).items()
    }
    for rank, found in enumerate(pool(WORLD).run(_words, cases, 4)):
        for interval in intervals:
            ours_, theirs = (
                [line for line in found[f"{interval} {label}"][0] if "step=" in line] for label in ("zero1", "plain")
            )
            assert ours_ == theirs
            progress = [re.findall(r"\] step=(\d+)", line) for line in ours_]
            expected = {1: 5, 2: 3}.get(int(min(interval, 9)), 1) if rank == 0 else 0  # with the one at the start
            assert sum(map(len, progress)) == expected


def _log_levels(cases: Mapping[str, Mapping[str, Any]]) -> dict[str, int]:
    from deepspeed.utils import logger

    found = {}
    for name, config in cases.items():
        level = logger.level
        engine = start(copy.deepcopy(dict(config)))
        found[name] = logger.level
        engine.destroy()
        logger.setLevel(level)
    return found


@pytest.mark.parametrize("level", ["debug", "warning"])
def test_log_level(level: str) -> None:
    for found in pool(WORLD).run(_log_levels, configs({"log_level": level})):
        assert found["zero1"] == found["plain"] == {"debug": 10, "warning": 30}[level]


def test_memory_breakdown() -> None:
    """The engine's own lines; the optimizer's are about DeepSpeed's inside."""
    for rank, found in enumerate(pool(WORLD).run(_words, configs({"memory_breakdown": True}), 1)):
        own = [
            [line for line in found[label][1] if line.startswith(("Engine ", "DeepSpeed Engine"))] for label in found
        ]
        assert own[0] == own[1]
        assert bool(own[0]) == (rank == 0)


def test_dump_state() -> None:
    cases = configs({"dump_state": True}) | {"off": configs({})["zero1"]}
    first = pool(WORLD).run(_words, cases, 1)[0]
    shown = {label: [line for line in log if "DeepSpeedEngine:" in line] for label, (log, _) in first.items()}
    assert shown["zero1"] == shown["plain"]
    assert len(shown["zero1"]) == len(shown["off"]) + 1


def _timers(cases: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Per case: timers that a script can ask for, lines of timers with their milliseconds, the throughput timer."""
    found = {}
    for name, config in cases.items():
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):  # not the log: DeepSpeed prints them at any log level
            engine = start(copy.deepcopy(dict(config)))
            for step in range(2):
                window(engine, step)
        settings = engine.tput_timer.config
        lines = [line for line in printed.getvalue().splitlines() if "time (ms)" in line]
        timed = [{key: float(ms) for key, ms in re.findall(r"(\w+): ([\d.]+)", line)} for line in lines]
        throughput = (settings.enabled, settings.synchronized, engine.tput_timer.started)
        found[name] = (sorted(engine.get_wall_clock_timers()), timed, throughput)
        engine.destroy()
    return found


def test_wall_clock_breakdown_and_throughput_timers() -> None:
    """DeepSpeed's lines, and once a step one of ours, whose times lie within DeepSpeed's."""
    changes = {"wall_clock_breakdown": True, "timers": {"throughput": {"enabled": False, "synchronized": False}}}
    changes["gradient_accumulation_steps"] = 2
    cases = configs(changes, "plain", "zero1", "zero3") | {"off": configs({})["zero1"]}
    for rank, found in enumerate(pool(WORLD).run(_timers, cases)):
        assert found["off"][:2] == ([], [])
        # DeepSpeed's optimizer prints a line of its own; the engine's are those of micro-batches and of steps.
        theirs = [set(line) for line in found["plain"][1] if not set(line) & {UPDATE}]
        assert len(theirs) == (6 if rank == 0 else 0)
        for label in ("zero1", "zero3"):
            asked, lines, throughput = found[label]
            assert (asked, throughput) == (found["plain"][0], found["plain"][2])
            assert asked and throughput == (False, False, False)
            mine = [line for line in lines if UPDATE in line]
            assert [set(line) for line in lines if line not in mine] == theirs
            assert len(mine) == (2 if rank == 0 else 0)
            for line, step in zip(mine, [line for line in lines if "step" in line], strict=True):
                assert set(line) == {UPDATE, *map(exposed, KINDS)}
                assert 0 < line[UPDATE] <= step["step"]
                assert sum(line.values()) <= step["fwd"] + step["bwd"] + step["step"] + 0.1  # two decimals each


# ---- monitors, profilers -----------------------------------------------------------------------------------------


def _csv(cases: Mapping[str, Mapping[str, Any]], directory: str) -> None:
    for name, config in cases.items():
        monitored = merged(config, {"csv_monitor": {"enabled": True, "output_path": directory, "job_name": name}})
        engine = start(monitored)
        for step in range(3):
            window(engine, step)
        engine.destroy()
        dist.barrier()


def test_csv_monitor(tmp_path: Path) -> None:
    off: dict[str, Any] = {name: {"enabled": False} for name in ("tensorboard", "wandb", "comet")}
    decay = {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 2, "total_num_steps": 6}}
    changes = off | {"scheduler": decay, "gradient_accumulation_steps": 2}
    pool(WORLD).run(_csv, configs(changes, "plain", "zero1", "zero3"), str(tmp_path))
    files = {label: sorted(path.name for path in (tmp_path / label).iterdir()) for label in ("plain", "zero1", "zero3")}
    own = {label: [name for name in files[label] if "_AMSP_" in name] for label in files}
    assert own["plain"] == [] and "Train_AMSP_bytes_grad_reduce.csv" in own["zero1"]
    assert {"Train_AMSP_bytes_gather.csv", "Train_AMSP_gather_hits.csv"} <= set(own["zero3"])
    for label in ("zero1", "zero3"):
        assert [name for name in files[label] if name not in own[label]] == files["plain"]
    assert "Train_Samples_lr.csv" in files["plain"]
    for name in files["plain"]:
        rows = {label: list(csv.reader((tmp_path / label / name).open())) for label in files}
        theirs = rows["plain"]
        for label in ("zero1", "zero3"):
            mine = rows[label]
            assert [row[0] for row in mine] == [row[0] for row in theirs]
            for row, expected in zip(mine[1:], theirs[1:], strict=True):
                assert float(row[1]) == pytest.approx(float(expected[1]), rel=1e-5)


def _profiled(cases: Mapping[str, Mapping[str, Any]], directory: str) -> None:
    for name, config in cases.items():
        block = {"enabled": True, "profile_step": 1, "output_file": f"{directory}/{name}.txt", "detailed": True}
        engine = start(merged(config, {"flops_profiler": block}))
        for step in range(3):
            window(engine, step)
        engine.destroy()
        dist.barrier()


def test_flops_profiler(tmp_path: Path) -> None:
    pool(WORLD).run(_profiled, configs({}, "plain", "zero1", "zero3"), str(tmp_path))
    counted = {}
    for label in ("plain", "zero1", "zero3"):
        text = (tmp_path / f"{label}.txt").read_text()
        assert "Flops Profiler" in text
        counted[label] = {
            line.split(":")[0].strip(): line.split(":")[-1].strip()
            for line in text.splitlines()
            if line.startswith(("fwd MACs per GPU", "params per GPU", "data parallel size", "world size"))
        }
    assert counted["zero1"] == counted["plain"]
    assert len(counted["plain"]) >= 3
    assert counted["zero3"]["fwd MACs per GPU"] == counted["plain"]["fwd MACs per GPU"]


def _comms(cases: Mapping[str, Mapping[str, Any]]) -> dict[str, list[str]]:
    """Names of collectives that DeepSpeed's communication logger has seen in a window after the start."""
    import deepspeed.comm.comm as comm

    found = {}
    for name, config in cases.items():
        engine = start(merged(config, {"comms_logger": {"enabled": True, "prof_all": True, "verbose": False}}))
        try:
            comm.comms_logger.comms_dict.clear()
            window(engine)
            found[name] = sorted(comm.comms_logger.comms_dict)
        finally:
            engine.destroy()
            comm.comms_logger.enabled = False
            comm.comms_logger.comms_dict.clear()
    return found


@pytest.mark.parametrize(("label", "kinds"), [("zero1", {"all_reduce", "broadcast"}), ("zero3", {"all_gather"})])
def test_comms_logger(label: str, kinds: set[str]) -> None:
    """Whatever the kinds that a plan uses are called, what training sends is logged."""
    for found in pool(WORLD).run(_comms, configs({}, "plain", label)):
        assert found["plain"], "the comparison would prove nothing"
        for kind in kinds:
            assert any(kind in name for name in found[label]), found[label]


# ---- python and data ----------------------------------------------------------------------------------------------


def _collecting(cases: Mapping[str, Mapping[str, Any]]) -> dict[str, tuple[bool, bool]]:
    found = {}
    for name, config in cases.items():
        engine = start(copy.deepcopy(dict(config)))
        during = gc.isenabled()
        engine.destroy()
        found[name] = (during, gc.isenabled())
        gc.enable()
    return found


def test_disable_python_gc() -> None:
    for found in pool(WORLD).run(_collecting, configs({"disable_python_gc": True})):
        assert found["zero1"] == found["plain"] == (False, True)


def _batches(cases: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Batches of the engine's loader; read in this process, for a worker of the pool may have no children."""
    found = {}
    for name, config in cases.items():
        import deepspeed

        import deepspeed_amsp  # noqa: F401

        model = nn.Linear(1, 1)
        data = torch.utils.data.TensorDataset(torch.arange(11).float()[:, None])
        engine, _, loader, _ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), training_data=data, config=copy.deepcopy(dict(config))
        )
        same = engine.deepspeed_io(data, num_local_io_workers=0)
        found[name] = (len(loader), [[int(value) for value in batch[0].flatten()] for batch in same])
        engine.destroy()
    return found


@pytest.mark.parametrize("drop", [True, False])
def test_dataloader_drop_last(drop: bool) -> None:
    for found in pool(WORLD).run(
        _batches, configs({"dataloader_drop_last": drop, "train_micro_batch_size_per_gpu": 4})
    ):
        assert found["zero1"] == found["plain"]
        length, batches = found["zero1"]
        assert length == len(batches)
        assert [len(batch) for batch in batches] == ([4] if drop else [4, 2])


# ---- activation checkpointing --------------------------------------------------------------------------------------


class Checkpointed(nn.Module):
    """A block under DeepSpeed's own checkpointing."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(models.VOCABULARY, 12)
        self.block = nn.Sequential(nn.Linear(12, 20), nn.GELU(), nn.Linear(20, 12))
        self.head = nn.Linear(12, models.VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        import deepspeed

        return self.head(deepspeed.checkpointing.checkpoint(self.block, self.embed(tokens)))


def _recomputing(cases: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    import deepspeed
    from deepspeed.runtime.activation_checkpointing import checkpointing

    import deepspeed_amsp  # noqa: F401

    found = {}
    for name, config in cases.items():
        torch.manual_seed(3)
        model = Checkpointed()
        config = copy.deepcopy(dict(config))
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        deepspeed.checkpointing.configure(None, deepspeed_config=config)
        read = engine._config.activation_checkpointing_config
        losses = [window(engine, step) for step in range(3)]
        found[name] = (losses, checkpointing.PROFILE_TIME, read.profile, read.number_checkpoints)
        engine.destroy()
        deepspeed.checkpointing.reset()
        checkpointing.PROFILE_TIME = False
    return found


def test_activation_checkpointing() -> None:
    changes = {"activation_checkpointing": {"profile": True, "number_checkpoints": 1}}
    for found in pool(WORLD).run(_recomputing, configs(changes, "plain", "zero1", "zero3")):
        losses, *settings = found["plain"]
        assert settings == [True, True, 1]
        for label in ("zero1", "zero3"):
            assert found[label][0] == pytest.approx(losses, rel=1e-5)
            assert list(found[label][1:]) == settings
