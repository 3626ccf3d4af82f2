"""Seconds of a save and a load beside DeepSpeed's ZeRO-1 in one run: python -m tests.bench.checkpoint_time [WIDTH]

Four gloo ranks, one after the other in turns; the median of each. Both write to the same file system; ours makes its
files durable (fsync) and compares checksums when it loads, DeepSpeed's does neither. The further lines are ours
without the first, and without both.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from tests.support.pool import close_all, pool

SUMS = tuple(f"deepspeed_amsp.checkpoint.{module}.crc32" for module in ("storage", "folder"))
OURS = {"amsp": (), "amsp, no fsync": ("os.fsync",), "amsp, no fsync, no sums": ("os.fsync", *SUMS)}
"""Name -> what is left out."""
WIDTH, LAYERS, WORLD, TURNS = 1024, 12, 4, 5


def _engine(ours: bool, width: int) -> Any:
    import deepspeed

    import deepspeed_amsp  # noqa: F401  (installs the engine)

    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(LAYERS)))
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 1},
        "bf16": {"enabled": True},
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
    }
    if ours:
        config["amsp"] = {"sharding": "zero1", "topology": {"gpus_per_node": 2}}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    rows = torch.randn(1, width, dtype=torch.bfloat16)
    engine.backward(engine(rows).float().square().mean())
    engine.step()
    return engine


def job(folder: str, width: int) -> dict[str, tuple[list[float], list[float]]]:
    """Name -> seconds of every save and every load."""
    ours, theirs = _engine(True, width), _engine(False, width)
    engines = {**dict.fromkeys(OURS, ours), "deepspeed": theirs}
    times: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in engines}
    for turn in range(TURNS):
        for name, engine in engines.items():
            for index, call in enumerate((engine.save_checkpoint, engine.load_checkpoint)):
                dist.barrier()
                start = time.perf_counter()
                with _without(OURS.get(name, ())):
                    call(f"{folder}/{name}", f"{turn}")
                dist.barrier()
                times[name][index].append(time.perf_counter() - start)
    ours.destroy()
    theirs.destroy()
    return times


@contextmanager
def _without(names: Sequence[str]) -> Iterator[None]:
    with ExitStack() as stack:
        for name in names:
            stack.enter_context(mock.patch(name, return_value=0))
        yield


def main(width: int = WIDTH) -> None:
    """Print a line for each."""
    with tempfile.TemporaryDirectory() as folder:
        times = pool(WORLD).run(job, folder, width, timeout=300)[0]
        for name, (saves, loads) in times.items():
            size = sum(path.stat().st_size for path in Path(folder, name, "0").iterdir()) / 1e6
            print(
                f"{name:>23}: save {statistics.median(saves):.3f} s, load {statistics.median(loads):.3f} s, "
                f"{size:.1f} MB ({LAYERS * width * (width + 1) / 1e6:.1f} M parameters)"
            )
    close_all()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
