"""Does the planner's step time come true? Profile an emulated cluster, predict, measure, compare.

    python -m benchmarks.plan_vs_measured                 # 2x2 and 4x2, about 25 minutes on two quiet cores
    python -m benchmarks.plan_vs_measured --cluster 2x2 --micro-batches 1 --rounds 3 --out kept.jsonl
    python -m benchmarks.plan_vs_measured --from kept.jsonl               # all launches that were kept, as one table

Needs root and iproute2 (Linux). On every cluster one launch of the ranks makes a quick profile, runs the engine on
every rank by itself (what computation takes, with hooks, copies and updates, and nothing sent), and then trains every
plan. Predictions use the profile and the computation of the same launch, nothing that was measured on a plan. Compute
time is emulated: every block of a real LLaMA of 13.8M parameters takes 160 ms more in forward and 320 ms more in
backward, in which the CPU is free. All "nodes" share the cores of one machine, and what gloo and the kernel take of
them is no part of a model of real nodes: the slower the links and the blocks, the smaller that part is.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from deepspeed_amsp.compare.catalog import from_block
from deepspeed_amsp.compare.cluster import ClusterSpec, ClusterUnavailable, emulated_cluster
from deepspeed_amsp.compare.launch import free_port
from deepspeed_amsp.plan.factors import ShardFactor, Sharding
from deepspeed_amsp.plan.profile import Entry, Op, Point, Profile
from deepspeed_amsp.plan.resolve import Plan
from deepspeed_amsp.plan.specs import ModelSpec, TrainSpec
from deepspeed_amsp.plan.timeline import Compute, StepTime, step_time
from tests.bench.rows import BLOCK_BUCKET, CONFIG, MODEL, RESULT, WARM_UP_STEPS, Factors, Phases, Row

ROOT = Path(__file__).resolve().parents[1]
POINT, MACHINE, ALONE = "POINT ", "MACHINE ", "ALONE "
RANKS_PER_NODE = 2
MARGIN = 0.10
"""Two plans count as different when their measured times differ by more."""
console = Console(width=150)

ONE, NODE = (1, 1), (2, 1)


def plans(nodes: int) -> list[Factors]:
    """DDP, the paper's 7B plan, OS and then G over everything, MiCS, the paper's 30B shape, ZeRO-3."""
    two, every = (2, 2), (2, nodes)
    return [
        (ONE, ONE, ONE),
        (ONE, ONE, NODE),
        (ONE, ONE, every),
        (ONE, NODE, NODE),
        (NODE, NODE, NODE),
        (NODE, NODE, two),
        (every, every, every),
    ]


# ---- the ranks ---------------------------------------------------------------------------------------------


def alone(job: dict[str, Any]) -> None:
    """In a process of its own: seconds of forward, backward and update of the engine that has nobody to talk to."""
    from examples import cpu

    cpu.prepare()

    import deepspeed
    import torch

    from deepspeed_amsp.compare.measure import Clock, Data, train_step
    from deepspeed_amsp.compare.strategies import trainer_for
    from deepspeed_amsp.compare.strategies.base import Work

    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    strategy = from_block("amsp", "alone", {"sharding": "ddp", "bucket_bytes": job["bucket_bytes"]}, (1, 1))
    alone_there = CONFIG.cluster.model_copy(update={"nodes": 1, "ranks_per_node": 1})
    config = CONFIG.model_copy(update={"cluster": alone_there})
    work = Work(strategy, config, 1, torch.device("cpu"), (job["forward_ms"], 2 * job["forward_ms"]))
    trainer, data, clock = trainer_for(work), Data(work, 0), Clock()
    for step in range(WARM_UP_STEPS + job["steps"]):
        clock.begin_step()
        train_step(trainer, clock, data.step(step))
    trainer.close()
    kept = [clock.phases[phase][WARM_UP_STEPS:] for phase in ("forward", "backward", "update")]
    print(RESULT + json.dumps([median(part) for part in kept]), flush=True)


def run_alone(job: dict[str, Any]) -> list[float]:
    """`alone` beside every rank at once; the mean of what they find."""
    import torch.distributed as dist

    env = {**os.environ, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-m", "benchmarks.plan_vs_measured", "--alone", json.dumps(job)]
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, timeout=300, check=True)
    (line,) = (line for line in done.stdout.splitlines() if line.startswith(RESULT))
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, json.loads(line.removeprefix(RESULT)))
    return [mean(part) for part in zip(*found, strict=True)]


def on_rank(job: dict[str, Any]) -> None:
    """Profile, then train every row; rank 0 prints."""
    import logging

    import torch

    from examples import cpu

    cpu.prepare()

    import deepspeed
    import torch.distributed as dist

    from deepspeed_amsp import profiler
    from tests.bench.overlap_ranks import measure

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    first = dist.get_rank() == 0

    def tell(entry: Entry, point: Point) -> None:
        if first:
            values = [entry.op.value, entry.mesh.as_list(), *point]
            print(POINT + json.dumps(values), flush=True)

    cluster = ShardFactor(RANKS_PER_NODE, dist.get_world_size() // RANKS_PER_NODE)
    effort = replace(profiler.quick(cluster), seconds=job["profile_seconds"])
    profiler.measure(cluster, effort, torch.device("cpu"), [], tell)
    found = profiler.machine(cluster, torch.device("cpu"))
    computation = run_alone(job)
    if first:
        print(MACHINE + json.dumps(vars(found)), flush=True)
        print(ALONE + json.dumps(computation), flush=True)
    rows = [Row.from_dict(values) for values in job["rows"]]
    for number in range(job["rounds"]):
        for index in range(len(rows)) if number % 2 == 0 else reversed(range(len(rows))):
            result = measure(rows[index], job["steps"], job["forward_ms"])
            if first:
                print(RESULT + json.dumps({"row": index, "round": number, **result}), flush=True)
    dist.destroy_process_group()


# ---- prediction --------------------------------------------------------------------------------------------


def model_spec() -> ModelSpec:
    """The benchmark's LLaMA."""
    import torch

    from deepspeed_amsp.compare.llama import Llama
    from deepspeed_amsp.module_spec import model_spec as spec_of

    with torch.device("meta"):
        return spec_of(Llama(MODEL), "llama-13.8M")


