"""``amsp profile``: measure the collectives of a cluster, for the planner.

deepspeed --hostfile hosts --module deepspeed_amsp.profiler --out profile.json
deepspeed --hostfile hosts --no_python amsp profile --out profile.json              the same
torchrun --nproc-per-node 8 -m deepspeed_amsp.profiler --out profile.json           the same
"""

from __future__ import annotations

import math
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from datetime import datetime, timezone
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from deepspeed_amsp.cli.options import LOCAL_RANK, fail
from deepspeed_amsp.plan import profile_file
from deepspeed_amsp.plan.factors import ShardFactor
from deepspeed_amsp.plan.profile import Entry, Op, Point, Profile, ProfileError
from deepspeed_amsp.topology import TopologyError, detect_topology

if TYPE_CHECKING:
    import torch

    from deepspeed_amsp.profiler import Effort, Machine

PACKAGES = ("torch", "deepspeed", "deepspeed_amsp")
NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Refused(ValueError):
    """Found by every rank, or by rank 0 which told the others."""


def profile(
    out: Annotated[Path, typer.Option(help="Where the profile goes; rank 0's host writes it.")] = Path("profile.json"),
    quick: Annotated[
        bool, typer.Option("--quick/--full", help="About a minute and the outermost meshes, or all meshes and sizes.")
    ] = True,
    resume: Annotated[bool, typer.Option("--resume", help="Keep what the file has, and measure the rest.")] = False,
    seconds: Annotated[
        float | None,
        typer.Option(help="For all messages of one collective on one mesh; a slow network gets smaller ones."),
    ] = None,
    gpus_per_node: Annotated[
        int | None, typer.Option(help="Cut a host into several nodes, as topology.gpus_per_node does.")
    ] = None,
    local_rank: Annotated[int | None, LOCAL_RANK] = None,
) -> None:
    """Measure AllGather, ReduceScatter, AllReduce and Broadcast on the shapes of group that plans use.

    Runs under a launcher, one process a GPU. The file is written after every measurement.
    """
    missing = [name for name in NEEDED if name not in os.environ]
    if missing or os.environ["WORLD_SIZE"] == "1":
        fail(
            "profile",
            f"it takes several ranks to communicate ({f'{missing[0]} is not set' if missing else 'WORLD_SIZE is 1'}): "
            f"start it on the whole cluster, deepspeed --hostfile ... --module deepspeed_amsp.profiler --out {out}",
        )
    if seconds is not None and not 0 < seconds < math.inf:
        fail("profile", f"--seconds must be above 0, got {seconds}")
    try:
        _profile(out.absolute(), quick, seconds, resume, gpus_per_node)
    except (Refused, TopologyError) as error:
        fail("profile", str(error))
    except OSError as error:
        fail("profile", f"cannot write {out}: {error}", code=1)
    except RuntimeError as error:  # a CollectiveError, or torch's own
        fail("profile", f"a collective failed, or another rank did: {str(error).splitlines()[0]}", code=1)


def _profile(out: Path, quick: bool, seconds: float | None, resume: bool, gpus_per_node: int | None) -> None:
    """Raises Refused or TopologyError on all ranks alike."""
    import torch.distributed as dist

    from deepspeed_amsp import profiler
    from deepspeed_amsp.comm import from_every_rank, host_names

    with _joined() as (device, about):
        hosts, rank = host_names(), dist.get_rank()
        nodes = detect_topology(gpus_per_node, os.environ, dist.get_world_size(), hosts)
        data_parallel = ShardFactor(nodes.gpus_per_node, nodes.nodes)
        cluster = _Cluster(data_parallel, dist.get_backend(), f"{_named(hosts)}: {about.device}", about.memory)
        told = from_every_rank(_start(out, resume, cluster) if rank == 0 else None)[0]
        if isinstance(told, str):
            raise Refused(told)
        effort = (profiler.quick if quick else profiler.full)(data_parallel)
        effort = effort if seconds is None else replace(effort, seconds=seconds)
        report = _Report(out, cluster, told, effort) if rank == 0 else None
        with nullcontext() if report is None else report.bar():
            profiler.measure(data_parallel, effort, device, told, _ignore if report is None else report.take)
        found = profiler.machine(data_parallel, device)
        if report is not None:
            report.finish(found)


class _About(NamedTuple):
    """What this rank computes on."""

    device: str
    memory: float | None


@contextmanager
def _joined() -> Iterator[tuple[torch.device, _About]]:
    """In the default process group. One that is made here is torch's own: DeepSpeed's would compile shared-memory
    collectives on a CPU."""
    import torch
    import torch.distributed as dist
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    kind, index = accelerator.device_name(), int(os.environ.get("LOCAL_RANK", "0"))
    if kind == "cpu":
        device, about = torch.device("cpu"), _About(f"{platform.machine()} CPU", None)
    else:
        accelerator.set_device(index)
        device = torch.device(kind, index)
        name = getattr(accelerator, "get_device_name", None)
        about = _About(str(name(index)) if name else kind, float(accelerator.total_memory(index)))
    if dist.is_initialized():
        yield device, about
        return
    dist.init_process_group("gloo" if kind == "cpu" else accelerator.communication_backend_name())
    try:
        yield device, about
    finally:
        dist.destroy_process_group()


