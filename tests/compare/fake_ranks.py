"""Ranks that speak the protocol of `deepspeed_amsp.compare.ranks` and train nothing.

What they do with a strategy is in AMSP_FAKE, JSON: "die" or "hang" by name of strategy, "absent" by environment.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from deepspeed_amsp.compare.ranks import Job, tell

PHASES = {"forward": 0.1, "backward": 0.2, "update": 0.1}


def orders(given: str | list[dict[str, Any]]) -> Any:
    if isinstance(given, list):
        yield from [*given, None]
        return
    path, done = Path(given), 0
    while True:
        lines = path.read_text(encoding="utf-8").splitlines()
        while done < len(lines):
            yield json.loads(lines[done])
            done += 1
        time.sleep(0.005)


def obey(order: dict[str, Any], wish: str | None, first: bool) -> None:
    if wish == "hang":
        time.sleep(600)
    if wish == "die":
        raise ValueError(f"{order['strategy']} cannot train")
    if first:
        tell(order=order, step_s=[0.4], phases_s=PHASES, losses=[2.0], sent_bytes_per_node=None)


def main(job: Job) -> None:
    wishes = json.loads(os.environ["AMSP_FAKE"])
    if wishes.get(job.environment) == "absent":
        raise ImportError("no such release")
    first = os.environ["RANK"] == "0"
    if first:
        tell(ready=job.environment)
    for order in orders(job.orders):
        if order is None:
            return
        obey(order, wishes.get(order["strategy"]), first)


if __name__ == "__main__":
    main(Job.read(Path(sys.argv[-1])))
