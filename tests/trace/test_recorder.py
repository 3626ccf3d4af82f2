"""The recorder and what is read from it, with clocks that the test moves."""

from __future__ import annotations

from typing import Any

import pytest

from deepspeed_amsp.comm import LogEntry
from deepspeed_amsp.mesh import Purpose
from deepspeed_amsp.trace.chrome import ROWS, rank_events
from deepspeed_amsp.trace.clock import DeviceClock
from deepspeed_amsp.trace.reading import (
    KINDS,
    StepSummary,
    Trip,
    mean_of_ranks,
    read_trips,
    seconds_in_flight,
    summarise,
)
from deepspeed_amsp.trace.recorder import Recorder


class HandClock:
    """Shows what it is set to."""

    name = "host"
    started = 0.0

    def __init__(self) -> None:
        self.now = 0.0

    def stamp(self) -> float:
        return self.now

    def settle(self) -> None:
        pass

    def seconds(self, stamp: float) -> float:
        return stamp


class Future:
    def __init__(self) -> None:
        self.callbacks: list[Any] = []

    def add_done_callback(self, callback: Any) -> None:
        self.callbacks.append(callback)


class Work:
    """``lands`` when the test says so; without futures it is as silent as some process groups."""

    def __init__(self, futures: bool = True) -> None:
        self._future = Future() if futures else None

    def get_future(self) -> Future:
        if self._future is None:
            raise NotImplementedError
        return self._future

    def lands(self) -> None:
        for callback in self.get_future().callbacks:
            callback(None)


def entry(seq: int = 0, purpose: Purpose = Purpose.GATHER, label: str = "unit") -> LogEntry:
    return LogEntry(seq, "all_gather", purpose, "param", (0, 1), 64, label)


def trip_of(events: list[tuple[float, str]], futures: bool = True) -> Trip:
    """A collective of two works, issued at 1.0, to which ``events`` happen; the trace is over at 10.0."""
    clock = HandClock()
    recorder = Recorder(clock)
    works = [Work(futures), Work(futures)]
    clock.now = 1.0
    flight = recorder.launched(entry(), works)
    assert flight is not None
    begin = 0.0
    for clock.now, what in events:
        if what == "first lands":
            works[0].lands()
        elif what == "second lands":
            works[1].lands()
        elif what == "wait begins":
            begin = flight.stamp()
        else:
            flight.waited(begin)
    clock.now = 10.0
    recorder.close()
    return read_trips(recorder)[0]


@pytest.mark.parametrize(
    ("events", "futures", "in_flight", "exposed"),
    [
        # Waited for at once: all exposed.
        ([(1.0, "wait begins"), (2.0, "first lands"), (3.0, "second lands"), (3.0, "wait ends")], True, 2.0, 2.0),
        # Landed before anybody waited: all hidden, and the wait costs nothing.
        ([(2.0, "second lands"), (3.0, "first lands"), (4.0, "wait begins"), (4.1, "wait ends")], True, 2.0, 0.0),
        # Half and half; the second work is the later one.
        ([(2.0, "first lands"), (3.0, "wait begins"), (5.0, "second lands"), (5.0, "wait ends")], True, 4.0, 2.0),
        # Nobody waits within the trace: in flight until it lands, or until the end.
        ([(2.0, "first lands"), (3.0, "second lands")], True, 2.0, 0.0),
        ([(2.0, "first lands")], True, 9.0, 0.0),
        # A group that does not say when it has landed: in flight until the wait is over.
        ([(4.0, "wait begins"), (5.0, "wait ends")], False, 4.0, 1.0),
    ],
)
def test_exposed_and_hidden(events: list[tuple[float, str]], futures: bool, in_flight: float, exposed: float) -> None:
    trip = trip_of(events, futures)
    assert trip.done - trip.issued == pytest.approx(in_flight)
    assert trip.exposed == pytest.approx(exposed)
    assert trip.exposed + trip.hidden == pytest.approx(in_flight)


def test_what_is_waited_for_aside_is_exposed_while_the_computation_stands_still() -> None:
    """Two collectives of a first stage, the second issued late for its step; the computation arrives at 3.0."""
    clock = HandClock()
    recorder = Recorder(clock)
    works = [Work(), Work()]
    recorder.step_ended()
    flights = [recorder.launched(entry(seq, Purpose.PUBLISH), [work], late=True) for seq, work in enumerate(works)]
    other = recorder.launched(entry(2, Purpose.PUBLISH, "another"), [Work()])
    assert other is not None
    block = recorder.blocked(entry(0, Purpose.PUBLISH))
    clock.now = 3.0
    block.__enter__()
    for flight, work, clock.now in zip(flights, works, (4.0, 5.0), strict=True):
        assert flight is not None and flight.step == 1
        work.lands()
        flight.waited(0.0, aside=True)
    clock.now = 6.0
    block.__exit__(None, None, None)
    other.waited(6.0, aside=True)
    clock.now = 7.0
    recorder.step_ended()
    recorder.close()
    trips = read_trips(recorder)
    assert [(trip.done, trip.exposed) for trip in trips] == [(4.0, 1.0), (5.0, 2.0), (6.0, 0.0)]
    first, second = summarise(recorder, trips)
    assert (first.exposed["publish"], second.exposed["publish"]) == (2e3, 0.0)


