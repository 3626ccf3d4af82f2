"""A replay of the executor's schedule on the clocks of one rank: computation, a node's links, and the network."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count

from deepspeed_amsp.plan.resolve import Plan
from deepspeed_amsp.plan.sends import Sends, Stage, Timed

KINDS = ("gather", "reduce_scatter", "all_reduce", "publish")
"""What computation can wait for, by the name of the overlap switch."""


@dataclass(frozen=True)
class Compute:
    """Seconds of computation: forward and backward by unit for one micro-batch, and an update of one element.

    recomputed: for a unit whose layer is recomputed, the forward that its backward repeats (0 otherwise).
    fixed: seconds of a step that are neither, on the host.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    recomputed: tuple[float, ...]
    update: float
    fixed: float = 0.0

    def step(self, micro_batches: int) -> float:
        """Seconds of M micro-batches without any communication and update."""
        once = sum(self.forward) + sum(self.backward) + sum(self.recomputed)
        return micro_batches * once + self.fixed


@dataclass
class Flight:
    """Something under way in stages: what is left to be sent, and when what was sent last is done."""

    key: int
    left: Timed
    done: float


@dataclass
class Replay:
    """The clocks: ``now`` of computation, ``free`` of the links; and when what is under way will have arrived."""

    sends: Sends
    plan: Plan
    times: Compute
    now: float = 0.0
    updating: float = 0.0
    free: list[float] = field(default_factory=lambda: [0.0, 0.0])
    exposed: dict[str, float] = field(default_factory=lambda: dict.fromkeys(KINDS, 0.0))
    published: dict[int, Flight] = field(default_factory=dict)
    reduced: dict[int, Flight] = field(default_factory=dict)
    flying: list[tuple[float, int, Flight]] = field(default_factory=list)
    numbers: Iterator[int] = field(default_factory=count)
    kept: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.total_forward = sum(self.times.forward)

    def send(self, stages: Timed) -> float:
        """Arrival of what is sent now."""
        if not stages:
            return self.now
        self.issue(stages)
        self.advance(self.now)
        ready = self.now
        for stage in stages:
            ready = self.occupy(stage, ready)
        return ready

    def issue(self, stages: Timed) -> None:
        """What the first stage takes of the thread that computes; later ones are issued beside it."""
        if stages:
            self.now += stages[0].host

    def occupy(self, stage: Stage, ready: float) -> float:
        """First come, first served; when it is done."""
        start = self.free[stage.link]
        if ready > start:
            start = ready
        self.free[stage.link] = start + stage.busy
        return start + stage.seconds

    def launch(self, stages: Timed, ready: float) -> Flight:
        """Something whose later stages go out by themselves, each when the one before is done."""
        self.issue(stages)
        flight = Flight(next(self.numbers), list(stages), max(ready, self.now))
        if stages:
            heappush(self.flying, (flight.done, flight.key, flight))
            self.advance(self.now)
        return flight

    def advance(self, until: float) -> None:
        """Send all stages that are due by then, in order of time: links serve who comes first, not who was planned."""
        while self.flying and self.flying[0][0] <= until:
            due, key, flight = heappop(self.flying)
            flight.done = self.occupy(flight.left.pop(0), due)
            if flight.left:
                heappush(self.flying, (flight.done, key, flight))

    def arrival(self, flight: Flight) -> float:
        """When all of it will be there."""
        while flight.left:
            self.advance(self.flying[0][0])
        return flight.done

    def wait(self, until: float, kind: str) -> None:
        """Computation stands until then."""
        if until > self.now:
            self.exposed[kind] += until - self.now
            self.now = until

    def skip(self, seconds: float) -> None:
        """As if time had passed with nothing new under way at its end."""
        self.now += seconds
        self.free = [at + seconds for at in self.free]
        for flight in {id(f): f for f in (*self.published.values(), *self.reduced.values())}.values():
            flight.done += seconds
        self.flying = [(due + seconds, key, flight) for due, key, flight in self.flying]

    # --- the step --------------------------------------------------------------------------------------------

    def step_phase(self, update: bool) -> None:
        """The norm, then owners ``update`` and publish bucket by bucket in forward order; or they only publish."""
        if update:
            self.wait(self.send(self.sends.scalars), "all_reduce")
        for index, stages in enumerate(self.sends.publish):
            if update:
                self.update(index)
            if stages:
                self.published[index] = self.launch(stages, self.now)
                if not self.plan.overlap.publish:
                    self.wait(self.arrival(self.published.pop(index)), "publish")

    def end_of_step(self, update: bool) -> None:
        """Gradients arrive at their owners, the last bucket first, and owners may ``update`` it at once."""
        for index in reversed(range(self.sends.buckets)):
            if index in self.reduced:
                self.wait(self.arrival(self.reduced.pop(index)), "all_reduce")
            if update:
                self.update(index)

    def update(self, index: int) -> None:
        """Until the slowest owner of a bucket has done its part."""
        seconds = self.times.update * self.sends.updates[index]
        self.now += seconds
        self.updating += seconds

    # --- a micro-batch ---------------------------------------------------------------------------------------

    def micro_batch(self, first: bool, last: bool) -> None:
        """Forward and backward."""
        self.forward(first)
        if last:
            self.backward(self.sends.final)
        else:
            self.backward(self.sends.partial if self.plan.sharding.optim_inner > 1 else None)

    def forward(self, first: bool) -> None:
        """Units in order; gathers run ahead by bytes, but of those still being published only the very next one."""
        if self.plan.sharding.s_p == 1:
            self.forward_whole(first)
            return
        sizes, units = self.sends.gathered_bytes, len(self.sends.gathered_bytes)
        budget = self.plan.prefetch_bytes if self.plan.overlap.gather else 0
        arrivals = [0.0] * units
        issued, ahead = 0, 0.0  # units whose gather was issued, and their bytes behind the one that runs
        for unit in range(units):
            if issued == unit:
                arrivals[unit] = self.gather(unit)
                issued += 1
            else:
                ahead -= sizes[unit]
            while issued < units and ahead < budget:
                if ahead and self.sends.bucket_of[issued] in self.published:
                    break
                arrivals[issued] = self.gather(issued)
                ahead += sizes[issued]
                issued += 1
            if arrivals[unit] > self.now:
                self.wait(arrivals[unit], "gather")
            self.now += self.times.forward[unit]
        self.keep()

    def forward_whole(self, first: bool) -> None:
        """Nothing to gather: only what the last step published is waited for."""
        if not (first and self.published):
            self.now += self.total_forward
            return
        for unit, seconds in enumerate(self.times.forward):
            self.await_publish(unit)
            self.now += seconds

    def keep(self) -> None:
        """The last units used stay gathered, as far as they may."""
        left = self.plan.kept_bytes
        self.kept.clear()
        for unit in reversed(range(len(self.sends.gathered_bytes))) if left else ():
            left -= self.sends.gathered_bytes[unit]
            if left < 0:
                break
            self.kept.add(unit)

    def backward(self, routes: list[Timed] | None) -> None:
        """Units in reverse, recomputed layers as a whole; ``routes`` of the buckets that are reduced now."""
        pending = list(self.sends.members)
        arrived = [0.0] * len(pending)
        gathered: dict[int, float] = {}
        sharded, ahead = self.plan.sharding.s_p > 1, self.plan.overlap.gather and self.plan.prefetch_bytes > 0
        unit, first = len(self.times.backward) - 1, self.sends.backward_starts
        while unit >= first:
            run = self.sends.recomputed[unit]
            if run:
                before = self.sends.recomputed[run.start - 1] if run.start > first else range(0)
                self.recompute(run, before if ahead else range(0), gathered)
            elif sharded:
                arrival = gathered.pop(unit) if unit in gathered else self.gather(unit)
                if unit > first and ahead and unit - 1 not in gathered:
                    gathered[unit - 1] = self.gather(unit - 1)
                if arrival > self.now:
                    self.wait(arrival, "gather")
            for member in reversed(run) if run else (unit,):
                self.now += self.times.backward[member]
                self.reduce(member, pending, arrived, routes)
            unit = (run.start if run else unit) - 1
        self.kept.clear()
        self.wait(max(arrived, default=0.0), "reduce_scatter")  # the next micro-batch adds to what is there
        if routes is not None and not self.plan.overlap.all_reduce:
            for index in reversed(range(len(pending))):
                self.start(index, routes, self.now)
                self.wait(self.arrival(self.reduced[index]), "all_reduce")

    def recompute(self, run: range, before: range, gathered: dict[int, float]) -> None:
        """A layer's forward once more; its parameters stay gathered, and those of the layer ``before`` come along."""
        sharded = self.plan.sharding.s_p > 1
        for unit in run:
            if sharded:
                arrival = gathered.pop(unit) if unit in gathered else self.gather(unit)
                for coming in before if unit == run.start else ():
                    gathered[coming] = self.gather(coming)
                if arrival > self.now:
                    self.wait(arrival, "gather")
            self.now += self.times.recomputed[unit]

    def gather(self, unit: int) -> float:
        """Issue it, unless it was kept; when it will have arrived."""
        if unit in self.kept:
            return self.now
        if self.published:
            self.await_publish(unit)
        arrival = self.send(self.sends.gather[unit])
        if not self.plan.overlap.gather:
            self.wait(arrival, "gather")
        return arrival

    def await_publish(self, unit: int) -> None:
        """The working copies of a unit are current."""
        index = self.sends.bucket_of[unit]
        if index is not None and index in self.published:
            self.wait(self.arrival(self.published.pop(index)), "publish")

    def reduce(self, unit: int, pending: list[int], arrived: list[float], routes: list[Timed] | None) -> None:
        """A unit's gradient is complete: over ``param``, and with the last of its bucket to the owner."""
        index = self.sends.bucket_of[unit]
        if index is None:
            return
        done = self.send(self.sends.param_reduce[unit])
        if not self.plan.overlap.reduce_scatter:
            self.wait(done, "reduce_scatter")
        arrived[index] = max(arrived[index], done) if self.sends.param_reduce[unit] else 0.0
        pending[index] -= 1
        if not pending[index] and routes is not None and self.plan.overlap.all_reduce:
            self.start(index, routes, max(self.now, arrived[index]))

    def start(self, index: int, routes: list[Timed], ready: float) -> None:
        """A bucket's reduction, after that of the micro-batch before; when it will be through."""
        if index in self.reduced:
            ready = max(ready, self.arrival(self.reduced.pop(index)))
        self.reduced[index] = self.launch(routes[index], ready)
