"""Measures collectives on a live cluster: a `Profile`.

    deepspeed --hostfile hosts --module deepspeed_amsp.profiler --out profile.json [--full] [--resume]

Collectives go out as the engine issues them (`comm`), on the shapes of group that plans use, with all sibling groups of
the cluster active together: they share the nodes' NICs, and one group alone would make sharded parameters look cheap.
The command line is `cli.profile`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from statistics import median, quantiles

import torch

from deepspeed_amsp.comm import Communicator, Ticket, from_every_rank, waits_on_host
from deepspeed_amsp.mesh import Group, destroy_group, make_siblings
from deepspeed_amsp.plan.factors import ShardFactor, divisors
from deepspeed_amsp.plan.profile import Entry, Op, Point, meshes_needed
from deepspeed_amsp.plan.specs import OPTIMIZERS
from deepspeed_amsp.trace.clock import clock_for

KIB = 1024
AT_ONCE, ROUNDS_AT_ONCE = 4, 1
"""Messages that are issued together to see how far they overlap, and how often: rather larger ones than more often."""

UPDATED, UPDATES = 2**23, 6
"""Elements that are updated to see how fast memory is, more than caches hold; and how often."""

CALLS = 100
"""Collectives over which the host's time is averaged."""

DTYPE = torch.bfloat16
"""Working copies and gradients travel in 16 bits."""

Known = dict[tuple[Op, ShardFactor], Entry]
OnPoint = Callable[[Entry, Point], None]


@dataclass(frozen=True)
class Effort:
    """How much is measured.

    sizes: bytes of messages, ascending. seconds: for the messages of one collective on one mesh, which a slow network
    does not get through: it gets smaller largest messages.
    """

    meshes: tuple[ShardFactor, ...]
    sizes: tuple[int, ...]
    repetitions: int
    seconds: float


def quick(data_parallel: ShardFactor) -> Effort:
    """About a minute: the outermost meshes of each kind, between which a profile interpolates."""
    whole, nodes = data_parallel.s0, data_parallel.s1
    in_node = {ShardFactor(s0) for s0 in (_least(whole), whole)}
    across = {ShardFactor(s0, s1) for s0 in (1, whole) for s1 in (_least(nodes), nodes) if s1 > 1}
    chosen = tuple(mesh for mesh in meshes_needed(data_parallel) if mesh in in_node | across)
    sizes = tuple(KIB * size for size in (64, 1024, 8 * 1024, 64 * 1024))
    return Effort(chosen, sizes, repetitions=7, seconds=min(40 / max(len(chosen) * len(Op), 1), 3.5))


def full(data_parallel: ShardFactor) -> Effort:
    """Every mesh that a plan can use, 4 KB to 256 MB."""
    sizes = tuple(KIB * 4**power for power in range(1, 10))
    return Effort(tuple(meshes_needed(data_parallel)), sizes, repetitions=11, seconds=20.0)


def _least(number: int) -> int:
    """The smallest divisor above 1; 1 of 1."""
    return (*divisors(number), 1)[1]


@dataclass(frozen=True)
class Machine:
    """What a profile says of GPUs and hosts: `Profile.memory_bandwidth` and `Profile.host_seconds`."""

    memory_bandwidth: float
    host_seconds: float | None


def machine(data_parallel: ShardFactor, device: torch.device) -> Machine:
    """Measure it, in about a second. Collective, and the same answer on all ranks."""
    group = make_siblings(meshes_needed(data_parallel)[0], data_parallel)
    host = _host_seconds(group, device) if waits_on_host(device) else None
    found = from_every_rank((_update_seconds(device), host))
    destroy_group(group)
    slowest, hosts = max(seconds for seconds, _ in found), [host for _, host in found if host is not None]
    return Machine(UPDATED * OPTIMIZERS["adamw"].traffic / slowest, sum(hosts) / len(hosts) if hosts else None)


