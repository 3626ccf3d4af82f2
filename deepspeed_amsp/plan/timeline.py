"""How long a step takes: a fast model of the executor's schedule, for one rank of a plan.

One compute stream and two links, a node's own and the network between nodes. A collective occupies the slower link
that it crosses, first come first served; computation waits for it where the executor would. The profile's times
were taken with all sibling groups active, so one rank stands for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

from deepspeed_amsp.plan.cost import BUCKET_BYTES
from deepspeed_amsp.plan.profile import Profile
from deepspeed_amsp.plan.resolve import Plan
from deepspeed_amsp.plan.routes import Routes, Stages, bucket_runs
from deepspeed_amsp.plan.specs import ClusterSpec, ModelSpec, TrainSpec

NODE, CROSS = 0, 1
KINDS = ("gather", "reduce_scatter", "all_reduce", "publish")
"""What computation can wait for, by the name of the overlap switch."""

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
    """Simulate a step in the steady state: it begins with an update, whose publishing the forward then waits for.

    With clipping all gradients are there before the first update, so a step leaves nothing to the next one but what
    it publishes. Without, owners update as buckets arrive. Micro-batches between the first and the last are alike:
    one of them is simulated.
    """
    run = _Run(_sends(model, plan, train, profile), plan, times, model)
    m = train.micro_batches
    run.step_phase(list(reversed(range(run.sends.buckets))) if not train.gradient_clipping else None)
    run.micro_batch(first=True, last=m == 1)
    if m > 2:
        before, waited = run.now, dict(run.exposed)
        run.micro_batch(first=False, last=False)
        for kind in KINDS:
            run.exposed[kind] += (m - 3) * (run.exposed[kind] - waited.get(kind, 0.0))
        run.skip((m - 3) * (run.now - before))
    if m > 1:
        run.micro_batch(first=False, last=True)
    run.end_of_step()
    return StepTime(run.now + times.fixed, times.step(m), run.updating, run.exposed)


@dataclass(frozen=True)
class _Sends:
    """Durations of everything a plan sends, and the sizes that decide when."""

    gather: list[Timed]
    gathered_bytes: list[float]
    param_reduce: list[Timed]
    members: list[list[int]]
    partial: list[Timed]
    final: list[Timed]
    publish: list[Timed]
    owned: list[float]
    scalars: Timed
    layers: dict[int, range]
    layer_of: list[int | None]
    bucket_of: list[int | None]

    @property
    def buckets(self) -> int:
        return len(self.members)


def _timed(stages: Stages, profile: Profile) -> Timed:
    return [
        (CROSS if message.mesh.s1 > 1 else NODE, message.count * profile.time(message.op, message.size, message.mesh))
        for message in stages
    ]


def _sends(model: ModelSpec, plan: Plan, train: TrainSpec, profile: Profile) -> _Sends:
    s, routes, wire = plan.sharding, Routes(plan), train.parameter_bytes

    @cache
    def unit(size: float) -> tuple[Timed, Timed]:
        return _timed(routes.gather(size), profile), _timed(routes.param_reduce(size), profile)

    @cache
    def bucket(size: float) -> tuple[Timed, Timed, Timed]:
        return tuple(_timed(route(size), profile) for route in (routes.partial, routes.final, routes.publish))  # type: ignore[return-value]

    sizes = [wire * float(member.numel) for member in model.units]
    runs = bucket_runs(model, s.s_p, (plan.bucket_bytes or BUCKET_BYTES) / wire)
    routed = [bucket(wire * elements) for _, elements in runs]
    bucket_of: list[int | None] = [None] * len(model.units)
    for index, (members, _) in enumerate(runs):
        for member in members:
            bucket_of[member] = index
    return _Sends(
        gather=[unit(size)[0] for size in sizes],
        gathered_bytes=sizes,
        param_reduce=[unit(size)[1] if u.trainable_numel else [] for size, u in zip(sizes, model.units, strict=True)],
        members=[members for members, _ in runs],
        partial=[timed[0] for timed in routed],
        final=[timed[1] for timed in routed],
        publish=[timed[2] for timed in routed],
        owned=[elements / s.optim for _, elements in runs],
        scalars=_timed(routes.scalars(), profile),
        layers=model.layer_units,
        layer_of=[member.layer for member in model.units],
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
    gathered: dict[int, float] = field(default_factory=dict)
    reduced: dict[int, float] = field(default_factory=dict)
    kept: set[int] = field(default_factory=set)

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
        for arrivals in (self.published, self.gathered, self.reduced):
            arrivals.update({key: at + seconds for key, at in arrivals.items()})

    # --- the step --------------------------------------------------------------------------------------------

    def step_phase(self, arrival: Sequence[int] | None) -> None:
        """Owners update and publish bucket by bucket: in forward order, or in that of ``arrival`` (no clipping)."""
        if arrival is None:
            self.wait(self.send(self.sends.scalars, self.now), "all_reduce")
        for index in range(self.sends.buckets) if arrival is None else arrival:
            seconds = self.times.update * self.sends.owned[index]
            self.now += seconds
            self.updating += seconds
            if self.sends.publish[index]:
                self.published[index] = self.send(self.sends.publish[index], self.now)
                if not self.plan.overlap.publish:
                    self.wait(self.published.pop(index), "publish")

    def end_of_step(self) -> None:
        """All gradients are at their owners."""
        for index in reversed(range(self.sends.buckets)):
            self.wait(self.reduced.pop(index, 0.0), "all_reduce")

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
        budget, sharded = self.plan.prefetch_bytes, self.plan.sharding.s_p > 1
        ahead = self.plan.overlap.gather and budget > 0
        limit, kept, sizes = self.plan.kept_bytes, 0.0, self.sends.gathered_bytes
        count = len(sizes)
        for unit in range(count):
            if sharded:
                self.gather(unit)
                if ahead:
                    under_way, coming = 0.0, unit + 1
                    while coming < count and under_way < budget:
                        if coming not in self.gathered:
                            self.gather(coming)
                        under_way += sizes[coming]  # also of those that an earlier unit had issued
                        coming += 1
                self.wait(self.gathered.pop(unit), "gather")
            elif first:
                self.await_publish(unit)
            self.now += self.times.forward[unit]
        self.gathered.clear()
        self.kept.clear()
        if sharded and limit:
            for unit in reversed(range(count)):  # the last ones used stay
                kept += sizes[unit]
                if kept > limit:
                    break
                self.kept.add(unit)

    def backward(self, routes: list[Timed] | None) -> None:
        """Units in reverse, recomputed layers as a whole; ``routes`` of the buckets that are reduced now."""
        pending = [len(members) for members in self.sends.members]
        arrived = [0.0] * len(pending)
        recomputed, layers, sharded = self.times.recomputed, self.sends.layers, self.plan.sharding.s_p > 1
        again = {layer for layer, units in layers.items() if any(recomputed[member] for member in units)}
        unit = len(self.sends.gather) - 1
        while unit >= 0:
            layer = self.sends.layer_of[unit]
            run = range(unit, unit + 1)
            if layer is not None and layer in again:
                run = layers[layer]
                self.recompute(run)
            elif sharded:
                self.gather_backward(unit)
            for member in reversed(run):
                self.now += self.times.backward[member]
                self.reduce(member, pending, arrived, routes)
            unit = run.start - 1
        self.gathered.clear()
        self.wait(max(arrived, default=0.0), "reduce_scatter")
        if routes is not None and not self.plan.overlap.all_reduce:
            for index in reversed(range(len(pending))):
                self.wait(self.start(index, routes, self.now), "all_reduce")

    def recompute(self, run: range) -> None:
        """A layer's forward once more; its parameters stay gathered, and those of the layer before it come along."""
        sharded = self.plan.sharding.s_p > 1
        for unit in run:
            if sharded:
                self.gather(unit)
                if self.plan.overlap.gather and unit == run.start and run.start:
                    before = self.sends.layer_of[run.start - 1]
                    ahead = self.sends.layers[before] if before is not None else range(run.start - 1, run.start)
                    for coming in ahead:
                        self.gather(coming)
                self.wait(self.gathered.pop(unit), "gather")
            self.now += self.times.recomputed[unit]

    def gather_backward(self, unit: int) -> None:
        """One unit ahead."""
        self.gather(unit)
        if unit and self.plan.overlap.gather and self.plan.prefetch_bytes:
            self.gather(unit - 1)
        self.wait(self.gathered.pop(unit), "gather")

    def gather(self, unit: int) -> None:
        """Issue it, unless it is under way or was kept."""
        if unit in self.gathered:
            return
        if unit in self.kept:
            self.gathered[unit] = self.now
            return
        self.await_publish(unit)
        self.gathered[unit] = self.send(self.sends.gather[unit], self.now)
        if not self.plan.overlap.gather:
            self.wait(self.gathered[unit], "gather")

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