def computation(model: ModelSpec, measured: Phases, forward_ms: float) -> Compute:
    """The emulated time of a block where it is spent, at the block's end in forward and so first in its backward;
    what was measured beyond it in proportion to the elements of units."""
    last = {members[-1] for members in model.ranges.values()}
    emulated = [forward_ms / 1e3 if index in last else 0.0 for index in range(len(model.units))]

    def spread(total: float, factor: float) -> tuple[float, ...]:
        real = max(total - factor * sum(emulated), 0.0)
        return tuple(
            factor * sleep + real * unit.numel / model.numel for sleep, unit in zip(emulated, model.units, strict=True)
        )

    return Compute(
        spread(measured.forward, 1.0),
        spread(measured.backward, 2.0),
        (0.0,) * len(model.units),
        measured.update / model.numel,
    )


def predict(model: ModelSpec, row: Row, nodes: int, profile: Profile, compute: Compute) -> StepTime:
    """The planner's step time of a row."""
    assert row.factors is not None
    p, g, states = (ShardFactor(*pair) for pair in row.factors)
    sharding = Sharding(p, g, states, ShardFactor(RANKS_PER_NODE, nodes))
    plan = Plan(sharding, hierarchical=row.hierarchical, bucket_bytes=row.bucket_of_shard)
    train = TrainSpec(sequence=64, micro_batches=row.micro_batches, padding_limit=1.0)
    return step_time(model, plan, train, profile, compute)


# ---- report ------------------------------------------------------------------------------------------------


class Compared(NamedTuple):
    """Seconds a step of one row, as often as it was measured; predicted from the profile of the same launch."""

    row: Row
    rounds: tuple[float, ...]
    predicted: StepTime

    @property
    def measured(self) -> float:
        return median(self.rounds)

    @property
    def differ(self) -> float:
        """By how much of the median the rounds differ."""
        return (max(self.rounds) - min(self.rounds)) / self.measured

    @property
    def error(self) -> float:
        return self.predicted.seconds / self.measured - 1


