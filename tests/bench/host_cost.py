"""What the engine costs the host: CPU seconds of a training step, beside torch's own DDP and FSDP2.

    python -m tests.bench.host_cost --rounds 5

Four ranks over loopback without limits, a model of 100 small layers, so that next to nothing is computed and what is
left is Python, hooks, copies and gloo. Every row is trained in every round in the same processes; ratios are of the
same round. ``--profile NAME`` prints where the time of a row goes (cProfile of rank 0).
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

RANKS = 4
LAYERS, WIDTH, ROWS = 100, 64, 4
WARM_UP, STEPS = 3, 10
RESULT = "host-cost-result:"

AMSP: dict[str, tuple[list[int], list[int], list[int]]] = {
    "AMSP (1,1,1)": ([1, 1], [1, 1], [1, 1]),
    "AMSP (1,1,4)": ([1, 1], [1, 1], [4, 1]),
    "AMSP (4,4,4)": ([4, 1], [4, 1], [4, 1]),
}
ROWS_OF_TABLE = ["DDP", "FSDP2", *AMSP]


class Layered(nn.Module):
    """Linear layers one behind the other, each a module of its own, as in a deep network."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        return hidden


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)


Step = Callable[[torch.Tensor], None]
"""Forward, backward and update on one batch [ROWS, WIDTH]."""


def torch_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def step(batch: torch.Tensor) -> None:
        model(batch).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def ddp() -> tuple[Step, Callable[[], None]]:
    model = nn.parallel.DistributedDataParallel(Layered())
    return torch_step(model, adamw(model)), lambda: None


def fsdp2() -> tuple[Step, Callable[[], None]]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, mesh = Layered(), init_device_mesh("cpu", (RANKS,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return torch_step(model, adamw(model)), lambda: None


def amsp(name: str) -> tuple[Step, Callable[[], None]]:
    import deepspeed

    parameters, gradients, states = AMSP[name]
    stage = 3 if parameters != [1, 1] else 1
    model = Layered()
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=adamw(model),
        config={
            "train_micro_batch_size_per_gpu": ROWS,
            "gradient_clipping": 1.0,
            "steps_per_print": 10**9,
            "zero_optimization": {"stage": stage},
            "amsp": {
                "sharding": {"parameters": parameters, "gradients": gradients, "optimizer_states": states},
                "bucket_bytes": 25 * 1024 * 1024,  # DDP's own default
            },
        },
    )

    def step(batch: torch.Tensor) -> None:
        engine.backward(engine(batch).square().mean())
        engine.step()

    return step, engine.destroy


def measure(name: str, seed: int, profile: bool) -> dict[str, float]:
    """CPU seconds (all threads) and wall seconds of a step, the mean over STEPS after WARM_UP."""
    torch.manual_seed(0)
    step, close = {"DDP": ddp, "FSDP2": fsdp2}.get(name, lambda: amsp(name))()
    generator = torch.Generator().manual_seed(seed + dist.get_rank())
    batches = [torch.randn(ROWS, WIDTH, generator=generator) for _ in range(WARM_UP + STEPS)]
    for batch in batches[:WARM_UP]:
        step(batch)
    dist.barrier()
    profiler = cProfile.Profile()
    if profile and dist.get_rank() == 0:
        profiler.enable()
    cpu, main, wall = time.process_time(), time.thread_time(), time.perf_counter()
    for batch in batches[WARM_UP:]:
        step(batch)
    cpu, main, wall = time.process_time() - cpu, time.thread_time() - main, time.perf_counter() - wall
    profiler.disable()
    if profile and dist.get_rank() == 0:
        pstats.Stats(profiler, stream=sys.stdout).sort_stats("cumtime").print_stats("deepspeed_amsp", 40)
    dist.barrier()
    close()
    return {"cpu_ms": 1e3 * cpu / STEPS, "main_ms": 1e3 * main / STEPS, "wall_ms": 1e3 * wall / STEPS}


def rank_main(arguments: argparse.Namespace) -> None:
    from examples import cpu

    cpu.prepare()
    import deepspeed

    import deepspeed_amsp  # noqa: F401  (installs the engine)

    deepspeed.init_distributed("gloo", verbose=False)
    torch.set_num_threads(1)
    names = [arguments.profile] if arguments.profile else ROWS_OF_TABLE
    for number in range(arguments.rounds):
        for name in names:
            result = measure(name, number, bool(arguments.profile))
            everyone: list[Any] = [None] * RANKS
            dist.all_gather_object(everyone, result)
            if dist.get_rank() == 0:
                mean = {key: sum(r[key] for r in everyone) / RANKS for key in result}
                print(RESULT + json.dumps({"round": number, "row": name, **mean}), flush=True)
    dist.destroy_process_group()


def show(results: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"Host cost of a step: {LAYERS} layers of {WIDTH}x{WIDTH}, {RANKS} ranks, loopback; medians")
    for heading in ("row", "CPU ms (all threads)", "main thread ms", "wall ms", "CPU / DDP", "CPU / FSDP2"):
        table.add_column(heading, justify="left" if heading == "row" else "right")
    by_row = {
        name: sorted((r for r in results if r["row"] == name), key=lambda r: r["round"]) for name in ROWS_OF_TABLE
    }
    for name, found in by_row.items():
        if not found:
            continue
        ratios = [
            f"{median(mine['cpu_ms'] / base['cpu_ms'] for mine, base in zip(found, by_row[other], strict=True)):.2f}"
            for other in ("DDP", "FSDP2")
        ]
        figures = [f"{median(r[key] for r in found):.1f}" for key in ("cpu_ms", "main_ms", "wall_ms")]
        table.add_row(name, *figures, *ratios)
    Console(width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--profile", choices=ROWS_OF_TABLE, help="profile this row instead of measuring all")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        rank_main(arguments)
        return
    from deepspeed_amsp.compare.cluster import ClusterSpec, loopback_cluster

    results: list[dict[str, Any]] = []

    def take(rank: int, line: str) -> None:
        if rank == 0 and line.startswith(RESULT):
            results.append(json.loads(line.removeprefix(RESULT)))
        elif rank == 0 and arguments.profile:
            print(line)

    command = [sys.executable, "-m", "tests.bench.host_cost", "--rank", "--rounds", str(arguments.rounds)]
    if arguments.profile:
        command += ["--profile", arguments.profile]
    root = str(Path(__file__).resolve().parents[2])
    with loopback_cluster(ClusterSpec(nodes=1, ranks_per_node=RANKS, nic_mbit=1e6)) as cluster:
        cluster.run(command, timeout_s=600, env={"PYTHONPATH": root}, on_line=take)
    if not arguments.profile:
        show(results)


if __name__ == "__main__":
    main()
