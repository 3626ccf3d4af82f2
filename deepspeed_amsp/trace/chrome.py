"""A trace as Chrome's and Perfetto's JSON: pid is the rank, a row (tid) is a kind of work.

Collectives of one kind that are in flight together get a lane each below the kind's row, since slices of one
thread must nest. The format: "Trace Event Format", complete events ("X") and metadata ("M").
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from deepspeed_amsp.trace.reading import KINDS, Trip, union
from deepspeed_amsp.trace.recorder import Recorder

ROWS = ("step", "compute", *KINDS, "setup", "profile")
LANES = 1000
"""tid of a row: its index times this; its lanes follow."""

Event = dict[str, Any]
Interval = tuple[int, int, str, str, dict[str, Any]]
"""Begin and end in nanoseconds, name, category, arguments."""


def rank_events(recorder: Recorder, trips: Sequence[Trip], rank: int, host: str, shift: float) -> list[Event]:
    """All events of one rank.

    Args:
        shift: seconds to add to the rank's clock to get that of the trace.
    """
    seconds = recorder.clock.seconds

    def interval(begin: float, end: float, name: str, category: str, **arguments: Any) -> Interval:
        start = round(1e9 * (begin + shift))
        return start, max(start, round(1e9 * (end + shift))), name, category, arguments

    ends = [seconds(stamp) for stamp in recorder.boundaries]
    rows: dict[str, list[Interval]] = {row: [] for row in ROWS}
    rows["step"] = [
        interval(begin, end, f"step {recorder.first + offset}", "step", step=recorder.first + offset)
        for offset, (begin, end) in enumerate(pairwise(ends))
    ]
    rows["compute"] = [
        interval(seconds(one.begin), seconds(one.end), one.name, one.category)
        for one in recorder.slices
        if one.end is not None
    ]
    exposed: dict[str, list[tuple[float, float]]] = {}
    for trip in trips:
        kind = trip.entry.purpose.value
        exposed.setdefault(f"wait: {kind} {trip.entry.label}", []).append((trip.exposed_from, trip.done))
        rows.setdefault(kind, []).append(interval(trip.issued, trip.done, trip.entry.label, kind, **_facts(trip)))
    for text, found in exposed.items():
        rows["compute"] += [interval(begin, end, text, "wait") for begin, end in union(found)]
    events = [_named("process_name", rank, 0, name=f"rank {rank} on {host}")]
    events.append(_named("process_sort_index", rank, 0, sort_index=rank))
    for index, (row, unsorted) in enumerate(rows.items()):
        intervals = sorted(unsorted, key=lambda one: (one[0], -one[1]))
        lanes = [_nested(intervals)] if row in ("step", "compute") else _lanes(intervals)
        for number, lane in enumerate(lanes):
            tid = index * LANES + number
            name = row if number == 0 else f"{row} ({number + 1})"
            events.append(_named("thread_name", rank, tid, name=name))
            events.append(_named("thread_sort_index", rank, tid, sort_index=tid))
            events += [_complete(rank, tid, one) for one in lane]
    return events


def _facts(trip: Trip) -> dict[str, Any]:
    entry = trip.entry
    return {
        "seq": entry.seq,
        "op": entry.op,
        "axis": entry.axis,
        "ranks": len(entry.ranks),
        "bytes": entry.bytes,
        "step": trip.step,
        "exposed_us": 1e6 * trip.exposed,
        "hidden_us": 1e6 * trip.hidden,
        "waited": trip.waited,
    }


def _nested(intervals: Iterable[Interval]) -> list[Interval]:
    """Sorted intervals, each cut to the one around it: device stamps may overlap by the length of a tick."""
    around: list[int] = []
    result = []
    for begin, end, name, category, arguments in intervals:
        while around and around[-1] <= begin:
            around.pop()
        end = min(end, around[-1]) if around else end
        around.append(end)
        result.append((begin, end, name, category, arguments))
    return result


def _lanes(intervals: Iterable[Interval]) -> list[list[Interval]]:
    """Sorted intervals, spread so that none overlaps another of its lane."""
    lanes: list[list[Interval]] = []
    for one in intervals:
        for lane in lanes:
            if lane[-1][1] <= one[0]:
                lane.append(one)
                break
        else:
            lanes.append([one])
    return lanes


def _complete(pid: int, tid: int, one: Interval) -> Event:
    begin, end, name, category, arguments = one
    event = {"name": name, "cat": category, "ph": "X", "ts": begin / 1e3, "dur": (end - begin) / 1e3}
    return {**event, "pid": pid, "tid": tid, "args": arguments}


def _named(what: str, pid: int, tid: int, **arguments: Any) -> Event:
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "args": arguments}
