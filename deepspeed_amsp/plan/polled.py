"""The replay where stages of a reduction are polled, as on gloo."""

from __future__ import annotations

from dataclasses import dataclass, field

from deepspeed_amsp.plan.replay import Flight, Replay, Timed

IN_FLIGHT = 4
"""Reductions under way when another one starts, where they are polled (`schedule.reduce.IN_FLIGHT`)."""


@dataclass
class PolledReplay(Replay):
    """As `schedule.pipeline` moves reductions on where waiting would block the host."""

    units: list[Flight] = field(default_factory=list)
    buckets: list[Flight] = field(default_factory=list)

    def reduce(self, unit: int, pending: list[int], arrived: list[float], routes: list[Timed] | None) -> None:
        index = self.sends.bucket_of[unit]
        if index is None:
            return
        self.poll(pending, routes)
        stages = self.sends.param_reduce[unit]
        if not stages:
            self.staged(index, pending, routes)
            return
        self.units.append(Flight(index, [], self.send(stages, self.now)))
        while len(self.units) > IN_FLIGHT or (self.units and not self.plan.overlap.reduce_scatter):
            self.wait(self.units[0].done, "reduce_scatter")
            self.poll(pending, routes)

    def poll(self, pending: list[int], routes: list[Timed] | None) -> None:
        """A gradient arrives: move on whatever is done."""
        while self.units and self.units[0].done <= self.now:
            self.staged(self.units.pop(0).key, pending, routes)
        flying, self.buckets = self.buckets, []
        for flight in flying:
            while flight.left and flight.done <= self.now:
                flight.done = self.send([flight.left.pop(0)], self.now)
            if flight.left:
                self.buckets.append(flight)

    def staged(self, index: int, pending: list[int], routes: list[Timed] | None) -> None:
        """A unit's gradient is in its bucket."""
        pending[index] -= 1
        if not pending[index] and routes is not None and self.plan.overlap.all_reduce:
            self.start_polled(index, routes)

    def start_polled(self, index: int, routes: list[Timed]) -> None:
        """Send a bucket's first stage; too many under way are waited for."""
        while len(self.buckets) > IN_FLIGHT:
            self.next_stage(self.buckets[0])
        if not routes[index]:
            return
        if index in self.reduced:
            earlier = self.reduced[index]
            while earlier.left:
                self.next_stage(earlier)
            self.wait(earlier.done, "all_reduce")
        first, *left = routes[index]
        flight = self.reduced[index] = Flight(index, left, self.send([first], self.now))
        if left:
            self.buckets.append(flight)

    def next_stage(self, flight: Flight) -> None:
        """Wait for a stage and send the next one."""
        self.wait(flight.done, "all_reduce")
        flight.done = self.send([flight.left.pop(0)], self.now)
        if not flight.left:
            self.buckets.remove(flight)

    def end_backward(self, arrived: list[float], pending: list[int], routes: list[Timed] | None) -> None:
        while self.units:
            self.wait(self.units[0].done, "reduce_scatter")
            self.poll(pending, routes)
        while self.buckets:
            for flight in list(self.buckets):
                self.next_stage(flight)
