"""The half of scripts/gpu_check.sh that needs no GPU, and that its planted error is one."""

from __future__ import annotations

import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from scripts.gpu_check import checked
from tests.support.pool import RankError, pool

ROOT = Path(__file__).resolve().parents[2]


def test_the_cpu_half() -> None:
    """As the shell script calls it."""
    command = [sys.executable, "-m", "scripts.gpu_check", "losses", "--device", "cpu", "--ranks", "2", "--steps", "2"]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("losses as on one process") == 2


def test_a_missing_wait_is_caught() -> None:
    arguments = Namespace(check="losses", ranks=2, steps=2, plant_missing_wait=False)
    pool(2).run(checked, arguments)
    with pytest.raises(RankError):
        pool(2).run(checked, Namespace(**{**vars(arguments), "plant_missing_wait": True}), timeout=20)