def _update_seconds(device: torch.device) -> float:
    """Of an owner's update as the engine does it: fused AdamW on UPDATED masters, and their working copies."""
    clock = clock_for(device.type)
    master, working = torch.zeros(UPDATED, device=device), torch.zeros(UPDATED, device=device, dtype=DTYPE)
    master.grad = torch.zeros_like(master)
    optimizer = torch.optim.AdamW([master], fused=True)
    took = []
    for _ in range(UPDATES):
        clock.settle()
        begin = clock.stamp()
        optimizer.step()
        working.copy_(master)
        end = clock.stamp()
        clock.settle()
        took.append(clock.seconds(end) - clock.seconds(begin))
    return median(took[1:])  # the first makes the states


def _host_seconds(group: Group, device: torch.device) -> float:
    """CPU time of this thread for issuing a collective of next to nothing and waiting for it."""
    comm = Communicator()
    issue = _issuing(comm, Op.ALL_GATHER, group, DTYPE.itemsize * group.size, device)
    begin = 0.0
    for number in range(CALLS + 1):
        if number == 1:  # the ranks are connected
            begin = time.thread_time()
        for ticket in issue():
            ticket.wait()
    return (time.thread_time() - begin) / CALLS


def measure(
    data_parallel: ShardFactor, effort: Effort, device: torch.device, known: Sequence[Entry], on_point: OnPoint
) -> None:
    """Measure what is not in ``known``. Collective: all ranks call it with the same arguments.

    Args:
        data_parallel: (ranks of a node, nodes); a node's ranks are consecutive.
        known: entries of a measurement that is continued.
        on_point: told on every rank of each new point and the entry that it completes.
    """
    entries: Known = {(entry.op, entry.mesh): entry for entry in known}
    session = _Session(data_parallel, effort.repetitions, device)
    for mesh in effort.meshes:
        session.enter(mesh)
        for op in Op:
            _sweep(session, op, mesh, effort, entries, on_point)
        session.leave()
    session.close()


