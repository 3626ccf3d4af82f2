"""Collectives. The only file that calls them; every call returns a `Ticket` and is logged.

A ticket keeps the buffers of its collective alive until somebody has waited for it, so nobody needs
``record_stream``. Waiting makes the *current stream* wait on an accelerator and blocks the host on gloo.
"""

from __future__ import annotations

import itertools
import pickle
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import record_function

from deepspeed_amsp.mesh import Group, Purpose
from deepspeed_amsp.trace.breakdown import UPDATE, Breakdown
from deepspeed_amsp.trace.recorder import Flight, Recorder

# torch 2.13 renamed the tensor collectives and warns about the old names.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


_UNCOUNTED: AbstractContextManager[None] = nullcontext()

HOST_DEVICES: frozenset[str] = frozenset({"cpu"})
"""Types of devices whose collectives are gloo's. Tests whose CPU tensors stand for an accelerator's empty it."""

RUNNING_LOG = 100_000
"""Entries that are kept between two steps, so that an evaluation without end does not fill the host's memory."""


@dataclass(frozen=True)
class LogEntry:
    """One issued collective. ``bytes`` is the size of the whole message: the gathered result, the buffer that
    is reduced, or the buffer that is broadcast, padding included."""

    seq: int
    op: str
    purpose: Purpose
    axis: str
    ranks: tuple[int, ...]
    bytes: int
    label: str


Log = deque[LogEntry]


def new_log() -> Log:
    """An empty log."""
    return deque(maxlen=RUNNING_LOG)


class CollectiveError(RuntimeError):
    """A collective failed or timed out; the message names what it carried and the ranks."""


class Ticket:
    """An issued collective with the buffers that it keeps alive.

    `wait` may be called several times; the collective's result is in its output buffer after the first. It
    raises `CollectiveError` when the process group says that the collective failed, then and every time after.
    """

    __slots__ = ("_breakdown", "_failure", "_finish", "_flight", "_keep", "_works", "entry")

    def __init__(
        self,
        works: Sequence[Any],
        keep: Sequence[Any],
        finish: Callable[[], None] | None,
        entry: LogEntry,
        flight: Flight | None = None,
        breakdown: Breakdown | None = None,
    ) -> None:
        self._works: list[Any] = list(works)
        self._keep: list[Any] = list(keep)
        self._finish = finish
        self.entry = entry
        self._flight = flight
        """Set while somebody traces and nobody has waited."""
        self._breakdown = breakdown
        self._failure: CollectiveError | None = None

    def wait(self, aside: bool = False) -> None:
        """Make the result readable.

        Args:
            aside: on a thread or a stream beside the one that computes, so that traces count nothing as exposed.
        """
        if self._failure is not None:
            raise self._failure
        flight, self._flight = self._flight, None
        begin = flight.stamp() if flight is not None else None
        breakdown = None if aside else self._breakdown
        try:
            with _UNCOUNTED if breakdown is None else breakdown.exposed(self.entry.purpose.value):
                for work in self._works:
                    work.wait()
        except RuntimeError as error:
            entry = self.entry
            self._failure = CollectiveError(
                f"{entry.op} of {entry.label} ({entry.purpose.value}) over ranks {list(entry.ranks)} did not complete: "
                f"{error}. Another rank has died, or did not get to this point: with parameters sharded all ranks must "
                f"run the same modules, the same number of batches and the same calls"
            )
            raise self._failure from error
        if flight is not None:
            flight.waited(begin, aside)
        self._works.clear()
        finish, self._finish = self._finish, None
        if finish is not None and flight is not None and not aside:
            flight.finish(finish)
        elif finish is not None:
            finish()
        self._keep.clear()


SUMMED_AT_ONCE = 1 << 16
"""Elements whose fp32 sum is formed in the processor's cache."""


