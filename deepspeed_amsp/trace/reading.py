"""From stamps to numbers: how long each collective was in flight, how much of it was exposed, and per step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from deepspeed_amsp.trace.clock import HostClock, Stamp
from deepspeed_amsp.trace.recorder import Flight, Recorder

if TYPE_CHECKING:
    from deepspeed_amsp.comm import LogEntry

KINDS = ("gather", "param_reduce", "grad_reduce", "grad_gather", "publish", "scalars")
"""Kinds of communication, by the purpose of their group."""


@dataclass(frozen=True)
class Trip:
    """A collective in seconds of its clock.

    It is in flight from ``issued`` to ``done``. Exposed is the part of that in which the computation stood
    still for it; the rest was hidden. Who waits for a collective that has landed already exposes nothing.
    """

    entry: LogEntry
    step: int
    issued: float
    done: float
    exposed_from: float
    waited: bool

    @property
    def exposed(self) -> float:
        return self.done - self.exposed_from

    @property
    def hidden(self) -> float:
        return self.exposed_from - self.issued


@dataclass(frozen=True)
class StepSummary:
    """One step: its milliseconds, those in which communication was in flight, and by kind those that were exposed.

    A collective belongs to the step that issued it: a publish is exposed, if at all, in the next forward.
    """

    step: int
    ms: float
    in_flight: float
    exposed: dict[str, float] = field(default_factory=dict)
    collectives: int = 0
    bytes: int = 0

    def line(self) -> str:
        total = sum(self.exposed.values())
        kinds = ", ".join(f"{kind} {self.exposed.get(kind, 0.0):.1f}" for kind in KINDS)
        return (
            f"step {self.step}: {self.ms:.1f} ms, communication in flight {self.in_flight:.1f} ms, exposed "
            f"{total:.1f} ms ({kinds}); {self.collectives} collectives, {self.bytes / 2**20:.2f} MiB"
        )

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def read_trips(recorder: Recorder) -> list[Trip]:
    """Every recorded collective, in order of issue; the recorder is closed and its clock has settled."""
    seconds = recorder.clock.seconds
    blocks: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for block in recorder.blocks:
        blocks[block.kind, block.label].append((seconds(block.begin), seconds(block.end)))
    over = seconds(recorder.over)
    trips = [
        _trip(flight, seconds, blocks[flight.entry.purpose.value, flight.entry.label], over)
        for flight in recorder.flights
    ]
    return sorted(trips, key=lambda trip: trip.entry.seq)


def summarise(recorder: Recorder, trips: Sequence[Trip]) -> list[StepSummary]:
    """One summary per recorded step that ended."""
    times = [recorder.clock.seconds(stamp) for stamp in recorder.boundaries]
    of_step: dict[int, list[Trip]] = defaultdict(list)
    for trip in trips:
        of_step[trip.step].append(trip)
    summaries = []
    for offset, (begin, end) in enumerate(pairwise(times)):
        step = recorder.first + offset
        intervals: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
        for trip in of_step[step]:
            # Stages that somebody waits for aside may be exposed together; that time counts once.
            intervals.setdefault(trip.entry.purpose.value, []).append((trip.exposed_from, trip.done))
        exposed = {kind: 1e3 * sum(b - a for a, b in union(found)) for kind, found in intervals.items()}
        sizes = [trip.entry.bytes for trip in of_step[step]]
        in_flight = 1e3 * seconds_in_flight(of_step[step])
        summaries.append(StepSummary(step, 1e3 * (end - begin), in_flight, exposed, len(sizes), sum(sizes)))
    return summaries


def exposed_lately(recorder: Recorder) -> dict[str, float]:
    """Milliseconds by kind in which the computation stood still in the last recorded step, while recording goes on.

    Empty if no step has ended, or if the clock cannot be read without waiting for the device.
    """
    if not isinstance(recorder.clock, HostClock) or len(recorder.boundaries) < 2:
        return {}
    begin, end = map(recorder.clock.seconds, recorder.boundaries[-2:])
    stood: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
    for block in reversed(recorder.blocks):
        since, until = recorder.clock.seconds(block.begin), recorder.clock.seconds(block.end)
        if until < begin:
            break
        stood.setdefault(block.kind, []).append((max(since, begin), min(until, end)))
    return {kind: 1e3 * sum(b - a for a, b in union(found)) for kind, found in stood.items()}


def seconds_in_flight(trips: Iterable[Trip]) -> float:
    """Time in which at least one of ``trips`` was in flight."""
    return sum(end - begin for begin, end in union((trip.issued, trip.done) for trip in trips))


def union(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The intervals with those that overlap made one, and without the empty ones."""
    result: list[tuple[float, float]] = []
    for begin, end in sorted(intervals):
        if end <= begin:
            continue
        if result and begin <= result[-1][1]:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        else:
            result.append((begin, end))
    return result


def mean_of_ranks(ranks: Sequence[Sequence[StepSummary]]) -> list[StepSummary]:
    """Step by step the mean over ranks; counts and bytes, too, are those of an average rank."""
    means = []
    for steps in zip(*ranks, strict=False):
        count = len(steps)
        means.append(
            StepSummary(
                step=steps[0].step,
                ms=sum(one.ms for one in steps) / count,
                exposed=_mean([one.exposed for one in steps]),
                in_flight=sum(one.in_flight for one in steps) / count,
                collectives=round(sum(one.collectives for one in steps) / count),
                bytes=round(sum(one.bytes for one in steps) / count),
            )
        )
    return means


def _mean(values: Sequence[dict[str, float]]) -> dict[str, float]:
    return {kind: sum(one.get(kind, 0.0) for one in values) / len(values) for kind in values[0]}


def _trip(
    flight: Flight, seconds: Callable[[Stamp], float], blocks: Sequence[tuple[float, float]], over: float
) -> Trip:
    """
    Args:
        blocks: when the computation stood still for collectives of this kind and label.
        over: the end of the trace.
    """
    issued = seconds(flight.issued)
    known = bool(flight.works) and len(flight.landings) == flight.works
    landed = max(issued, *map(seconds, flight.landings)) if known else None
    if flight.wait is None:
        # Nobody has waited for it yet, so nothing of it was exposed.
        done = exposed_from = max(issued, landed if landed is not None else over)
        return Trip(flight.entry, flight.step, issued, done, exposed_from, waited=False)
    begin, end = max(issued, seconds(flight.wait[0])), seconds(flight.wait[1])
    done = landed if landed is not None and (landed <= begin or flight.aside) else max(begin, end)
    exposed_from = min(begin, done)
    if flight.aside:
        starts = [max(issued, since) for since, until in blocks if since < done and until > issued]
        exposed_from = min([done, *starts])
    return Trip(flight.entry, flight.step, issued, done, exposed_from, waited=True)
