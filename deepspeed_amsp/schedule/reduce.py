"""When gradients are reduced: hooks stage them, full buckets start a route, a pipeline moves routes along."""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence

import torch

from deepspeed_amsp.comm import Communicator
from deepspeed_amsp.mesh import Mesh
from deepspeed_amsp.partition.grads import BucketGradients
from deepspeed_amsp.partition.params import ShardedUnit, Unit
from deepspeed_amsp.plan.layout import Slot
from deepspeed_amsp.plan.resolve import ReduceMode
from deepspeed_amsp.schedule.agreement import Agreement
from deepspeed_amsp.schedule.pipeline import OrderedPipeline, Pipeline, Stages, ThreadPipeline
from deepspeed_amsp.schedule.reduce_routes import ROUTES

IN_FLIGHT = 4
"""Buckets (or units) whose reduction may be under way when another one starts, where threads issue the stages: what is
in flight is memory, and a network that is further behind would not be caught up with anyway."""


class UnitGradients:
    """The flat gradient of a sharded unit in the making (s_p > 1)."""

    def __init__(self, unit: ShardedUnit) -> None:
        self.unit = unit
        self._flat: torch.Tensor | None = None
        self._arrived: set[int] = set()

    @property
    def complete(self) -> bool:
        return len(self._arrived) == len(self.unit.parameters)

    @property
    def untouched(self) -> bool:
        return not self._arrived

    def add(self, index: int, gradient: torch.Tensor) -> None:
        """Add the gradient of the unit's parameter ``index``."""
        if self._flat is None:
            layout = self.unit.layout
            self._flat = torch.zeros(layout.numel, dtype=gradient.dtype, device=gradient.device)
        offset = self.unit.layout.offsets[index]
        self._flat[offset : offset + gradient.numel()].add_(gradient.reshape(-1))
        self._arrived.add(index)

    def clear(self) -> None:
        self._flat = None
        self._arrived.clear()

    def take(self) -> torch.Tensor:
        flat, self._flat = self._flat, None
        self._arrived.clear()
        if flat is None:
            shard = self.unit.shard
            flat = torch.zeros(self.unit.layout.numel, dtype=shard.dtype, device=shard.device)
        return flat


