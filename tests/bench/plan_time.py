"""How long ``amsp plan`` takes for llama-7b on 128 nodes, Python's start included: ``python -m tests.bench.plan_time``.

Wanted: under 3 s. CPU seconds are printed beside, as they depend less on what else runs.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

ROUNDS = 5
JOB = ["--model", "llama-7b", "--nodes", "128", "--gpus-per-node", "8", "--global-batch-tokens", "4194304"]


def main() -> None:
    command = [sys.executable, "-m", "deepspeed_amsp.cli", "plan", *JOB]
    print("wall s   CPU s")
    for _ in range(ROUNDS):
        start, before = time.perf_counter(), os.times()
        subprocess.run(command, cwd=Path(__file__).parents[2], stdout=subprocess.DEVNULL, check=True)
        after = os.times()
        used = after.children_user + after.children_system - before.children_user - before.children_system
        print(f"{time.perf_counter() - start:6.2f}  {used:6.2f}")


if __name__ == "__main__":
    main()
