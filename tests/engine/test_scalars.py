"""What monitors show beside DeepSpeed's scalars: bytes by formula, gathers issued ahead, exposed communication."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from tests.config.trial import start, window
from tests.engine.test_seam import config
from tests.support import models
from tests.support.pool import pool

WORLD, DELAY_S = 2, 0.02
MATRICES = models.Even.LAYERS
MODEL_BYTES = MATRICES * models.Even.WIDTH**2 * 4


def _scalars(changes: dict[str, Any], trace: str | None) -> dict[str, float]:
    """Of the third step, on a slow link, recorded or not."""
    from deepspeed_amsp import mesh
    from tests.support import slow

    mesh.GROUP_BACKEND = slow.NAME
    slow.configure(DELAY_S)
    ds_config = config(**({"zero_optimization": {"stage": 3}, "amsp": {"sharding": "zero3"}} | changes))
    engine = start(ds_config, "even")
    with engine.amsp.tracing(trace) if trace else nullcontext():
        for step in range(2):
            window(engine, step)
        engine.amsp.scalars()  # counts begin anew
        window(engine, 2)
        found: dict[str, float] = engine.amsp.scalars()
    engine.destroy()
    mesh.GROUP_BACKEND = None
    return found


AT_ONCE = {"amsp": {"sharding": "zero3", "overlap": {"gather": False}}}


@pytest.mark.parametrize("ahead", [True, False])
def test_scalars(ahead: bool, tmp_path: Path) -> None:
    for found in pool(WORLD).run(_scalars, {} if ahead else AT_ONCE, str(tmp_path / "t.json")):
        # Once a pass: in the forward and, freed after it, in the backward.
        assert found["bytes_gather"] == 2 * MODEL_BYTES
        assert found["bytes_param_reduce"] == MODEL_BYTES
        if ahead:
            assert found["gather_hits"] >= 0.5
        else:
            assert found["gather_hits"] == 0
            # The delay begins when a gather is issued, a moment before anybody waits for it.
            assert found["exposed_ms_gather"] >= 0.9 * 2 * MATRICES * 1e3 * DELAY_S


def test_exposed_communication_without_a_trace() -> None:
    """wall_clock_breakdown counts it as well."""
    for found in pool(WORLD).run(_scalars, AT_ONCE | {"wall_clock_breakdown": True}, None):
        assert found["exposed_ms_gather"] >= 0.9 * 2 * MATRICES * 1e3 * DELAY_S
        assert found["exposed_ms_param_reduce"] > 0 and found["exposed_ms_publish"] == 0
