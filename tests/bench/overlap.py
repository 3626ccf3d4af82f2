"""How much communication the engine hides, on an emulated cluster of 2 nodes of 2 ranks.

    python -m tests.bench.overlap --rounds 5 --out results.jsonl

Needs root and iproute2 (Linux). Compute time is emulated: every block of a real LLaMA of 13.8M parameters takes
40 ms more in forward and 80 ms more in backward, during which the CPU is free; losses, optimizer and
communication are real. Settings alternate within rounds; ratios are of the same round. See tests/bench/rows.py.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any

from rich.console import Console
from rich.table import Table

from deepspeed_amsp.compare.cluster import ClusterSpec, ClusterUnavailable, emulated_cluster
from tests.bench.rows import (
    ACROSS,
    BLOCK_BUCKET,
    IN_NODE,
    NODES,
    PHI,
    RANKS_PER_NODE,
    RESULT,
    SHARDED,
    TABLE_V,
    Phases,
    Row,
    all_rows,
)

ROOT = Path(__file__).resolve().parents[2]
console = Console(width=160)


@dataclass
class Measured:
    """A row with what its rounds gave: seconds a step by round, phases, bytes a step, digests of the losses."""

    row: Row
    seconds: dict[int, float] = field(default_factory=dict)
    phases: dict[int, Phases] = field(default_factory=dict)
    sent: dict[str, float] = field(default_factory=dict)
    digests: set[str] = field(default_factory=set)
    cpu_s: list[float] = field(default_factory=list)

    def add(self, result: dict[str, Any]) -> None:
        """Take one result of `overlap_ranks.measure`."""
        self.seconds[result["round"]] = median(result["durations"])
        self.phases[result["round"]] = Phases(*result["phases"])
        self.sent = {link: sent / result["steps"] for link, sent in result["sent"].items()}
        self.digests.add(result["digest"])
        self.cpu_s.append(result["cpu_s"])

    @property
    def median_s(self) -> float:
        return median(self.seconds.values())

    @property
    def typical(self) -> Phases:
        """Medians over the rounds."""
        return Phases(*(median(part) for part in zip(*(phases.parts for phases in self.phases.values()), strict=True)))


def spread(values: Sequence[float], unit: str = "") -> str:
    """Median and range."""
    return f"{median(values):.3f}{unit} [dim]{min(values):.3f}-{max(values):.3f}[/]"


def ratios(slow: Measured, fast: Measured) -> list[float]:
    """How many times as long ``slow`` took, by round."""
    return [slow.seconds[number] / fast.seconds[number] for number in fast.seconds if number in slow.seconds]


def launch(rows: Sequence[Row], args: argparse.Namespace) -> list[Measured]:
    """Measure rows of one NIC rate in one launch."""
    measured = [Measured(row) for row in rows]
    job = {
        "rows": [row.as_dict() for row in rows],
        "rounds": args.rounds,
        "steps": args.steps,
        "forward_ms": args.forward_ms,
    }
    out = args.out.open("a", encoding="utf-8") if args.out else None

    def take(rank: int, line: str) -> None:
        if not line.startswith(RESULT):
            return
        result = json.loads(line.removeprefix(RESULT))
        row = rows[result["row"]]
        measured[result["row"]].add(result)
        took = f"{median(result['durations']):.3f} s"
        console.print(f"[dim]round {result['round'] + 1}/{args.rounds}  {row.name:<52} {took}[/]")
        if out is not None:
            print(
                json.dumps({"name": row.name, **row.as_dict(), "lo_mbit": args.lo or None, **result}),
                file=out,
                flush=True,
            )

    spec = ClusterSpec(NODES, RANKS_PER_NODE, rows[0].nic_mbit, args.lo or None)
    # A row trains warm-up and measured steps of at most 3 s a micro-batch, and builds an engine.
    patience = sum(60 + 3.0 * (args.steps + 3) * row.micro_batches for row in rows) * args.rounds
    with emulated_cluster(spec) as cluster:
        env = {"PYTHONPATH": str(ROOT), "TORCH_CPP_LOG_LEVEL": "ERROR"}
        command = [sys.executable, "-m", "tests.bench.overlap_ranks", json.dumps(job)]
        try:
            cluster.run(command, timeout_s=patience, env=env, on_line=take)
        finally:
            if out is not None:
                out.close()
    return measured


def mark_wrong(measured: Iterable[Measured]) -> dict[int, str]:
    """By id of the row: whether its losses and weights are those of all overlap settings of its plan."""
    digests: dict[tuple[object, ...], set[str]] = {}
    rows = [one for one in measured if one.row.factors is not None and one.digests]
    for one in rows:
        digests.setdefault((one.row.factors, one.row.hierarchical, one.row.micro_batches), set()).update(one.digests)
    verdicts = {}
    for one in rows:
        same = len(digests[one.row.factors, one.row.hierarchical, one.row.micro_batches]) == 1
        verdicts[id(one)] = "equal" if same else "[bold red]WRONG[/]"
    return verdicts


def plain_of(measured: Sequence[Measured], row: Row) -> Measured | None:
    """The row without communication that ran beside ``row`` (one launch is one NIC rate)."""
    return find(measured, factors=None, nic_mbit=row.nic_mbit, micro_batches=row.micro_batches)


def over(one: Measured, plain: Measured, best: Callable[[Row, Phases], float]) -> list[float]:
    """Seconds a step over the ``best`` there can be for the computation of ``plain``, both of the same round."""
    return [seconds / best(one.row, plain.phases[number]) for number, seconds in one.seconds.items()]


def table_of(measured: Sequence[Measured], nic: float, lo: float) -> Table:
    """All rows of one NIC rate. fwd, bwd: a micro-batch's ms on the host; update: the step's, after backward.
    floor s: max(computation, communication that cannot be avoided), from this run's own row without
    communication; x reach: over what a schedule block by block can reach at best, see `Row.reachable_s`.
    CPU s: of a rank and step, all its threads. MB out: from a node to the other, per step."""
    between = f"{lo:g} Mbit/s" if lo else "unlimited"
    table = Table(
        title=f"{NODES}x{RANKS_PER_NODE} ranks, NIC {nic:g} Mbit/s, within a node {between}, emulated compute"
    )
    left = ("plan", "overlap", "losses")
    for heading in (*left[:1], "M", left[1], "step s (range)", "fwd", "bwd", "update", "CPU s", "MB out (theory)",
                    "floor s", "x floor", "x reach", left[2]):  # fmt: skip
        table.add_column(heading, justify="left" if heading in left else "right")
    verdicts = mark_wrong(measured)
    for one in measured:
        row = one.row
        if row.nic_mbit != nic:
            continue
        words = [row.plan, str(row.micro_batches), row.overlap if row.factors else ""]
        if not one.seconds:
            table.add_row(*words, "not measured")
            continue
        theory = sum(row.bytes_by_phase())
        words += [spread([*one.seconds.values()]), *(f"{1e3 * part:.0f}" for part in one.typical.parts)]
        words.append(f"{median(one.cpu_s):.2f}")
        words.append(f"{one.sent['e0'] / 1e6:.1f} ({theory / 1e6:.1f})")
        plain = plain_of(measured, row)
        if row.factors is not None and plain is not None:
            compute = plain.typical
            words.append(f"{row.floor_s(compute):.3f}")
            words += [
                f"{median(over(one, plain, Row.floor_s)):.3f}",
                f"{median(over(one, plain, Row.reachable_s)):.3f}",
            ]
        else:
            words += ["", "", ""]
        table.add_row(*words, verdicts.get(id(one), ""))
    return table


def find(measured: Sequence[Measured], **wanted: Any) -> Measured | None:
    """The row with these attributes, if it was measured."""
    for one in measured:
        if one.seconds and all(getattr(one.row, key) == value for key, value in wanted.items()):
            return one
    return None


def findings(measured: Sequence[Measured], args: argparse.Namespace) -> Table:
    """What the issue asks for, beside what came out."""
    table = Table(title="overlap: what it is worth (medians of ratios within rounds)")
    for heading in ("question", "goal", "measured", "verdict"):
        table.add_column(heading)

    def line(question: str, values: list[float], goal: float, at_least: bool = True) -> None:
        met = median(values) >= goal if at_least else median(values) <= goal
        sign = ">=" if at_least else "<="
        table.add_row(question, f"{sign} {goal:.2f}", spread(values), "[green]met[/]" if met else "[red]missed[/]")

    for factors, goal in ((IN_NODE, 1.30), (SHARDED, 1.20)):
        on = find(measured, factors=factors, micro_batches=1, nic_mbit=args.nic, overlap="full")
        off = find(measured, factors=factors, micro_batches=1, nic_mbit=args.nic, overlap="none")
        if on and off:
            line(f"{on.row.plan}: all off / all on, M=1", ratios(off, on), goal)
    on = find(measured, factors=IN_NODE, micro_batches=1, nic_mbit=args.nic, overlap="full")
    plain = plain_of(measured, on.row) if on else None
    if on and plain:
        line(f"{on.row.plan}: step / max(compute, communication)", over(on, plain, Row.floor_s), 1.12, at_least=False)
        line(
            f"{on.row.plan}: step / what block by block can reach",
            over(on, plain, Row.reachable_s),
            1.12,
            at_least=False,
        )
    one = find(measured, factors=IN_NODE, nic_mbit=args.slow_nic, micro_batches=1)
    two = find(measured, factors=ACROSS, nic_mbit=args.slow_nic, hierarchical=True)
    if one and two:
        line(f"{args.slow_nic:g} Mbit/s: {one.row.plan} / {two.row.plan}", ratios(one, two), 1.10)
    return table


def table_v(measured: Sequence[Measured], args: argparse.Namespace) -> Table:
    """The paper's ablation: throughput relative to full overlap, in its order or not."""
    table = Table(title="Table V: throughput relative to full overlap")
    table.add_column("plan")
    table.add_column("M", justify="right")
    for switches in TABLE_V:
        table.add_column(switches, justify="right")
    table.add_column("order of the paper")
    for factors in (IN_NODE, SHARDED):
        for count in args.micro_batches:
            found = [
                find(measured, factors=factors, micro_batches=count, nic_mbit=args.nic, overlap=switches)
                for switches in TABLE_V
            ]
            rows = [one for one in found if one is not None]
            if len(rows) < len(TABLE_V):
                continue
            # Without sharded parameters nothing is gathered: the paper's last two rows are the same there, and
            # differ here by what a repeated measurement differs.
            margin = 1.02
            steps = [one.median_s for one in rows]
            ordered = all(quick <= slow * margin for quick, slow in pairwise(steps))
            shares = [f"{mean(1 / ratio for ratio in ratios(one, rows[0])):.3f}" for one in rows]
            table.add_row(rows[0].row.plan, str(count), *shares, "[green]yes[/]" if ordered else "[red]no[/]")
    return table


