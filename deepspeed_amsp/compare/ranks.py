"""One rank of a comparison: takes orders, trains what they name, rank 0 prints what came out.

    python -m deepspeed_amsp.compare.ranks JOB.json

All strategies of an environment run in the same processes, one after the other, so that neighbours in time are
compared. Orders come as lines of a file that grows (rank 0 looks), or stand in the job.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from deepspeed_amsp.compare.config import CompareConfig
from deepspeed_amsp.install import stay_out

RESULT = "AMSP-COMPARE "
"""Before the JSON of what rank 0 has to say."""
LOOK_S = 0.01
IDLE_H = 6
"""A rank without an order may wait so long: another environment has its turn."""


@dataclass(frozen=True)
class Order:
    """Train a strategy once. round: see `results.Run`."""

    strategy: str
    micro_batches: int
    nic_mbit: float | None
    round: int

    def line(self) -> str:
        return json.dumps(asdict(self)) + "\n"


@dataclass(frozen=True)
class Job:
    """What a launch is for. orders: a file to follow, or the orders themselves."""

    config: dict[str, Any]
    environment: str
    orders: str | list[dict[str, Any]]

    @classmethod
    def read(cls, path: Path) -> Job:
        return cls(**json.loads(path.read_text(encoding="utf-8")))


def tell(**values: Any) -> None:
    """A line for the harness."""
    print(RESULT + json.dumps(values), flush=True)


def await_line(path: Path, number: int, parent: int) -> str:
    """A line of a file that grows, once it is there. parent: the process that started this one.

    Raises:
        SystemExit: whoever started this rank is gone (killed, so that it could not end its ranks), and writes no more.
    """
    while (text := path.read_text(encoding="utf-8")).count("\n") <= number:
        if os.getppid() != parent:
            raise SystemExit("amsp compare is gone; nobody gives orders any more")
        time.sleep(LOOK_S)
    return text.splitlines()[number]


def follow(path: Path) -> Iterator[Order | None]:
    """Orders as they are written, by rank 0 to all; None is the end."""
    import torch.distributed as dist

    from deepspeed_amsp.comm import from_every_rank

    done, parent = 0, os.getppid()
    while True:
        mine = json.loads(await_line(path, done, parent)) if dist.get_rank() == 0 else None
        order = from_every_rank(mine)[0]
        done += 1
        yield None if order is None else Order(**order)


def main(job: Job) -> None:
    """Train until there are no orders left."""
    config = CompareConfig.model_validate(job.config)
    if job.environment == "mics":
        stay_out()  # a release that our engine does not support
    from deepspeed_amsp.compare import fair  # with torch

    if config.fair_reduce_scatter and _on_cpu():
        fair.fair_reduce_scatter()
    if _on_cpu():
        fair.without_shared_memory_build()
    import deepspeed
    import torch.distributed as dist
    from deepspeed.accelerator import get_accelerator

    if job.environment == "mics" and _on_cpu():
        fair.without_coalescing()
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    backend = get_accelerator().communication_backend_name() if not _on_cpu() else "gloo"
    deepspeed.init_distributed(dist_backend=backend, verbose=False, timeout=timedelta(hours=IDLE_H))
    first = dist.get_rank() == 0
    if first:
        tell(ready=job.environment, versions=_versions())
    orders: Any = [Order(**o) for o in job.orders] if isinstance(job.orders, list) else follow(Path(job.orders))
    for order in orders:
        if order is None:
            break
        found = obey(config, order)
        if first:
            tell(order=asdict(order), **found)
    dist.destroy_process_group()


def obey(config: CompareConfig, order: Order) -> dict[str, Any]:
    """Measure one strategy; {} on other ranks than 0."""
    import torch
    import torch.distributed as dist
    from deepspeed.accelerator import get_accelerator

    from deepspeed_amsp.compare.measure import measure
    from deepspeed_amsp.compare.strategies.base import Work

    strategies = {strategy.name: strategy for strategy in config.resolved()}
    on_cpu = get_accelerator().device_name() == "cpu"
    forward = config.compute.forward_ms
    backward = 2 * forward if config.compute.backward_ms is None else config.compute.backward_ms
    work = Work(
        strategies[order.strategy],
        config,
        order.micro_batches,
        torch.device("cpu") if on_cpu else torch.device(get_accelerator().current_device_name()),
        (forward, backward) if on_cpu else None,
    )
    look = order.round == 0
    return measure(work, config.warm_up, config.steps, dist.get_rank(), look) or {}


def _on_cpu() -> bool:
    return os.environ.get("DS_ACCELERATOR") == "cpu"


def _versions() -> dict[str, str]:
    import platform

    import deepspeed
    import torch

    import deepspeed_amsp

    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "deepspeed": deepspeed.__version__,
        "deepspeed_amsp": deepspeed_amsp.__version__,
    }


if __name__ == "__main__":
    main(Job.read(Path(sys.argv[-1])))
