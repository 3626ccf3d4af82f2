"""TensorBoard as people look at it: DeepSpeed's scalars as without a block, and this package's beside them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.config.observe import configs
from tests.config.trial import merged, start, window
from tests.integration import tiny
from tests.support.pool import WorkerPool

pytestmark = [pytest.mark.slow, tiny.needs("tensorboard")]

WORLD, WINDOWS = 2, 3


def _train(cases: dict[str, Any], folder: str) -> None:
    for name, config in cases.items():
        board = {"enabled": True, "output_path": folder, "job_name": name}
        engine = start(merged(config, {"tensorboard": board, "wall_clock_breakdown": True}))
        for step in range(WINDOWS):
            window(engine, step)
        engine.destroy()


def _scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Tag -> (samples, value) in the order of writing."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard(workers: Callable[[int], WorkerPool], tmp_path: Path) -> None:
    workers(WORLD).run(_train, configs({}, "plain", "zero3"), str(tmp_path))
    plain, ours = (_scalars(tmp_path / name) for name in ("plain", "zero3"))
    own = {tag for tag in ours if tag.startswith("Train/AMSP/")}
    assert set(ours) - own == set(plain) and "Train/Samples/lr" in plain
    assert {f"Train/AMSP/{name}" for name in ("bytes_gather", "gather_hits", "exposed_ms_gather")} <= own
    for tag, points in plain.items():
        assert [samples for samples, _ in ours[tag]] == [samples for samples, _ in points]
        if "elapsed_time" not in tag:
            assert [value for _, value in ours[tag]] == pytest.approx([value for _, value in points], rel=1e-5)
    for tag in own - {"Train/AMSP/gather_hits"}:
        assert [samples for samples, _ in ours[tag]] == [samples for samples, _ in plain["Train/Samples/lr"]]
