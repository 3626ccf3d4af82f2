"""What an engine says when it starts, and `amsp report`: few lines, on rank 0, none per step (case J1)."""

from __future__ import annotations

import io
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from deepspeed_amsp.about import group_lines, memory_line
from deepspeed_amsp.cli.app import app
from deepspeed_amsp.plan.factors import ShardFactor, Sharding
from tests.config.observe import listening
from tests.config.trial import start, window
from tests.engine.test_bad_input import amsp
from tests.engine.test_seam import config
from tests.support.pool import pool


def _said(ds_config: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Lines of ours until the engine stands, and in two windows."""
    with listening() as lines:
        engine = start(dict(ds_config))
        first = list(lines)
        for step in range(2):
            window(engine, step)
        rest = lines[len(first) :]
        engine.destroy()
    return [line for line in first if "amsp:" in line], [line for line in rest if "amsp:" in line]


def test_at_most_ten_lines_on_rank_0_and_none_per_step() -> None:
    """Without one line more of the planner's, another group's and an accelerator's each, which others may have."""
    odd = {"gradient_cliping": 1.0, "low_cpu_mem_usage": True, "stage3_max_live_parameters": 1, "overlap_comm": True}
    ds_config = config(amsp=amsp("mics"), zero_optimization={"stage": 3}, gradient_clipping=None, **odd)
    (begun, later), *others = pool(4).run(_said, ds_config)
    assert 5 <= len(begun) <= 7, begun
    assert later == [] and others == [([], [])] * 3
    assert any("stage 3" in line and "units" in line for line in begun)
    assert any("2 groups of 2 ranks that share the parameters: 0 1" in line for line in begun)
    assert any("MB at rest on rank 0" in line for line in begun)
    assert sum("made in" in line for line in begun) == 1  # how long it took (case J3)
    (idle,) = [line for line in begun if "no effect" in line]
    assert all(f'"{key}"' in idle for key in odd)


def _shown(cases: dict[str, tuple[dict[str, Any], str]]) -> dict[str, tuple[int, bool]]:
    """Lines of ours that get past DeepSpeed's logger and its handler, and whether those are what they were."""
    from deepspeed.utils import logger

    found = {}
    for name, (ds_config, level) in cases.items():
        screen, kept, before = io.StringIO(), logger.handlers[:], logger.level
        handler = logging.StreamHandler(screen)
        handler.setLevel("WARNING")
        logger.handlers[:] = [handler]
        logger.setLevel(level)
        start(ds_config).destroy()
        lines = [line for line in screen.getvalue().splitlines() if "amsp:" in line]
        found[name] = (len(lines), (logger.level, handler.level) == (logging.getLevelName(level), logging.WARNING))
        logger.handlers[:] = kept
        logger.setLevel(before)
    return found


def test_the_start_is_seen_at_deepspeeds_level_unless_a_level_is_asked_for() -> None:
    ds_config = config(amsp=amsp("zero1", gpus_per_node=1))
    cases = {
        "default": (ds_config, "WARNING"),
        "a program's": (ds_config, "ERROR"),
        "asked for": (ds_config | {"log_level": "warning"}, "WARNING"),
        "asked for more": (ds_config | {"log_level": "info"}, "WARNING"),
    }
    first, second = pool(2).run(_shown, cases)
    assert {name: bool(lines) for name, (lines, _) in first.items()} == {
        "default": True, "a program's": False, "asked for": False, "asked for more": True,
    }  # fmt: skip
    assert [lines for lines, _ in second.values()] == [0] * 4
    assert first["default"][1] and second["default"][1], "the level is DeepSpeed's again"


def test_groups_of_a_plan() -> None:
    """On 2 nodes of 4 with P 2, OS 4: pairs hold the parameters, the pairs of a node the states, nodes are copies."""
    one, node = ShardFactor(2, 1), ShardFactor(4, 1)
    assert list(group_lines(Sharding(one, one, node, ShardFactor(4, 2)), tuple(range(8)))) == [
        "4 groups of 2 ranks that share the parameters: 0 1, ...",
        "4 groups of 2 ranks that own different optimizer states: 0 2, ...",
        "4 groups of 2 ranks that are copies, which only gradients cross: 0 4, ...",
    ]


def test_one_group() -> None:
    whole = ShardFactor(2, 2)
    assert list(group_lines(Sharding(whole, whole, whole, whole), (0, 2, 1, 3))) == [
        "1 group of 4 ranks that share the parameters: 0 2 1 3"
    ]


def test_memory_line() -> None:
    assert memory_line(3, {"P": 2_000_000, "master": 1_500_000_000}) == (
        "MB at rest on rank 3: P 2.0, master 1,500.0; together 1,502.0"
    )


def _report(folder: Path, *words: str, **changes: Any) -> tuple[int, str]:
    path = folder / "ds.json"
    path.write_text(json.dumps(config(**changes)))
    result = CliRunner().invoke(app, ["report", str(path), *words])
    return result.exit_code, result.output + result.stderr


def test_report_of_a_config(tmp_path: Path) -> None:
    block = {"sharding": {"optimizer_states": [8, 1]}}
    code, said = _report(tmp_path, "--nodes", "2", amsp=block, gradient_cliping=0.5)
    assert code == 0, said
    for words in (
        "deepspeed 0.19",
        "torch 2.",
        "plan on 2 nodes of 8",
        "2 groups of 8 ranks that own different optimizer states: 0 1 2 3 4 5 6 7",
        "8 groups of 2 ranks that are copies, which only gradients cross: 0 8",
        'did you mean "gradient_clipping"',
    ):
        assert words in said, said


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"amsp": {"sharding": "zero3"}}, ["zero_optimization.stage", '{"stage": 3}']),
        ({"amsp": {"sharding": {"optimizer_states": [3, 1]}}}, ["optimizer_states", "Eq."]),
        ({"amsp": {"sharding": "auto"}}, ["amsp.sharding", "search"]),
    ],
)
def test_report_of_a_wrong_config(tmp_path: Path, changes: dict[str, Any], words: list[str]) -> None:
    code, said = _report(tmp_path, **changes)
    assert code == 1
    for word in words:
        assert word in said