def parse_arguments() -> argparse.Namespace:
    """The script's options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="how often every setting is measured")
    parser.add_argument("--steps", type=int, default=4, help="measured steps of a setting in a round, after 2 others")
    parser.add_argument("--nic", type=float, default=500, help="Mbit/s between nodes")
    parser.add_argument("--slow-nic", type=float, default=250, help="Mbit/s where communication is the bottleneck")
    parser.add_argument("--lo", type=float, default=4000, help="Mbit/s within a node, 0 for no limit")
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[1, 2, 4], help="values of M")
    parser.add_argument("--forward-ms", type=float, default=40, help="emulated time of a block; twice in backward")
    parser.add_argument("--bucket-bytes", type=int, default=BLOCK_BUCKET, help="of parameters, a block by default")
    parser.add_argument("--only", nargs="+", default=[], help="only rows with one of these in their names")
    parser.add_argument("--out", type=Path, help="append every result to this file, one JSON object a line")
    parser.add_argument("--list", action="store_true", help="print the names of the rows and stop")
    args = parser.parse_args()
    if args.rounds < 1 or args.steps < 1 or min(args.micro_batches) < 1:
        parser.error("--rounds, --steps and --micro-batches must be at least 1")
    return args


def main() -> int:
    """Measure and print; 1 when losses differ, 2 when there is no cluster."""
    args = parse_arguments()
    rows = all_rows(args.nic, args.slow_nic, args.micro_batches, args.bucket_bytes)
    if args.only:
        wanted = [row for row in rows if any(part in row.name for part in args.only)]
        needed = {(row.nic_mbit, row.micro_batches) for row in wanted}
        plain = [row for row in rows if row.factors is None and (row.nic_mbit, row.micro_batches) in needed]
        rows = [row for row in rows if row in wanted or row in plain]
    if args.list:
        console.print("\n".join(row.name for row in rows))
        return 0
    console.print(f"Phi = {PHI / 1e6:.2f} MB (parameters in bf16); {args.rounds} rounds of 2 + {args.steps} steps")
    load = os.getloadavg()[0]
    if load > 1:
        console.print(f"[yellow]load average {load:.1f}: other work runs on this machine, times will be too long[/]")
    measured: list[Measured] = []
    try:
        for nic in dict.fromkeys(row.nic_mbit for row in rows):
            measured += launch([row for row in rows if row.nic_mbit == nic], args)
    except ClusterUnavailable as error:
        console.print(f"[red]{error}[/]")
        return 2
    except KeyboardInterrupt:
        console.print("interrupted; the cluster and its ranks are gone")
        return 130
    for nic in dict.fromkeys(row.nic_mbit for row in rows):
        console.print(table_of(measured, nic, args.lo))
    console.print(table_v(measured, args))
    console.print(findings(measured, args))
    wrong = any("WRONG" in verdict for verdict in mark_wrong(measured).values())
    console.print(
        "[bold red]losses differ between overlap settings[/]" if wrong else "losses: bit-equal in all settings"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
