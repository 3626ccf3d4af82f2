"""What is in memory at which moment of a step: the executor's buffers, replayed over the units of a model.

The rules are those of `schedule.gather`, `schedule.reduce`, `schedule.pipeline` and `schedule.publish` on an
accelerator, where a stage of a reduction is waited for when the next bucket (or unit) starts. Everything in bytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from deepspeed_amsp.plan.activations import ActivationBytes
from deepspeed_amsp.plan.layout import BucketLayout
from deepspeed_amsp.plan.owners import Geometry, Stages, held, stages_of
from deepspeed_amsp.plan.resolve import Plan, ReduceMode
from deepspeed_amsp.plan.specs import ModelSpec, TrainSpec

WIDE = 4
"""Bytes of a master, and of a gradient that is about to update it."""

FORWARD, BACKWARD, STEP, PUBLISHED = "forward", "backward", "step", "after step publish"

G, GATHER, REDUCE, PUBLISH = "G", "gather buffers", "reduce buffers", "publish buffers"
ACTIVATIONS, BACKWARDS, UPDATE = "activations", "backward temporaries", "step temporaries"
KINDS = (G, GATHER, REDUCE, PUBLISH, ACTIVATIONS, BACKWARDS, UPDATE)
"""What changes within a step. P, masters and moments are there all the time."""

Moment = tuple[int, ...]
"""Bytes of KINDS at one time."""


class Peaks:
    """The fullest moment of every phase."""

    def __init__(self) -> None:
        self.moments: dict[str, Moment] = {}
        self._sums: dict[str, int] = {}

    def see(self, phase: str, *moment: int) -> None:
        """Told of every moment at which something was added."""
        total = sum(moment)
        if total > self._sums.get(phase, -1):
            self._sums[phase], self.moments[phase] = total, moment


@dataclass(frozen=True)
class Residency:
    """One rank, ``owner`` on the ``optim`` axis, through a step of M micro-batches."""

    model: ModelSpec
    plan: Plan
    train: TrainSpec
    geometry: Geometry
    owner: int
    activations: ActivationBytes
    in_flight: int
    """Micro-batches whose activations are there at once (pipeline parallelism)."""

    @cached_property
    def stages(self) -> Stages:
        return stages_of(self.plan.sharding, self.plan.hierarchical)

    @cached_property
    def full(self) -> Sequence[int]:
        """Bytes of every gathered unit; 0 where nothing is gathered."""
        if self.plan.sharding.s_p == 1:
            return [0] * len(self.geometry.full)
        return [numel * self.train.parameter_bytes for numel in self.geometry.full]

    @cached_property
    def every_micro_batch(self) -> bool:
        """Whether gradients are reduced over ``optim`` in every micro-batch."""
        return self.plan.sharding.s_g > self.plan.sharding.s_p

    @cached_property
    def kept(self) -> list[int]:
        """By bucket: gradients that rest between micro-batches."""
        depth = len(self.stages.inner)
        return [
            self.train.gradient_bytes
            * (held(bucket, self.stages, self.owner, depth) if self.every_micro_batch else bucket.numel)
            for bucket in self.geometry.buckets
        ]

    @cached_property
    def owned(self) -> list[int]:
        """By bucket: gradients before the step."""
        return [self.train.gradient_bytes * bucket.sections[self.owner][1] for bucket in self.geometry.buckets]

    @cached_property
    def published(self) -> list[int]:
        """By bucket: the buffer that it is published from; 0 where parameters are sent as they lie."""
        whole = self.plan.sharding.s_p == 1
        return [
            0 if whole and not self.plan.publish.gathers(bucket) else self.train.parameter_bytes * bucket.numel
            for bucket in self.geometry.buckets
        ]

    def peaks(self) -> Peaks:
        """The fullest moments of a step that is not the first."""
        peaks = Peaks()
        self._forward(peaks, resting=0, reducing=0, publishing=list(self.published))
        reductions = _Reductions(self)
        resting, reducing = reductions.resting, reductions.reducing
        if self.train.micro_batches > 1:
            self._forward(peaks, resting, reducing, [0] * len(self.published))
        self._loss(peaks, resting, reducing)
        self._backward(peaks, reductions)
        self._step(peaks)
        return peaks

    def _forward(self, peaks: Peaks, resting: int, reducing: int, publishing: list[int]) -> None:
        """Units are gathered ahead and freed, publishes arrive, activations grow."""
        units, bucket_of, acts = self.model.units, self.geometry.bucket_of, self.activations
        kept: deque[int] = deque()
        keeping, arrived, pending = 0, 0, sum(publishing)
        before, layers_done, layer = 0, 0, None
        for index, unit in enumerate(units):
            last, gathered = self._window(index)
            while arrived <= last:
                bucket = bucket_of[arrived]
                if bucket is not None:
                    pending, publishing[bucket] = pending - publishing[bucket], 0
                arrived += 1
            if unit.layer is not None and unit.layer != layer:
                layers_done, layer = layers_done + 1, unit.layer
                before = (layers_done - 1) * acts.kept
            now = before + acts.layer if unit.layer is not None else layers_done * acts.kept
            stacked = (self.in_flight - 1) * acts.all_layers
            peaks.see(FORWARD, resting, keeping + gathered, reducing, pending, now + stacked, 0, 0)
            if self.full[index] and self.plan.kept_bytes:
                kept.append(self.full[index])
                keeping += self.full[index]
                while keeping > self.plan.kept_bytes:
                    keeping -= kept.popleft()

    def _window(self, index: int) -> tuple[int, int]:
        """In forward: the last unit that is gathered ahead of ``index``, and the bytes of it and those before."""
        gathered, ahead = self.full[index], 0
        if not (gathered and self.plan.overlap.gather and self.plan.prefetch_bytes):
            return index, gathered
        while ahead < self.plan.prefetch_bytes and index + 1 < len(self.full):
            index += 1
            ahead += self.full[index]
        return index, gathered + ahead

    def _kept_after_forward(self) -> int:
        """Units, counted from the end, that stay gathered for the backward."""
        keeping, count = 0, 0
        for size in reversed(self.full):
            keeping += size
            if not size or keeping > self.plan.kept_bytes:
                break
            count += 1
        return count

    def _loss(self, peaks: Peaks, resting: int, reducing: int) -> None:
        """The end of the forward, and the beginning of the backward, in which head and units are not gathered yet."""
        acts, stays = self.activations, self._kept_after_forward()
        kept = sum(self.full[len(self.full) - stays :])
        held_back = self.in_flight * acts.all_layers + acts.outside
        peaks.see(FORWARD, resting, kept, reducing, 0, held_back, 0, 0)
        peaks.see(BACKWARD, resting, kept, reducing, 0, held_back, acts.outside_backward, 0)

    def _backward(self, peaks: Peaks, state: _Reductions) -> None:
        """The last micro-batch: from the last unit to the first, gradients leave as their buckets become full."""
        units, acts = self.model.units, self.activations
        remaining, layer = self.in_flight * acts.all_layers, None
        first_of_bucket = {bucket.index: bucket.units[0] for bucket in self.geometry.buckets}
        for index in reversed(range(len(units))):
            unit = units[index]
            if unit.layer is not None and unit.layer != layer:
                layer = unit.layer
                remaining = max(remaining - acts.kept, 0)
            if unit.layer is not None:
                inside, temporary = acts.layer_in_backward, acts.layer_backward
            else:
                inside = acts.outside_gradient if layer is None else 0
                temporary = self.train.parameter_bytes * unit.trainable_numel
            bucket = self.geometry.bucket_of[index]
            flat = 0
            if bucket is not None:
                state.open(bucket)
                flat = state.unit(index)
            gathered, now = self._gathered_backward(index), remaining + inside
            peaks.see(BACKWARD, state.resting, gathered, flat + state.reducing, 0, now, temporary, 0)
            if bucket is not None and first_of_bucket[bucket] == index:
                state.close(bucket)
                peaks.see(BACKWARD, state.resting, gathered, flat + state.reducing, 0, now, 0, 0)

    def _gathered_backward(self, index: int) -> int:
        """The unit and the one that comes next; where layers are recomputed, what is left of this one and the next."""
        if not self.full[index]:
            return 0
        kept = self._from_forward(index)
        ahead = self.plan.overlap.gather and bool(self.plan.prefetch_bytes)
        layer = self.model.units[index].layer
        if layer is None or not self.train.recompute:
            return kept + self.full[index] + (self.full[index - 1] if ahead and index else 0)
        start = self._layer_starts[layer]
        mine = sum(self.full[start : index + 1])
        if not ahead or not start or layer - 1 not in self._layer_starts:
            return kept + mine
        return kept + mine + sum(self.full[self._layer_starts[layer - 1] : start])

    def _from_forward(self, index: int) -> int:
        """Bytes of units before ``index`` that have stayed gathered since the forward, but for the next one."""
        if not self.plan.kept_bytes:
            return 0
        return sum(self.full[len(self.full) - self._kept_after_forward() : max(index - 1, 0)])

    @cached_property
    def _layer_starts(self) -> dict[int, int]:
        starts: dict[int, int] = {}
        for index, unit in enumerate(self.model.units):
            if unit.layer is not None:
                starts.setdefault(unit.layer, index)
        return starts

    def _flights(self, bucket: BucketLayout) -> list[int]:
        """Bytes that a bucket on its way to the owner takes in each stage of its last reduction."""
        wire, rest, stages = self.train.parameter_bytes, self.train.gradient_bytes, self.stages
        whole, copied = bucket.numel, wire if wire != rest else 0
        if self.plan.reduce is ReduceMode.ALL_REDUCE:
            return [wire * whole + extra for extra in _in_two_stages(stages.data, whole, wire)]
        sizes, flights, prefix = stages.grid.sizes, [], len(stages.inner)
        resting = rest * whole
        if self.every_micro_batch:
            before = whole
            for depth in range(prefix):
                after = held(bucket, stages, self.owner, depth + 1) if sizes[depth] > 1 else before
                flights.append(wire * (whole + (before if depth else 0) + (after if after != before else 0)))
                before = after
            resting = rest * before
        else:
            before = whole
            flights += [resting] * prefix
        for depth in range(prefix, len(sizes)):
            after = held(bucket, stages, self.owner, depth + 1) if sizes[depth] > 1 else before
            flights.append(resting + copied * before + (wire * after if after != before else 0))
            before = after
        section = wire * before if wire != rest or rest * before != resting else 0
        flights += [resting + section + extra for extra in _in_two_stages(stages.replicate, before, wire)]
        return flights

    def last_partial_flight(self) -> int:
        """Bytes of the bucket that is sent last in a micro-batch that is not the last, in its last stage."""
        flights = self._flights(self.geometry.buckets[0])
        if self.plan.reduce is ReduceMode.ALL_REDUCE:
            return flights[0]
        return flights[max(stage for stage, size in enumerate(self.stages.inner) if size > 1)]

    def _step(self, peaks: Peaks) -> None:
        """Buckets are updated and published one by one; their gradients go when all are done."""
        resting, sent, alone = sum(self.owned), 0, self.geometry.owners == 1
        for bucket, size in zip(self.geometry.buckets, self.published, strict=True):
            update = WIDE * bucket.owned_numel(self.owner)
            peaks.see(STEP, resting, 0, 0, sent, 0, 0, update)
            peaks.see(PUBLISHED, resting, 0, 0, sent + size, 0, 0, 0)
            sent += 0 if alone else size


_EARLIER = -1
"""Number of the bucket that an earlier micro-batch has left on its way."""


class _Reductions:
    """Gradients in a backward: staged in buckets, on their way, and arrived.

    resting: bytes of G. reducing: bytes of what is on its way; of a unit, what is being filled is told by `unit`.
    """

    def __init__(self, residency: Residency) -> None:
        self._of = residency
        accumulates = residency.train.micro_batches > 1
        kept = residency.kept if accumulates else [0] * len(residency.kept)
        self.resting = sum(kept)
        self._kept = kept
        self._staged_before = accumulates and not residency.every_micro_batch
        self._flight: deque[tuple[int, int]] = deque()
        self._units: deque[int] = deque(maxlen=2)
        self._bytes: dict[int, list[int]] = {}
        self._open: int | None = None
        if accumulates and residency.every_micro_batch and kept:
            # What is sent last is still under way when the next micro-batch begins.
            self._bytes[_EARLIER] = [residency.last_partial_flight()]
            self._flight.append((_EARLIER, 0))
            self.resting -= kept[0] if residency.train.micro_batches == 2 else 0

    @property
    def reducing(self) -> int:
        """Bytes of buckets on their way."""
        return sum(self._bytes[bucket][stage] for bucket, stage in self._flight)

    def open(self, bucket: int) -> None:
        """The first gradient of a bucket makes its buffer, unless earlier micro-batches have."""
        if self._open != bucket:
            self._open = bucket
            if not self._staged_before:
                self.resting += self._staged(bucket)

    def unit(self, index: int) -> int:
        """Bytes of the flat gradients of a sharded unit and of the two before, which are on their way."""
        of = self._of
        if not of.full[index]:
            return 0
        size, shard = of.full[index], of.geometry.shards[index] * of.train.parameter_bytes
        total = size + sum(self._units)
        self._units.append(size + shard)
        if not of.plan.overlap.reduce_scatter:
            self._units.clear()
            total = size + shard
        return total

    def close(self, bucket: int) -> None:
        """A full bucket starts, and the ones before go on by a stage."""
        of = self._of
        self._bytes[bucket] = of._flights(of.geometry.buckets[bucket])
        older, self._flight = self._flight, deque()
        for number, stage in older:
            self._go_on(number, stage + 1)
        # The kept part joins the reduction.
        self.resting -= self._staged(bucket) + (self._kept[bucket] if not self._staged_before else 0)
        self._flight.append((bucket, 0))
        if not of.plan.overlap.all_reduce:
            self._flight.clear()
            self.resting += of.owned[bucket]

    def _go_on(self, bucket: int, stage: int) -> None:
        if stage < len(self._bytes[bucket]):
            self._flight.append((bucket, stage))
        elif bucket == _EARLIER:
            self.resting += self._kept[0] if self._of.train.micro_batches == 2 else 0
        else:
            self.resting += self._of.owned[bucket]

    def _staged(self, bucket: int) -> int:
        return self._of.geometry.sizes[bucket] * self._of.train.gradient_bytes


def _in_two_stages(axis: tuple[int, int] | None, numel: int, wire: int) -> list[int]:
    """What an AllReduce takes on top in each of its stages: a padded copy and a part of it, if it goes in two."""
    if axis is None:
        return [0]
    part = -(-numel // axis[0])
    return [wire * (part * axis[0] + part)] * 3