def run(nodes: int, args: argparse.Namespace) -> dict[str, Any]:
    """One cluster: all that was measured, as JSON values."""
    rows = [
        Row(factors, m, args.nic, "full", False, args.bucket_bytes)
        for m in args.micro_batches
        for factors in plans(nodes)
    ]
    durations: dict[int, list[float]] = {}
    phases: dict[int, list[list[float]]] = {}
    computation: list[float] = []
    cpu_s: dict[int, list[float]] = {}
    machine: dict[str, float] = {}
    points: dict[tuple[Op, ShardFactor], list[Point]] = {}

    def take(_: int, line: str) -> None:
        if line.startswith(POINT):
            op, mesh, *values = json.loads(line.removeprefix(POINT))
            point = Point(*values)
            points.setdefault((Op(op), ShardFactor(*mesh)), []).append(point)
            console.print(
                f"[dim]{op} {mesh[0]}x{mesh[1]} {point.bytes / 1e6:8.3f} MB {1e3 * point.seconds:9.2f} ms, the next "
                f"{1e3 * (point.each or point.seconds):9.2f} ms[/]"
            )
        if line.startswith(MACHINE):
            machine.update(json.loads(line.removeprefix(MACHINE)))
            console.print(f"[dim]{machine}[/]")
        if line.startswith(ALONE):
            computation.extend(json.loads(line.removeprefix(ALONE)))
            console.print(f"[dim]by itself: forward, backward, update {computation}[/]")
        if line.startswith(RESULT):
            result = json.loads(line.removeprefix(RESULT))
            durations.setdefault(result["row"], []).append(median(result["durations"]))
            phases.setdefault(result["row"], []).append(result["phases"])
            cpu_s.setdefault(result["row"], []).append(result["cpu_s"])
            console.print(f"[dim]{rows[result['row']].name:<40} {durations[result['row']][-1]:.3f} s[/]")

    spec = ClusterSpec(nodes, RANKS_PER_NODE, args.nic, args.lo or None)
    job = {
        "rows": [row.as_dict() for row in rows],
        "rounds": args.rounds,
        "steps": args.steps,
        "forward_ms": args.forward_ms,
        "bucket_bytes": args.bucket_bytes,
        "profile_seconds": args.profile_seconds,
    }
    patience = 300 + sum(60 + 6.0 * (args.steps + 3) * row.micro_batches for row in rows) * args.rounds
    env = {"PYTHONPATH": str(ROOT), "TORCH_CPP_LOG_LEVEL": "ERROR"}
    with emulated_cluster(spec) as cluster:
        command = [sys.executable, "-m", "benchmarks.plan_vs_measured", "--on-rank", json.dumps(job)]
        cluster.run(command, timeout_s=patience, env=env, on_line=take)
    raw = {
        "nodes": nodes,
        "forward_ms": args.forward_ms,
        "machine": machine,
        "alone": computation,
        "points": [
            [op.value, mesh.as_list(), *point] for (op, mesh), found in points.items() for point in sorted(found)
        ],
        "rows": [
            {
                "row": row.as_dict(),
                "seconds": durations[index],
                "phases": phases[index],
                "cpu_s": cpu_s[index],
            }
            for index, row in enumerate(rows)
        ],
    }
    if args.out:
        with args.out.open("a", encoding="utf-8") as file:
            print(json.dumps(raw), file=file)
    return raw


def compare(raw: dict[str, Any]) -> list[Compared]:
    """Predict every row from the profile and the computation of the same launch."""
    points: dict[tuple[Op, ShardFactor], list[Point]] = {}
    for op, mesh, *point in raw["points"]:
        points.setdefault((Op(op), ShardFactor(*mesh)), []).append(Point(*point))
    entries = tuple(Entry(op, mesh, tuple(found)) for (op, mesh), found in points.items())
    nodes = raw["nodes"]
    profile = Profile("emulated", RANKS_PER_NODE, nodes, entries, **raw["machine"])
    model = model_spec()
    takes = computation(model, Phases(*raw["alone"]), raw["forward_ms"])
    rows = [(Row.from_dict(entry["row"]), entry["seconds"]) for entry in raw["rows"]]
    return [Compared(row, tuple(seconds), predict(model, row, nodes, profile, takes)) for row, seconds in rows]


