"""The half of scripts/gpu_check.sh that needs no GPU, and that its planted error is one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def _check(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "scripts.gpu_check", "losses", "--device", "cpu", "--ranks", "2", "--steps", "2"]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*command, *flags], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.parametrize("planted", [False, True])
def test_the_cpu_half(planted: bool) -> None:
    done = _check(*["--plant-missing-wait"] * planted)
    assert (done.returncode == 0) != planted, done.stdout + done.stderr
    if not planted:
        assert done.stdout.count("losses as on one process") == 2