def sum_in_order(parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """Write the sum of ``parts``, each [n], to ``out`` [n]: formed in fp32 at least and in their order, rounded once.

    ``out`` may be one of ``parts``; it shares no other memory with them.
    """
    if len(parts) == 2 and parts[0].dtype == out.dtype:
        # One addition is done wide and rounded once anyway, and in a sixth of the time.
        torch.add(parts[0], parts[1], out=out)
        return
    wide = torch.promote_types(parts[0].dtype, torch.float32)
    for start in range(0, out.numel(), SUMMED_AT_ONCE):
        first, *others = (part[start : start + SUMMED_AT_ONCE] for part in parts)
        total = first.to(wide, copy=True)
        for part in others:
            total.add_(part.to(wide))
        out[start : start + SUMMED_AT_ONCE].copy_(total)


def exchange(
    sections: Sequence[torch.Tensor], index: int, group: dist.ProcessGroup
) -> tuple[list[Any], list[torch.Tensor]]:
    """Send every rank of a gloo group its section; the messages under way, and everybody's section for this rank.

    Gloo runs two collectives of a group at a time, in order, so one that sends much and receives little would keep
    those behind it from the other direction of the link. Messages wait for nothing but their own direction.

    Args:
        sections: what each rank is to get, by its rank in the group, contiguous.
        index: this rank in the group.

    Returns:
        works, to be waited for, and by rank what each has for this one, tensors shaped like its own section.
    """
    incoming = [
        sections[index] if rank == index else torch.empty_like(sections[index]) for rank in range(len(sections))
    ]
    peers = [rank for rank in range(len(sections)) if rank != index]
    # Receives first: a sender waits to hear that its receiver is ready, which travels behind what was sent before.
    works = [_message(group.recv, incoming[rank], rank) for rank in peers]
    works += [_message(group.send, sections[rank], rank) for rank in peers]
    return works, incoming


def _message(send_or_receive: Callable[..., Any], tensor: torch.Tensor, rank: int) -> Any:
    """A message on its way, by the group's own method: dist.isend takes longer than gloo's sending.

    Where the other rank is known to be gone already, whoever waits for it learns so.
    """
    try:
        return send_or_receive([tensor], rank, 0)
    except RuntimeError as error:
        return _NotIssued(error)


class _NotIssued:
    """In place of the work of a message that could not be issued."""

    def __init__(self, error: RuntimeError) -> None:
        self._error = error

    def wait(self) -> None:
        raise self._error

    def get_future(self) -> Any:
        raise self._error


def waits_on_host(device: torch.device) -> bool:
    """Whether waiting for a collective on ``device`` blocks the host (gloo), and not only a stream."""
    return device.type in HOST_DEVICES


def host_names() -> list[str]:
    """The host of every rank, in rank order."""
    return from_every_rank(socket.gethostname())


def from_every_rank(value: Any) -> list[Any]:
    """Every rank's picklable ``value``, in rank order, over the default group; before there is a mesh. Blocks.

    A sum in which each rank fills a place of its own: on gloo that takes a tenth of all_gather_object's time.
    """
    mine = pickle.dumps(value)
    sizes = _in_places(torch.tensor([len(mine)])).flatten().tolist()
    padded = bytearray(mine).ljust(max(sizes), b"\0")
    all_of_them = _in_places(torch.frombuffer(padded, dtype=torch.uint8)).numpy()
    return [pickle.loads(row[:size].tobytes()) for row, size in zip(all_of_them, sizes, strict=True)]


def _in_places(mine: torch.Tensor) -> torch.Tensor:
    """Every rank's ``mine`` [n], as [ranks, n], on the host."""
    places = mine.new_zeros(dist.get_world_size(), len(mine))
    places[dist.get_rank()] = mine
    places = places.to(dist.distributed_c10d._get_object_coll_device())
    dist.all_reduce(places)
    return places.cpu()


class Communicator:
    """Issues collectives on `Group`s and keeps the log of the running and of the last whole step."""

    def __init__(self) -> None:
        self.observer: Callable[[LogEntry, float], None] | None = None
        """Told of every collective and its milliseconds; with one, each is waited for at once, as in DeepSpeed."""
        self.recorder: Recorder | None = None
        """Told when collectives are issued, land and are waited for; None unless somebody traces."""
        self.breakdown: Breakdown | None = None
        """Told what the computation stands still for, and of updates; None unless wall_clock_breakdown is on."""
        self._seq = itertools.count()
        self._running = new_log()
        self._last = new_log()
        self._thread = threading.local()
        self._observing = threading.Lock()

    @property
    def running(self) -> tuple[LogEntry, ...]:
        """Entries since the last `mark_step`, the newest `RUNNING_LOG` of them."""
        return tuple(self._running)

    @property
    def last_step(self) -> tuple[LogEntry, ...]:
        """Entries of the last whole step."""
        return tuple(self._last)

    @property
    def log(self) -> Log:
        """Where the calling thread's collectives are entered."""
        return getattr(self._thread, "log", self._running)

    @contextmanager
    def logging_to(self, log: Log) -> Iterator[None]:
        """Enter this thread's collectives in ``log``: they belong to the step that was running when it was `log`."""
        self._thread.log = log
        try:
            yield
        finally:
            del self._thread.log

    def forget(self) -> None:
        """Empty the log: what set an engine up belongs to no step."""
        self._running = new_log()

    def mark_step(self) -> None:
        """Close the running log: a step ends when its updates have been issued for publishing."""
        self._last, self._running = self._running, new_log()
        if self.recorder is not None:
            self.recorder.step_ended()

    def phase(self, name: str | None) -> None:
        """For traces: the engine's forward, backward or step begins, or (None) ends."""
        if self.recorder is not None:
            self.recorder.phase(name)

    def span(self, name: str, category: str) -> AbstractContextManager[None]:
        """For traces: the block is a slice of computation."""
        return _UNCOUNTED if self.recorder is None else self.recorder.span(name, category)

    @contextmanager
    def updating(self, label: str) -> Iterator[None]:
        """For traces and breakdowns: the block is the owners' update of ``label``."""
        timer = _UNCOUNTED if self.breakdown is None else self.breakdown.timing(UPDATE)
        with timer, self.span(label, "update"):
            yield

    @contextmanager
    def blocked(self, entry: LogEntry) -> Iterator[None]:
        """For both, too: in the block the computation stands still until somebody else has waited for ``entry``."""
        timer = _UNCOUNTED if self.breakdown is None else self.breakdown.exposed(entry.purpose.value)
        with timer, _UNCOUNTED if self.recorder is None else self.recorder.blocked(entry):
            yield

    def all_gather(self, group: Group, shard: torch.Tensor, full: torch.Tensor, label: str) -> Ticket:
        """``full`` [size * n] becomes the concatenation of every rank's ``shard`` [n], by group index."""
        entry = self._log("all_gather", group, full, label)
        with record_function(f"amsp::{group.purpose.value} {label}"):
            work = _all_gather_single(full, shard, group=group.handle, async_op=True)
        return self._ticket(entry, [work], [full, shard])

    def reduce_scatter(
        self, group: Group, sections: torch.Tensor, mine: torch.Tensor, splits: Sequence[int], label: str
    ) -> Ticket:
        """``mine`` [splits[index]] becomes the sum over the group of its section of ``sections`` [sum(splits)].

        gloo's own reduce-scatter is an AllReduce that moves twice the bytes, so CPU tensors go from rank to rank
        (see `exchange`) and are summed here in fp32 and in rank order. Unequal splits have no single NCCL call
        and become one Reduce per section.
        """
        entry = self._log("reduce_scatter", group, sections, label)
        with record_function(f"amsp::{group.purpose.value} {label}"):
            if waits_on_host(sections.device):
                return self._exchange_and_sum(entry, group, sections, mine, splits)
            if len(set(splits)) == 1:
                work = _reduce_scatter_single(mine, sections, group=group.handle, async_op=True)
                return self._ticket(entry, [work], [sections, mine])
            return self._reduce_each(entry, group, sections, mine, splits)

    def all_reduce(self, group: Group, buffer: torch.Tensor, label: str, largest: bool = False) -> Ticket:
        """``buffer`` becomes its sum (``largest``: its maximum) over the group, in place."""
        entry = self._log("all_reduce", group, buffer, label)
        with record_function(f"amsp::{group.purpose.value} {label}"):
            operation = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
            work = dist.all_reduce(buffer, operation, group=group.handle, async_op=True)
        return self._ticket(entry, [work], [buffer])

    def broadcast(self, group: Group, buffer: torch.Tensor, source: int, label: str, message: bool = False) -> Ticket:
        """``buffer`` becomes that of the rank with group index ``source``, in place.

        Args:
            message: between two ranks on gloo, send it as a message that no collective of the group holds up (see
                `exchange`). For callers that wait on a thread: gloo drops a message whose sender leaves the group, but
                sees a collective through.
        """
        entry = self._log("broadcast", group, buffer, label)
        with record_function(f"amsp::{group.purpose.value} {label}"):
            if message and group.size == 2 and waits_on_host(buffer.device):
                handle = group.handle
                assert handle is not None, "the group has two ranks"
                work = _message(handle.send if group.index == source else handle.recv, buffer, 1 - group.index)
            else:
                work = dist.broadcast(buffer, group.ranks[source], group=group.handle, async_op=True)
        return self._ticket(entry, [work], [buffer])

    def all_gather_objects(self, group: Group, value: Any) -> list[Any]:
        """Every rank's picklable ``value``, by group index. Blocks; for set-up and reports only."""
        if group.size == 1:
            return [value]
        values: list[Any] = [None] * group.size
        dist.all_gather_object(values, value, group=group.handle)
        return values

    def _exchange_and_sum(
        self, entry: LogEntry, group: Group, sections: torch.Tensor, mine: torch.Tensor, splits: Sequence[int]
    ) -> Ticket:
        assert group.handle is not None, "who is alone has nothing to exchange"
        works, parts = exchange(sections.split(list(splits)), group.index, group.handle)

        def total() -> None:
            sum_in_order(parts, mine)

        return self._ticket(entry, works, [sections, mine, parts], total)

    def _reduce_each(
        self, entry: LogEntry, group: Group, sections: torch.Tensor, mine: torch.Tensor, splits: Sequence[int]
    ) -> Ticket:
        parts = list(sections.split(list(splits)))
        works = [
            dist.reduce(part, rank, group=group.handle, async_op=True)
            for part, rank in zip(parts, group.ranks, strict=True)
            if part.numel()
        ]

        def pick() -> None:
            mine.copy_(parts[group.index])

        return self._ticket(entry, works, [sections, mine], pick)

    def _ticket(
        self, entry: LogEntry, works: Sequence[Any], keep: Sequence[Any], finish: Callable[[], None] | None = None
    ) -> Ticket:
        flight = None
        if self.recorder is not None:
            # What a helper issues for a step that has ended meanwhile still belongs to that step.
            flight = self.recorder.launched(entry, works, late=self.log is not self._running)
        ticket = Ticket(works, keep, finish, entry, flight, self.breakdown)
        if self.observer is not None:
            start = time.perf_counter()
            ticket.wait()
            milliseconds = 1e3 * (time.perf_counter() - start)
            with self._observing:  # DeepSpeed's logger counts without a lock
                self.observer(entry, milliseconds)
        return ticket

    def _log(self, op: str, group: Group, message: torch.Tensor, label: str) -> LogEntry:
        size = message.numel() * message.element_size()
        entry = LogEntry(next(self._seq), op, group.purpose, group.axis, group.ranks, size, label)
        self.log.append(entry)
        return entry