class GradientReducer:
    """From ``param.grad`` to the owner's fully reduced section.

    Every trainable parameter's post-accumulate hook calls `add`. A sharded unit whose gradients are all here
    is reduced over ``param`` in every micro-batch; what arrives is staged in its bucket. A bucket whose
    pieces are all staged starts its route: in every micro-batch when s_g > s_p, else in the last one.
    Buckets start in one fixed order (last in forward first), so that ranks agree on it even if a parameter
    is unused on some of them.

    Args:
        agreement: told which parameters have gradients and which units are reduced.
        prescale: factor on every gradient before it is added to anything (gradient_predivide_factor).
        eager_units, eager_buckets: False issues reductions only after backward, and waits for each.
        threads: stages are issued by threads, see `ThreadPipeline`; never where communicators are merged.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        buckets: Sequence[BucketGradients],
        comm: Communicator,
        mesh: Mesh,
        mode: ReduceMode,
        wire_dtype: torch.dtype | None,
        agreement: Agreement,
        prescale: float,
        eager_units: bool,
        eager_buckets: bool,
        threads: bool,
    ) -> None:
        self._agreement = agreement
        self._prescale = prescale
        self._buckets = buckets
        self._comm = comm
        self._mesh = mesh
        self._route = ROUTES[mode](comm, mesh, wire_dtype)
        self._wire = wire_dtype
        self._eager_units = eager_units
        self._eager_buckets = eager_buckets
        self._unit_pipeline: Pipeline = OrderedPipeline(limit=2)
        self._bucket_pipeline: Pipeline = OrderedPipeline(limit=1)
        if threads and not mesh.merged:
            self._unit_pipeline = ThreadPipeline(comm, [mesh.param_reduce.size > 1], IN_FLIGHT, "amsp-units")
            self._bucket_pipeline = ThreadPipeline(comm, self._route.sends, IN_FLIGHT, "amsp-buckets")
        self._staging = threading.Lock()
        """Held by who stages gradients and starts their buckets: backward, and the thread that waits for units."""
        self._flat = {unit.index: UnitGradients(unit) for unit in units if isinstance(unit, ShardedUnit)}
        self._slots_of: dict[int, list[tuple[int, Slot]]] = {unit.index: [] for unit in units}
        self._slots_of_param: dict[str, list[tuple[int, Slot]]] = {}
        self._needed: list[set[int]] = [set() for _ in buckets]
        for bucket in buckets:
            for slot in bucket.layout.slots:
                self._slots_of[slot.piece.unit].append((bucket.layout.index, slot))
                self._slots_of_param.setdefault(slot.piece.param.name, []).append((bucket.layout.index, slot))
                self._needed[bucket.layout.index].add(slot.offset)
        self._missing = [set(needed) for needed in self._needed]
        self._next_bucket = len(buckets) - 1
        self._reduced_units: set[int] = set()
        self.boundary = True
        self.open = False
        """True from the first gradient of a backward until its end was announced."""
        self.hold = False
        """True inside no_sync: gradients are staged, nothing is sent."""
        self.held = False
        """True when backwards inside no_sync are all that there was since the last reduction."""

    @property
    def _every_micro_batch(self) -> bool:
        return self._mesh.inner.size > 1

    def add(self, unit: Unit, index: int, gradient: torch.Tensor) -> None:
        """Take over the gradient of parameter ``index`` of ``unit``."""
        self.open = True
        self._agreement.used(unit.layout.params[index].name)
        if self._prescale != 1.0:
            gradient = gradient * self._prescale
        if isinstance(unit, ShardedUnit):
            flat = self._flat[unit.index]
            flat.add(index, gradient)
            # Ranks may use different parts of a leaf, so only the end of backward is the same point for all.
            if flat.complete and not unit.leaf:
                self._reduce_unit(unit.index)
            return
        flat_gradient = gradient.reshape(-1)
        with self._staging:
            for bucket, slot in self._slots_of_param.get(unit.layout.params[index].name, ()):
                piece = slot.piece
                self._stage(bucket, slot, flat_gradient if piece.whole else flat_gradient[piece.start : piece.stop])
            self._start_ready_buckets()

    def end_of_backward(self) -> None:
        """Send what backward left behind: units with unused parameters, and the buckets not started yet."""
        for index in reversed(list(self._flat)):
            flat = self._flat[index]
            if not (flat.untouched and index in self._reduced_units):
                self._reduce_unit(index)
        self._reduced_units.clear()
        # What arrives must be staged before the next backward counts what it has staged itself.
        self._unit_pipeline.drain()
        if self.boundary or self._every_micro_batch:
            self._start_buckets(down_to=0)
            self.held = False
        self.settle()
        self._reset_round()

    def settle(self) -> None:
        """Before the user's loop goes on: nothing that another rank's backward may wait for is left to be sent."""
        self._bucket_pipeline.settle()

    def close_held_round(self) -> None:
        """A backward inside no_sync is over: its gradients stay staged."""
        self.held = True
        self._reset_round()

    def drain(self) -> None:
        """Wait until every gradient that was sent is where it rests."""
        self._unit_pipeline.drain()
        self._bucket_pipeline.drain()

    def close(self) -> None:
        """Nothing will be reduced any more."""
        self._unit_pipeline.close()
        self._bucket_pipeline.close()

    def finish_bucket(self, index: int) -> None:
        """Wait until bucket ``index`` is where it rests; buckets arrive last in forward first."""
        self._bucket_pipeline.finish(index)

    def clear(self) -> None:
        """Drop all gradients, also those of a backward that was not finished."""
        self.drain()
        for flat in self._flat.values():
            flat.clear()
        for bucket in self._buckets:
            bucket.clear()
        self._reduced_units.clear()
        self.held = False
        self._reset_round()

    def reduce_staged(self) -> None:
        """The final reduction for loops that only now say that the window is over."""
        self._start_buckets(down_to=0, final=True)
        self.held = False
        self.settle()
        self._reset_round()

    def late(self) -> set[str]:
        """Parameters whose gradients came after their bucket had been sent for the last time in this window.

        A block that is recomputed twice in one backward (re-entrant checkpointing) hands its gradients over twice.
        Ranks may differ in that, so it takes all of them to decide on `reduce_late`. Between micro-batches what is
        late goes with the next one.
        """
        return {name for bucket in self._buckets for name in bucket.staged_names()}

    def reduce_late(self, late: Collection[str]) -> None:
        """Reduce what came late for these parameters on any rank. All ranks call it with the same."""
        for bucket in reversed(self._buckets):
            if any(slot.piece.param.name in late for slot in bucket.layout.slots):
                self._start_bucket(bucket.layout.index, final=True)
        self.drain()

    def _reduce_unit(self, index: int) -> None:
        self._reduced_units.add(index)
        self._unit_pipeline.start(index, self._unit_route(self._flat[index]))
        if not self._eager_units:
            self._unit_pipeline.drain()

    def _unit_route(self, flat: UnitGradients) -> Stages:
        unit, group = flat.unit, self._mesh.param_reduce
        # Unless told otherwise gradients travel in the parameter's dtype, which is what they arrived in.
        taken = flat.take()
        sent = taken.to(self._wire or taken.dtype)
        mine = sent.new_empty(unit.layout.shard_numel)
        splits = [unit.layout.shard_numel] * group.size
        self._agreement.issued(f"the reduction of {unit.name}")
        yield [self._comm.reduce_scatter(group, sent, mine, splits, unit.name)]
        with self._staging:
            for bucket, slot in self._slots_of[unit.index]:
                offset = slot.piece.shard_offset
                self._stage(bucket, slot, mine[offset : offset + slot.piece.numel])
            self._start_ready_buckets()

    def _stage(self, bucket: int, slot: Slot, gradient: torch.Tensor) -> None:
        self._buckets[bucket].stage(slot, gradient)
        self._missing[bucket].discard(slot.offset)

    def _start_ready_buckets(self) -> None:
        if self.hold or not self._eager_buckets or not (self.boundary or self._every_micro_batch):
            return
        while self._next_bucket >= 0 and not self._missing[self._next_bucket]:
            self._start_buckets(down_to=self._next_bucket)

    def _start_buckets(self, down_to: int, final: bool | None = None) -> None:
        while self._next_bucket >= down_to:
            self._start_bucket(self._next_bucket, self.boundary if final is None else final)
            self._next_bucket -= 1

    def _start_bucket(self, index: int, final: bool) -> None:
        route, bucket = self._route, self._buckets[index]
        # What an earlier micro-batch still has under way must have come to rest before it is added to.
        self._bucket_pipeline.finish(index)
        stages = route.final(bucket) if final else route.partial(bucket)
        self._bucket_pipeline.start(index, stages, route.last_stage(final))
        if not self._eager_buckets:
            self._bucket_pipeline.drain()

    def _reset_round(self) -> None:
        self.open = False
        self._missing = [set(needed) for needed in self._needed]
        self._next_bucket = len(self._buckets) - 1