def together(launches: list[list[Compared]]) -> list[Compared]:
    """Launches of the same cluster as one: all rounds of a row, and the middle one of its predictions."""
    by_row: dict[Row, list[Compared]] = {}
    for one in (one for launch in launches for one in launch):
        by_row.setdefault(one.row, []).append(one)
    return [
        Compared(
            row,
            tuple(seconds for one in found for seconds in one.rounds),
            sorted((one.predicted for one in found), key=lambda step: step.seconds)[(len(found) - 1) // 2],
        )
        for row, found in sorted(by_row.items(), key=lambda item: item[0].micro_batches)
    ]


def table(nodes: int, compared: list[Compared], args: argparse.Namespace) -> Table:
    """Measured beside predicted, with what the planner says computation waits for."""
    made = Table(title=f"{nodes}x{RANKS_PER_NODE} ranks, {args.nic:g} Mbit/s between nodes, emulated compute")
    for heading in ("plan", "M", "measured s", "rounds", "predicted s", "error", "compute", "exposed (predicted)"):
        made.add_column(heading, justify="left" if heading.startswith(("plan", "exposed")) else "right")
    for one in compared:
        exposed = ", ".join(f"{kind} {1e3 * s:.0f} ms" for kind, s in one.predicted.exposed.items() if s > 5e-4)
        made.add_row(
            one.row.plan,
            str(one.row.micro_batches),
            f"{one.measured:.3f}",
            f"{len(one.rounds)}, +-{50 * one.differ:.0f} %",
            f"{one.predicted.seconds:.3f}",
            f"{100 * one.error:+.1f} %",
            f"{one.predicted.compute:.3f}",
            exposed,
        )
    return made


def order(compared: list[Compared]) -> tuple[int, int]:
    """Pairs of plans of one M that differ by more than MARGIN as measured: (in the predicted order, all)."""
    right = total = 0
    for a, b in combinations(compared, 2):
        if a.row.micro_batches != b.row.micro_batches:
            continue
        if abs(a.measured - b.measured) > MARGIN * min(a.measured, b.measured):
            total += 1
            right += (a.measured < b.measured) == (a.predicted.seconds < b.predicted.seconds)
    return right, total


def parse_arguments() -> argparse.Namespace:
    """The script's options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cluster", nargs="+", default=["2x2", "4x2"], help="nodes x 2 ranks")
    parser.add_argument("--rounds", type=int, default=1, help="how often every plan is measured")
    parser.add_argument("--steps", type=int, default=2, help="measured steps, after 2 others")
    parser.add_argument("--nic", type=float, default=125, help="Mbit/s between nodes")
    parser.add_argument("--lo", type=float, default=4000, help="Mbit/s within a node, 0 for no limit")
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[1, 4], help="values of M")
    parser.add_argument("--forward-ms", type=float, default=160, help="emulated time of a block; twice in backward")
    parser.add_argument("--bucket-bytes", type=int, default=BLOCK_BUCKET, help="of parameters, a block by default")
    parser.add_argument("--profile-seconds", type=float, default=8, help="of a collective, see amsp profile")
    parser.add_argument("--out", type=Path, help="append all that is measured to this file, a line a cluster")
    parser.add_argument("--from", dest="saved", type=Path, help="predict again for what --out has kept")
    parser.add_argument("--on-rank", help=argparse.SUPPRESS)
    parser.add_argument("--alone", help=argparse.SUPPRESS)
    args = parser.parse_args()
    shapes = [shape.split("x") for shape in args.cluster]
    if any(len(shape) != 2 or not shape[0].isdigit() or shape[1] != str(RANKS_PER_NODE) for shape in shapes):
        parser.error(f"--cluster takes <nodes>x{RANKS_PER_NODE}, not {' '.join(args.cluster)}")
    args.nodes = [int(shape[0]) for shape in shapes]
    return args


def main() -> int:
    """Measure and print; 2 where there is no cluster."""
    args = parse_arguments()
    if args.on_rank or args.alone:
        (on_rank if args.on_rank else alone)(json.loads(args.on_rank or args.alone))
        return 0
    load = os.getloadavg()[0]
    if load > 1:
        console.print(f"[yellow]load average {load:.1f}: other work runs on this machine, times will be too long[/]")
    measured: list[dict[str, Any]] = []
    try:
        if args.saved:
            measured = [json.loads(line) for line in args.saved.read_text(encoding="utf-8").splitlines()]
        for nodes in [] if args.saved else args.nodes:
            measured.append(run(nodes, args))
    except ClusterUnavailable as error:
        console.print(f"[red]{error}[/]")
        return 2
    launches: dict[int, list[list[Compared]]] = {}
    for raw in measured:
        launches.setdefault(raw["nodes"], []).append(compare(raw))
    results = {nodes: together(found) for nodes, found in launches.items()}
    everything = [one for compared in results.values() for one in compared]
    for nodes, compared in results.items():
        console.print(table(nodes, compared, args))
        right, total = order(compared)
        console.print(f"{nodes}x{RANKS_PER_NODE}: {right} of {total} pairs that differ by over 10 % in their order")
    errors = [abs(one.error) for one in everything]
    console.print(
        f"error: median {100 * median(errors):.1f} %, largest {100 * max(errors):.1f} % of {len(errors)} runs"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
