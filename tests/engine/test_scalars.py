"""What monitors show beside DeepSpeed's scalars: bytes by formula, gathers issued ahead, exposed communication."""

from __future__ import annotations

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


def _scalars(block: dict[str, Any], trace: str) -> dict[str, float]:
    """Of the third step, recorded on a slow link."""
    from deepspeed_amsp import mesh
    from tests.support import slow

    mesh.GROUP_BACKEND = slow.NAME
    slow.configure(DELAY_S)
    ds_config = config(zero_optimization={"stage": 3}, amsp={"sharding": "zero3", **block})
    engine = start(ds_config, "even")
    with engine.amsp.tracing(trace):
        for step in range(2):
            window(engine, step)
        engine.amsp.scalars()  # counts begin anew
        window(engine, 2)
        found: dict[str, float] = engine.amsp.scalars()
    engine.destroy()
    mesh.GROUP_BACKEND = None
    return found


@pytest.mark.parametrize("ahead", [True, False])
def test_scalars(ahead: bool, tmp_path: Path) -> None:
    block = {} if ahead else {"overlap": {"gather": False}}
    for found in pool(WORLD).run(_scalars, block, str(tmp_path / "t.json")):
        # Once a pass: in the forward and, freed after it, in the backward.
        assert found["bytes_gather"] == 2 * MODEL_BYTES
        assert found["bytes_param_reduce"] == MODEL_BYTES
        if ahead:
            assert found["gather_hits"] >= 0.5
        else:
            assert found["gather_hits"] == 0
            # The delay begins when a gather is issued, a moment before anybody waits for it.
            assert found["exposed_ms_gather"] >= 0.9 * 2 * MATRICES * 1e3 * DELAY_S