class _Cluster(NamedTuple):
    """What a profile is of."""

    data_parallel: ShardFactor
    backend: str
    host: str
    memory: float | None

    def profile(self, name: str, entries: tuple[Entry, ...], machine: Machine | None = None) -> Profile:
        return Profile(
            name=name,
            gpus_per_node=self.data_parallel.s0,
            nodes=self.data_parallel.s1,
            entries=entries,
            host=self.host,
            backend=self.backend,
            versions=tuple((name, str(import_module(name).__version__)) for name in PACKAGES),
            date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            gpu_memory=self.memory,
            memory_bandwidth=machine.memory_bandwidth if machine else None,
            host_seconds=machine.host_seconds if machine else None,
        )


def _named(hosts: list[str]) -> str:
    """The hosts, the first and the last of many."""
    names = list(dict.fromkeys(hosts))
    return ", ".join(names) if len(names) <= 4 else f"{names[0]} ... {names[-1]} ({len(names)} hosts)"


def _start(out: Path, resume: bool, cluster: _Cluster) -> list[Entry] | str:
    """On rank 0: the entries of the file that is continued, or why not to begin."""
    if (out.exists() and not out.is_file()) or not out.parent.is_dir():
        return f"--out must be a file in a folder that exists, got {out}"
    try:
        with tempfile.TemporaryFile(dir=out.parent):  # permissions alone would not say
            pass
    except OSError as error:
        return f"--out: cannot write to {out.parent}: {error.strerror}"
    if not resume or not out.exists():
        return []
    try:
        found = Profile(**profile_file.read(out, complete=False))
    except ProfileError as error:
        return f"--resume: {error}"
    was = (found.data_parallel, found.backend, found.host)
    now = (cluster.data_parallel, cluster.backend, cluster.host)
    if was != now:
        before, here = (f"{shape.s0} GPUs x {shape.s1} nodes, {backend}, {host}" for shape, backend, host in (was, now))
        return f"--resume: {out} is of another cluster ({before}); this is {here}"
    return list(found.entries)


def _ignore(entry: Entry, point: Point) -> None:
    """Rank 0 reports."""


class _Report:
    """On rank 0: the file, which grows point by point, and what is said of it."""

    def __init__(self, out: Path, cluster: _Cluster, known: list[Entry], effort: Effort) -> None:
        self._out, self._cluster = out, cluster
        self._entries = {(entry.op, entry.mesh): entry for entry in known}
        self._new = 0
        self._began = time.monotonic()
        self._show: Callable[[str, Entry], None] = lambda line, entry: print(line, flush=True)
        self._places = {step: at for at, step in enumerate(product(effort.meshes, Op), start=1)}

    @contextmanager
    def bar(self) -> Iterator[None]:
        """A bar in a terminal; lines elsewhere."""
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        console = Console()
        if not console.is_terminal:
            yield
            return
        columns = (TextColumn("{task.description:<60}"), BarColumn(), TimeElapsedColumn())
        with Progress(*columns, console=console) as progress:
            task = progress.add_task("connecting", total=len(self._places))
            self._show = lambda line, entry: progress.update(
                task, description=line, completed=self._places[entry.mesh, entry.op]
            )
            yield
            progress.update(task, completed=len(self._places))

    def take(self, entry: Entry, point: Point) -> None:
        """Write it down. Raises OSError."""
        self._entries[entry.op, entry.mesh] = entry
        self._new += 1
        self._save()
        rate = point.bytes / point.seconds / 1e6
        spread = 100 * point.spread / point.seconds
        self._show(
            f"{entry}: {point.bytes} bytes {1e3 * point.seconds:.3f} ms +-{spread:.0f} % ({rate:.4g} MB/s)", entry
        )

    def _save(self, machine: Machine | None = None) -> None:
        self._cluster.profile(self._out.stem, tuple(self._entries.values()), machine).save(self._out)

    def finish(self, machine: Machine) -> None:
        """Add what is no collective, and sum up. Raises OSError."""
        self._save(machine)
        points = sum(len(entry.points) for entry in self._entries.values())
        took = time.monotonic() - self._began
        shape = self._cluster.data_parallel
        print(
            f"amsp profile: {self._new} measurements in {took:.0f} s, {points} of {shape.s0} GPUs x {shape.s1} nodes "
            f"in {self._out}",
            flush=True,
        )


def main() -> None:
    """Entry point of ``python -m deepspeed_amsp.profiler``."""
    command = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    command.command()(profile)
    command()


if __name__ == "__main__":
    main()
