"""What happened when: collectives in flight, waits, and slices of computation. Knows no tensors.

`comm.Communicator` feeds it through one attribute, which is None unless somebody traces. Everything is kept
as stamps of a `Clock` and read when the trace is over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from deepspeed_amsp.trace.clock import Clock, Stamp

if TYPE_CHECKING:
    from deepspeed_amsp.comm import LogEntry


class Flight:
    """One collective: when it was issued, when it landed, and the wait for it.

    ``landings`` has a stamp per work that is known to be complete; there are fewer than ``works`` where a
    process group does not say. It refers to no buffer, so recording keeps nothing alive.
    """

    __slots__ = ("_recorder", "aside", "entry", "issued", "landings", "step", "wait", "works")

    def __init__(self, recorder: Recorder, entry: LogEntry, step: int, works: Sequence[Any]) -> None:
        self._recorder = recorder
        self.entry = entry
        self.step = step
        # After the call that issued it: what that cost the host is no time in flight.
        self.issued: Stamp = recorder.clock.stamp()
        self.landings: list[Stamp] = []
        self.works = len(works)
        self.wait: tuple[Stamp, Stamp] | None = None
        self.aside = False
        """Waited for beside the computation: what that cost, if anything, is among the recorder's blocks."""
        for work in works:
            self._ask_for_landing(work)

    def stamp(self) -> Stamp:
        return self._recorder.clock.stamp()

    def waited(self, begin: Stamp, aside: bool = False) -> None:
        """Somebody has waited since ``begin`` and may go on now."""
        end = self.stamp()
        self.wait, self.aside = (begin, end), aside
        self._recorder.waited(self)

    def finish(self, continuation: Callable[[], None]) -> None:
        """Run what belongs to the collective's arrival, as a slice of computation."""
        with self._recorder.span(f"finish {self.entry.label}", "finish"):
            continuation()

    def _ask_for_landing(self, work: Any) -> None:
        try:
            future = work.get_future()
        except (RuntimeError, NotImplementedError):
            return  # not every process group has futures: then the end of the wait is all that is known
        # No `then`: it would make a second future. The callback runs where the backend completes its work.
        future.add_done_callback(lambda _: self.landings.append(self.stamp()))


class Block(NamedTuple):
    """A stretch in which the computation stood still for collectives of this kind and label."""

    kind: str
    label: str
    begin: Stamp
    end: Stamp


class Slice:
    """A stretch of computation. ``end`` is None while it runs."""

    __slots__ = ("begin", "category", "end", "name")

    def __init__(self, name: str, category: str, begin: Stamp) -> None:
        self.name = name
        self.category = category
        self.begin = begin
        self.end: Stamp | None = None


class Recorder:
    """Records steps ``first`` to ``last`` (None: until it is closed), both included; the running one is step 1.

    A step ends when its updates have been issued for publishing; the publishes are waited for in the next
    forward. So slices are kept, beyond the last step, until every recorded collective has been waited for.
    """

    def __init__(self, clock: Clock, first: int = 1, last: int | None = None) -> None:
        self.clock = clock
        self.first = first
        self.last = last
        self.step = 1
        """The running step."""
        self.flights: list[Flight] = []
        self.slices: list[Slice] = []
        self.boundaries: list[Stamp] = []
        """Begin of the first recorded step, then the end of each."""
        self.over: Stamp | None = None
        """When it was closed."""
        self.blocks: list[Block] = []
        """When the computation stood still, and for what."""
        self._open: list[Slice] = []
        # Other threads issue, wait and land, too: they only append to lists.
        self._waited: list[Flight] = []
        self._gradients_since: Stamp | None = None
        self._mark_boundary()

    @property
    def recording(self) -> bool:
        """Whether the running step is one to record."""
        return self._wants(self.step)

    @property
    def live(self) -> bool:
        return self.recording or len(self._waited) < len(self.flights)

    # ---- collectives ---------------------------------------------------------------------------------------

    def launched(self, entry: LogEntry, works: Sequence[Any], late: bool = False) -> Flight | None:
        """A collective is on its way as ``works``; ``late`` is for the step before the running one."""
        step = self.step - late
        if not self._wants(step):
            return None
        flight = Flight(self, entry, step, works)
        self.flights.append(flight)
        return flight

    def waited(self, flight: Flight) -> None:
        self._waited.append(flight)
        if flight.wait is not None and not flight.aside:
            self.blocks.append(Block(flight.entry.purpose.value, flight.entry.label, *flight.wait))

    @contextmanager
    def blocked(self, entry: LogEntry) -> Iterator[None]:
        """The computation stands still for collectives like ``entry`` that somebody else waits for."""
        begin = self.clock.stamp()
        try:
            yield
        finally:
            self.blocks.append(Block(entry.purpose.value, entry.label, begin, self.clock.stamp()))

    def step_ended(self) -> None:
        recorded = self.recording
        self.step += 1
        if recorded:
            self.boundaries.append(self.clock.stamp())
        else:
            self._mark_boundary()

    # ---- computation ---------------------------------------------------------------------------------------

    @contextmanager
    def span(self, name: str, category: str) -> Iterator[None]:
        """A slice around the block."""
        self.enter(name, category)
        try:
            yield
        finally:
            self.leave(name)

    def phase(self, name: str | None) -> None:
        """The engine's forward, backward or step begins; None: it is over. Ends whatever is still open."""
        self.close_slices()
        self._gradients_since = None
        if name is not None and self.live:
            self.enter(name, "phase")
            self._gradients_since = self._open[-1].begin if name == "backward" else None

    def enter(self, name: str, category: str) -> None:
        if self.live:
            self._open.append(Slice(name, category, self.clock.stamp()))

    def leave(self, name: str) -> None:
        """Ends the innermost open slice of this name, and what was left open inside it (by an exception)."""
        if not any(one.name == name for one in self._open):
            return  # entered before the recording began
        end = self.clock.stamp()
        while self._end_innermost(end).name != name:
            pass

    def gradient(self, unit: str) -> None:
        """A gradient of ``unit`` is complete: since the one before, backward was busy with this unit."""
        if not self.live:
            return
        now = self.clock.stamp()
        previous = self.slices[-1] if self.slices else None
        if previous is not None and previous.name == unit and previous.end is self._gradients_since:
            previous.end = now
        else:
            done = Slice(unit, "backward", self._gradients_since if self._gradients_since is not None else now)
            done.end = now
            self.slices.append(done)
        self._gradients_since = now

    def close(self) -> None:
        """The recording is over; nothing is read yet."""
        self.last = 0
        self.close_slices()
        self.over = self.clock.stamp()

    def close_slices(self) -> None:
        """End what is open."""
        if self._open:
            end = self.clock.stamp()
            while self._open:
                self._end_innermost(end)

    def _end_innermost(self, end: Stamp) -> Slice:
        innermost = self._open.pop()
        innermost.end = end
        self.slices.append(innermost)
        return innermost

    def _wants(self, step: int) -> bool:
        return self.first <= step and (self.last is None or step <= self.last)

    def _mark_boundary(self) -> None:
        if self.step == self.first:
            self.boundaries.append(self.clock.stamp())
