"""How long a step takes: a fast model of the executor's schedule, for one rank of a plan.

One compute stream and two links, a node's own and the network between nodes. A collective occupies the slower link
that it crosses, first come first served; computation waits for it where the executor would. The profile's times
were taken with all sibling groups active, so one rank stands for all.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

from deepspeed_amsp.plan.owners import geometry
from deepspeed_amsp.plan.profile import Profile
from deepspeed_amsp.plan.resolve import Plan
from deepspeed_amsp.plan.routes import Routes, Stages, buckets
from deepspeed_amsp.plan.specs import ClusterSpec, ModelSpec, TrainSpec

NODE, CROSS = 0, 1
KINDS = ("gather", "reduce_scatter", "all_reduce", "publish")
"""What computation can wait for, by the name of the overlap switch."""

SIMULATED = 3
"""Micro-batches in the middle of a step; by then what the first one left behind has worn off."""

Timed = list[tuple[int, float]]
"""(link, seconds) of each stage."""


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


def compute(model: ModelSpec, cluster: ClusterSpec, train: TrainSpec) -> Compute:
    """From FLOPs at the cluster's efficiency: a backward takes twice a forward; updates are bound by memory."""
    rate = cluster.peak_flops * cluster.efficiency
    forward = tuple(unit.forward_flops(train.sequence, train.micro_batch) / rate for unit in model.units)
    again = [
        seconds if train.recompute and unit.layer is not None else 0.0
        for seconds, unit in zip(forward, model.units, strict=True)
    ]
    update = train.optimizer.traffic / cluster.memory_bandwidth
    return Compute(forward, tuple(2 * seconds for seconds in forward), tuple(again), update)


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step. exposed: what computation waited for, by kind; update: on the busiest owner."""

    seconds: float
    compute: float
    update: float
    exposed: dict[str, float]

    @property
    def exposed_total(self) -> float:
        """Seconds in which nothing was computed."""
        return sum(self.exposed.values())


def step_time(model: ModelSpec, plan: Plan, train: TrainSpec, profile: Profile, times: Compute) -> StepTime:
    """Simulate a step in the steady state, from where nothing but publishing reaches from one step into the next.

    With clipping that is when all gradients are there and owners begin to update. Without, owners have updated as
    buckets arrived, and begin to publish. Micro-batches between the first and the last are alike:
    SIMULATED of them are simulated, and the last of these stands for all others.
    """
    run = _Run(_sends(model, plan, train, profile), plan, times, model)
    m = train.micro_batches
    run.step_phase(update=train.gradient_clipping)
    run.micro_batch(first=True, last=m == 1)
    for _ in range(min(m - 2, SIMULATED - 1)):
        run.micro_batch(first=False, last=False)
    if m - 2 >= SIMULATED:
        before, waited = run.now, dict(run.exposed)
        run.micro_batch(first=False, last=False)
        more = m - 2 - SIMULATED
        for kind in KINDS:
            run.exposed[kind] += more * (run.exposed[kind] - waited[kind])
        run.skip(more * (run.now - before))
    if m > 1:
        run.micro_batch(first=False, last=True)
    run.end_of_step(update=not train.gradient_clipping)
    return StepTime(run.now + times.fixed, times.step(m), run.updating, run.exposed)


@dataclass(frozen=True)
class _Sends:
    """Durations of everything a plan sends, and the sizes that decide when.

    members: by bucket, how many units. updates: by bucket, elements (see `owners.Geometry`). recomputed: by unit, the
    run of units of its layer if that is recomputed, else an empty one.
    """

    gather: list[Timed]
    gathered_bytes: list[float]
    param_reduce: list[Timed]
    members: list[int]
    partial: list[Timed]
    final: list[Timed]
    publish: list[Timed]
    updates: tuple[int, ...]
    scalars: Timed
    recomputed: list[range]
    bucket_of: list[int | None]

    @property
    def buckets(self) -> int:
        return len(self.members)


def _timed(stages: Stages, profile: Profile) -> Timed:
    return [
        (CROSS if message.mesh.s1 > 1 else NODE, message.copies * profile.time(message.op, message.size, message.mesh))
        for message in stages
    ]


def _sends(model: ModelSpec, plan: Plan, train: TrainSpec, profile: Profile) -> _Sends:
    routes, wire = Routes(plan), train.parameter_bytes

    @cache
    def unit(size: float) -> tuple[Timed, Timed]:
        return _timed(routes.gather(size), profile), _timed(routes.param_reduce(size), profile)

    @cache
    def reduced(size: float) -> tuple[Timed, Timed]:
        return _timed(routes.partial(size), profile), _timed(routes.final(size), profile)

    @cache
    def published(size: float, gathered: bool) -> Timed:
        return _timed(routes.publish(size, gathered), profile)

    made, places = buckets(model, plan, train), geometry(model, plan, train)
    sizes = [wire * float(member.numel) for member in model.units]
    bucket_of: list[int | None] = [None] * len(model.units)
    for index, bucket in enumerate(made):
        for member in bucket.units:
            bucket_of[member] = index
    layers = model.ranges
    return _Sends(
        gather=[unit(size)[0] for size in sizes],
        gathered_bytes=sizes,
        param_reduce=[unit(size)[1] if u.trainable_numel else [] for size, u in zip(sizes, model.units, strict=True)],
        members=[len(bucket.units) for bucket in made],
        partial=[reduced(bucket.reduced)[0] for bucket in made],
        final=[reduced(bucket.reduced)[1] for bucket in made],
        publish=[published(bucket.published, bucket.gathered) for bucket in made],
        updates=places.updates_forward if train.gradient_clipping else places.updates_backward,
        scalars=_timed(routes.scalars(), profile),
        recomputed=[
            layers[unit.layer] if train.recompute and unit.layer is not None else range(0) for unit in model.units
        ],
        bucket_of=bucket_of,
    )


@dataclass
class _Run:
    """The clocks: ``now`` of computation, ``free`` of the links; and when what is under way will have arrived."""

    sends: _Sends
    plan: Plan
    times: Compute
    model: ModelSpec
    now: float = 0.0
    updating: float = 0.0
    free: list[float] = field(default_factory=lambda: [0.0, 0.0])
    exposed: dict[str, float] = field(default_factory=lambda: dict.fromkeys(KINDS, 0.0))
    published: dict[int, float] = field(default_factory=dict)
    reduced: dict[int, float] = field(default_factory=dict)
    kept: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.total_forward = sum(self.times.forward)

    def send(self, stages: Timed, ready: float) -> float:
        """Arrival of what is ready to be sent at ``ready``."""
        free = self.free
        for link, seconds in stages:
            start = free[link]
            if ready > start:
                start = ready
            ready = free[link] = start + seconds
        return ready

    def wait(self, until: float, kind: str) -> None:
        """Computation stands until then."""
        if until > self.now:
            self.exposed[kind] += until - self.now
            self.now = until

    def skip(self, seconds: float) -> None:
        """As if time had passed with nothing new under way at its end."""
        self.now += seconds
        self.free = [at + seconds for at in self.free]
        for arrivals in (self.published, self.reduced):
            arrivals.update({key: at + seconds for key, at in arrivals.items()})

    # --- the step --------------------------------------------------------------------------------------------

    def step_phase(self, update: bool) -> None:
        """The norm, then owners ``update`` and publish bucket by bucket in forward order; or they only publish."""
        if update:
            self.wait(self.send(self.sends.scalars, self.now), "all_reduce")
        for index, stages in enumerate(self.sends.publish):
            if update:
                self.update(index)
            if stages:
                self.published[index] = self.send(stages, self.now)
                if not self.plan.overlap.publish:
                    self.wait(self.published.pop(index), "publish")

    def end_of_step(self, update: bool) -> None:
        """Gradients arrive at their owners, the last bucket first, and owners may ``update`` it at once."""
        for index in reversed(range(self.sends.buckets)):
            self.wait(self.reduced.pop(index, 0.0), "all_reduce")
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
        """Units in order; gathers run ahead by bytes."""
        if self.plan.sharding.s_p == 1:
            self.forward_whole(first)
            return
        sizes, count = self.sends.gathered_bytes, len(self.sends.gathered_bytes)
        budget = self.plan.prefetch_bytes if self.plan.overlap.gather else 0
        arrivals = [0.0] * count
        issued, ahead = 0, 0.0  # units whose gather was issued, and their bytes behind the one that runs
        for unit in range(count):
            if issued == unit:
                arrivals[unit] = self.gather(unit)
                issued += 1
            else:
                ahead -= sizes[unit]
            while issued < count and ahead < budget:
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
        unit = len(self.times.backward) - 1
        while unit >= 0:
            run = self.sends.recomputed[unit]
            if run:
                before = self.sends.recomputed[run.start - 1] if run.start else range(0)
                self.recompute(run, before if ahead else range(0), gathered)
            elif sharded:
                arrival = gathered.pop(unit) if unit in gathered else self.gather(unit)
                if unit and ahead and unit - 1 not in gathered:
                    gathered[unit - 1] = self.gather(unit - 1)
                if arrival > self.now:
                    self.wait(arrival, "gather")
            for member in reversed(run) if run else (unit,):
                self.now += self.times.backward[member]
                self.reduce(member, pending, arrived, routes)
            unit = (run.start if run else unit) - 1
        self.kept.clear()
        self.wait(max(arrived, default=0.0), "reduce_scatter")
        if routes is not None and not self.plan.overlap.all_reduce:
            for index in reversed(range(len(pending))):
                self.wait(self.start(index, routes, self.now), "all_reduce")

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
        arrival = self.send(self.sends.gather[unit], self.now)
        if not self.plan.overlap.gather:
            self.wait(arrival, "gather")
        return arrival

    def await_publish(self, unit: int) -> None:
        """The working copies of a unit are current."""
        index = self.sends.bucket_of[unit]
        if index is not None and index in self.published:
            self.wait(self.published.pop(index), "publish")

    def reduce(self, unit: int, pending: list[int], arrived: list[float], routes: list[Timed] | None) -> None:
        """A unit's gradient is complete: over ``param``, and with the last of its bucket to the owner."""
        index = self.sends.bucket_of[unit]
        if index is None:
            return
        done = self.send(self.sends.param_reduce[unit], self.now)
        if not self.plan.overlap.reduce_scatter:
            self.wait(done, "reduce_scatter")
        arrived[index] = max(arrived[index], done) if self.sends.param_reduce[unit] else 0.0
        pending[index] -= 1
        if not pending[index] and routes is not None and self.plan.overlap.all_reduce:
            self.start(index, routes, max(self.now, arrived[index]))

    def start(self, index: int, routes: list[Timed], ready: float) -> float:
        """A bucket's reduction, after that of the micro-batch before."""
        self.reduced[index] = self.send(routes[index], max(ready, self.reduced.get(index, 0.0)))
        return self.reduced[index]