def _sweep(session: _Session, op: Op, mesh: ShardFactor, effort: Effort, entries: Known, on_point: OnPoint) -> None:
    """One collective on one mesh, from small to large messages while there is time."""
    points = {point.bytes: point for point in entries.get((op, mesh), Entry(op, mesh, ())).points}
    at_once = mesh.size if op is Op.BROADCAST else 1

    def spent(point: Point) -> float:
        together = point.seconds + (AT_ONCE - 1) * (point.each or point.seconds)
        return at_once * (point.seconds * (effort.repetitions + 1) + together * ROUNDS_AT_ONCE)

    def next_size(wished: int) -> int | None:
        """What to measure on the way to ``wished``; None when that is known, or what fits is not worth the while."""
        smaller = max((other for other in points if other < wished), default=None)
        if wished in points or smaller is None:
            return None if wished in points else wished
        # At worst as slow a byte as the last one. Where latency has slowed that down, more will fit after the next.
        fits = int(max(left, 0) * smaller / spent(points[smaller]))
        size = min(wished, _even(fits, mesh.size))
        return size if size >= 2 * smaller and size not in points else None

    left = effort.seconds - sum(map(spent, points.values()))
    for wished in (_even(size // at_once, mesh.size) for size in effort.sizes):
        while (size := next_size(wished)) is not None:
            point, took = session.point(op, size)
            points[size] = point
            left -= took
            entry = entries.get((op, mesh), Entry(op, mesh, ())).with_point(point)
            entries[op, mesh] = entry
            on_point(entry, point)


def _even(size: int, ranks: int) -> int:
    """The next size that is whole elements on every rank."""
    grain = DTYPE.itemsize * ranks
    return max(size // grain, 1) * grain


class _Session:
    """Groups of one mesh at a time, and a barrier over all ranks."""

    def __init__(self, data_parallel: ShardFactor, repetitions: int, device: torch.device) -> None:
        self._data_parallel = data_parallel
        self._repetitions = repetitions
        self._device = device
        self._comm = Communicator()
        self._clock = clock_for(device.type)
        self._world: Group | None = None
        self._token = torch.zeros(1, device=device)
        self._mesh: ShardFactor | None = None
        self._group: Group | None = None

    def enter(self, mesh: ShardFactor) -> None:
        """From here on groups have this shape; they are made when something is measured on them, since a group that
        one rank destroys unused breaks the connections that another is still making."""
        self._mesh = mesh

    def leave(self) -> None:
        if self._group is not None:
            destroy_group(self._group)
        self._group = None

    def close(self) -> None:
        if self._world is not None:
            destroy_group(self._world)
        self._world = None

    def point(self, op: Op, size: int) -> tuple[Point, float]:
        """Median over repetitions of the time in which the slowest rank was done, its interquartile range, and by how
        much later each further one of AT_ONCE is done; and the seconds that it took to find them, the same number on
        all ranks."""
        assert self._mesh is not None
        self._world = self._world or make_siblings(self._data_parallel, self._data_parallel)
        self._group = self._group or make_siblings(self._mesh, self._data_parallel)
        issuing = [_issuing(self._comm, op, self._group, size, self._device) for _ in range(AT_ONCE)]
        self._round(issuing[:1])  # connects the ranks
        began = time.monotonic()
        mine = [self._round(issuing[:1]) for _ in range(self._repetitions)]
        mine += [self._round(issuing) for _ in range(ROUNDS_AT_ONCE)]
        slowest = [max(repetition) for repetition in zip(*from_every_rank(mine), strict=True)]
        alone, together = slowest[: self._repetitions], slowest[self._repetitions :]
        seconds = median(alone)
        took = max(from_every_rank(time.monotonic() - began))
        at_once = self._group.size if op is Op.BROADCAST else 1
        low, _, high = quantiles(alone, n=4, method="inclusive")
        # A disturbed measurement can be off in both directions; at the least, all go in the time of one.
        each = min(max((median(together) - seconds) / (AT_ONCE - 1), seconds / AT_ONCE), seconds)
        return Point(size, *(figure / at_once for figure in (seconds, high - low, each))), took

    def _round(self, issuing: Sequence[Callable[[], list[Ticket]]]) -> float:
        """Seconds from the first issue to the end of all."""
        assert self._world is not None
        self._comm.all_reduce(self._world, self._token, "barrier").wait()
        self._clock.settle()
        begin = self._clock.stamp()
        for ticket in [ticket for issue in issuing for ticket in issue()]:
            ticket.wait()
        end = self._clock.stamp()
        self._clock.settle()
        return self._clock.seconds(end) - self._clock.seconds(begin)


def _issuing(comm: Communicator, op: Op, group: Group, size: int, device: torch.device) -> Callable[[], list[Ticket]]:
    """What issues ``op`` on a message of ``size`` bytes: a Broadcast from every rank, else one collective."""
    label = f"{size} bytes on {group.axis}"
    elements = size // DTYPE.itemsize

    def buffer(length: int) -> torch.Tensor:
        return torch.zeros(length, dtype=DTYPE, device=device)

    if op is Op.BROADCAST:
        parts = [buffer(elements) for _ in group.ranks]
        return lambda: [comm.broadcast(group, part, source, label) for source, part in enumerate(parts)]
    whole, share = buffer(elements), buffer(elements // group.size)
    if op is Op.ALL_GATHER:
        return lambda: [comm.all_gather(group, share, whole, label)]
    if op is Op.REDUCE_SCATTER:
        splits = [share.numel()] * group.size
        return lambda: [comm.reduce_scatter(group, whole, share, splits, label)]
    return lambda: [comm.all_reduce(group, whole, label)]


if __name__ == "__main__":
    # By name: the commands stand to the right of this room.
    import_module("deepspeed_amsp.cli.profile").main()