def test_only_the_steps_that_were_asked_for() -> None:
    """A publish of the last one is still followed to its wait, and so is what computes until then."""
    clock = HandClock()
    recorder = Recorder(clock, first=2, last=3)
    flights = []
    for step in (1, 2, 3, 4):
        with recorder.span(f"compute {step}", "forward"):
            clock.now += 1.0
        flights.append(recorder.launched(entry(step, Purpose.PUBLISH), [Work()]))
        clock.now += 1.0
        recorder.step_ended()
        if step == 2:
            flights[1].waited(clock.now)
    assert [flight is None for flight in flights] == [True, False, False, True]
    with recorder.span("next forward", "forward"):
        clock.now += 1.0
        flights[2].waited(clock.now - 0.5)
    with recorder.span("later", "forward"):
        clock.now += 1.0
    recorder.close()
    assert [one.name for one in recorder.slices] == ["compute 2", "compute 3", "compute 4", "next forward"]
    summaries = summarise(recorder, read_trips(recorder))
    assert [(one.step, one.ms, one.collectives, one.bytes) for one in summaries] == [(2, 2e3, 1, 64), (3, 2e3, 1, 64)]
    assert summaries[1].exposed == {**dict.fromkeys(KINDS, 0.0), "publish": 500.0}


def test_a_phase_ends_what_an_exception_left_open() -> None:
    clock = HandClock()
    recorder = Recorder(clock)
    recorder.leave("entered before the recording")
    recorder.phase("forward")
    recorder.enter("layer", "forward")
    clock.now = 1.0
    recorder.phase("backward")
    clock.now = 2.0
    for unit, clock.now in (("head", 3.0), ("layer", 4.0), ("layer", 5.0)):
        recorder.gradient(unit)
    recorder.phase(None)
    found = {(one.name, one.begin, one.end) for one in recorder.slices}
    assert found == {
        ("forward", 0.0, 1.0), ("layer", 0.0, 1.0), ("backward", 1.0, 5.0), ("head", 1.0, 3.0), ("layer", 3.0, 5.0)
    }  # fmt: skip


def test_collectives_in_flight_together_get_lanes() -> None:
    clock = HandClock()
    recorder = Recorder(clock)
    flights = [recorder.launched(entry(seq), [Work()]) for seq in range(3)]
    clock.now = 1.0
    for flight in flights:
        flight.waited(0.5)
    fourth = recorder.launched(entry(3), [Work()])
    clock.now = 2.0
    fourth.waited(1.5)
    recorder.close()
    events = rank_events(recorder, read_trips(recorder), rank=7, host="node", shift=0.25)
    gather = ROWS.index("gather")
    shown = [(event["tid"] // 1000, event["tid"] % 1000, event["ts"]) for event in events if event["ph"] == "X"]
    assert [one for one in shown if one[0] == gather] == [
        (gather, 0, 0.25e6), (gather, 0, 1.25e6), (gather, 1, 0.25e6), (gather, 2, 0.25e6)
    ]  # fmt: skip
    assert {event["pid"] for event in events} == {7}


def test_every_purpose_has_a_row() -> None:
    assert {purpose.value for purpose in Purpose} <= set(ROWS)
    assert {*KINDS, "setup", "profile"} == {purpose.value for purpose in Purpose}


def test_time_in_flight_counts_once() -> None:
    trips = [Trip(entry(), 1, a, b, b, True) for a, b in ((0.0, 2.0), (1.0, 3.0), (1.5, 1.75), (5.0, 6.0))]
    assert seconds_in_flight(trips) == pytest.approx(4.0)


def test_ranks_are_averaged_step_by_step() -> None:
    ranks = [[StepSummary(4, ms, 4.0, {"gather": gather}, 3, 30)] for ms, gather in ((10.0, 1.0), (20.0, 3.0))]
    (mean,) = mean_of_ranks(ranks)
    assert (mean.step, mean.ms, mean.exposed["gather"], mean.collectives) == (4, 15.0, 2.0, 3)
    assert mean.line().startswith("step 4: 15.0 ms, communication in flight 4.0 ms, exposed 2.0 ms (gather 2.0, ")


class Accelerator:
    """A device whose stream reaches an event when the test says so, and that counts host synchronisations."""

    def __init__(self) -> None:
        self.synchronised = 0
        self.stream_ms = 0.0

    def Event(self, enable_timing: bool) -> Any:
        assert enable_timing
        return Event(self)

    def synchronize(self) -> None:
        self.synchronised += 1


class Event:
    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self.at: float | None = None

    def record(self) -> None:
        self.at = self._accelerator.stream_ms

    def elapsed_time(self, later: Event) -> float:
        assert self._accelerator.synchronised == 2, "events are read after the end, never in between"
        assert self.at is not None and later.at is not None
        return later.at - self.at


def test_a_device_is_only_waited_for_before_and_after() -> None:
    """Exposed is how long the stream stood still between the two events around the wait."""
    accelerator = Accelerator()
    recorder = Recorder(DeviceClock(accelerator))
    accelerator.stream_ms = 10.0
    work = Work()
    flight = recorder.launched(entry(), [work])
    assert flight is not None
    accelerator.stream_ms = 14.0
    begin = flight.stamp()
    accelerator.stream_ms = 17.0
    work.lands()
    flight.waited(begin)
    recorder.step_ended()
    assert accelerator.synchronised == 1
    recorder.close()
    recorder.clock.settle()
    (trip,) = read_trips(recorder)
    assert (trip.issued, trip.exposed, trip.hidden) == pytest.approx((0.010, 0.003, 0.004))
