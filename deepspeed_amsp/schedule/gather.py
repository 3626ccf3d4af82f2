"""When parameters are gathered and freed (s_p > 1)."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence

from deepspeed_amsp.comm import Communicator, Ticket
from deepspeed_amsp.mesh import Group
from deepspeed_amsp.partition.params import ShardedUnit, UnitState
from deepspeed_amsp.schedule.order import Use, UseOrder
from deepspeed_amsp.schedule.transforms import outside_transforms


class Gatherer:
    """Gathers units over the ``param`` axis before they are read and frees them afterwards.

    Args:
        units: all sharded units.
        before_gather: called with a unit before its shard is read, so that its publish has arrived.
        published_with: bucket of each unit that is published under the next forward, in the order of their arrival, the
            same on all ranks: what is gathered ahead follows from it, and gathers must not differ.
        issued: told the name of every unit that is gathered.
        prefetch_bytes: how far ahead of the running module gathers may be issued in forward.
        overlap: False issues every gather where it is needed and waits for it at once.
        kept_bytes: how much may stay gathered from a forward to its backward; the last units used stay.
        persistent: indices of units that stay gathered until their values change.
        log_every_change: say so whenever the order of units differs from the recorded one.
    """

    def __init__(
        self,
        units: Sequence[ShardedUnit],
        comm: Communicator,
        group: Group,
        before_gather: Callable[[ShardedUnit], None],
        published_with: Mapping[int, int],
        issued: Callable[[str], None],
        prefetch_bytes: int,
        overlap: bool,
        kept_bytes: float = 0,
        persistent: Collection[int] = (),
        log_every_change: bool = False,
    ) -> None:
        self._kept_bytes = kept_bytes
        self._kept: deque[ShardedUnit] = deque()
        self._persistent = frozenset(persistent)
        self._units = {unit.index: unit for unit in units}
        self._comm = comm
        self._group = group
        self._before_gather = before_gather
        self._published_with = published_with
        self._reached = -1
        """The last bucket, by `published_with`, of what has been gathered since the values changed."""
        self._issued = issued
        self._prefetch_bytes = prefetch_bytes
        self._overlap = overlap
        self._tickets: dict[int, Ticket] = {}
        self.forward_order = UseOrder("forward", log_every_change)
        self.backward_order = UseOrder("backward", log_every_change)
        self.gathers = self.hits = 0
        """Gathers for passes since the engine was made, and how many of them had been issued ahead of their use."""

    def use(self, unit: ShardedUnit, backward: bool, recomputed: bool = False) -> None:
        """Make ``unit`` readable now and prefetch what the recorded order says comes next.

        Forward: as many bytes as configured. Backward: one unit, since a longer run of gathers would hold up the
        reductions; but when a checkpointed layer is recomputed the whole next layer, whose own recomputation will
        want all of it at once (Section 3.4 of the paper).
        """
        with outside_transforms():
            self._use(unit, backward, recomputed)

    def _use(self, unit: ShardedUnit, backward: bool, recomputed: bool) -> None:
        order = self.backward_order if backward else self.forward_order
        order.use(Use(unit.index, recomputed))
        self.gathers += unit.state is not UnitState.FULL
        self.hits += unit.state is UnitState.GATHERING
        self._issue(unit)
        if self._overlap and self._prefetch_bytes:
            if recomputed:
                self._prefetch(order.next_layer(), unit, math.inf)
            else:
                self._prefetch(order.upcoming(), unit, 1 if backward else self._prefetch_bytes)
        self._arrive(unit)

    @property
    def units(self) -> list[ShardedUnit]:
        return list(self._units.values())

    def gather(self, unit: ShardedUnit) -> None:
        """Make ``unit`` readable outside a pass; nothing is recorded or prefetched."""
        self._issue(unit)
        self._arrive(unit)

    def free(self, unit: ShardedUnit) -> None:
        """Drop the full copy, unless it is persistent, held, or pinned from outside the passes (GatheredParameters)."""
        if unit.readable and not unit.pinned and not unit.held and unit.index not in self._persistent:
            unit.free()

    def free_after_forward(self, unit: ShardedUnit, backward_follows: bool) -> None:
        """Drop the full copy, or keep it for the backward and drop what was kept longest instead."""
        if not backward_follows or not self._kept_bytes:
            self.free(unit)
            return
        if unit in self._kept:
            self._kept.remove(unit)
        self._kept.append(unit)
        while sum(kept.full_bytes for kept in self._kept) > self._kept_bytes:
            self.free(self._kept.popleft())

    def values_change(self) -> None:
        """The shards are about to be updated: full copies made before, also those under way, are stale."""
        for unit in self._units.values():
            self._arrive(unit)
            unit.held = False
            if unit.readable and not unit.pinned:
                unit.free()

    def values_changed(self) -> None:
        """The shards have new values: who has a unit pinned sees them. Collective where something is pinned."""
        self._reached = -1
        for unit in self._units.values():
            if unit.pinned and unit.readable:
                self._before_gather(unit)
                self._issued(f"the gather of {unit.name}")
                self._comm.all_gather(self._group, unit.shard, unit.refresh(), unit.name).wait()

    def free_all(self) -> None:
        """Free everything, prefetched units that nobody used included: a pass is over."""
        self._kept.clear()
        for unit in self._units.values():
            self._arrive(unit)
            self.free(unit)

    def _prefetch(self, coming: Sequence[Use], current: ShardedUnit, budget: float) -> None:
        """Issue gathers of coming units until ``budget`` bytes are ahead; one unit always is.

        To gather a unit that is still being published is to wait for that, and the current unit with it: only
        the very next may be such a one, or the first forward after a step would stand until everything has arrived.
        """
        ahead = 0
        for index, _ in coming:
            if ahead >= budget:
                return
            unit = self._units[index]
            if unit is not current and unit.state is not UnitState.FULL:
                if ahead and self._published_with.get(index, -1) > self._reached:
                    return
                self._issue(unit)
                ahead += unit.full_bytes

    def _issue(self, unit: ShardedUnit) -> None:
        if unit.state is UnitState.SHARDED:
            self._reached = max(self._reached, self._published_with.get(unit.index, -1))
            self._before_gather(unit)
            full = unit.begin_gather()
            self._issued(f"the gather of {unit.name}")
            self._tickets[unit.index] = self._comm.all_gather(self._group, unit.shard, full, unit.name)

    def _arrive(self, unit: ShardedUnit) -> None:
        ticket = self._tickets.pop(unit.index, None)
        if ticket is not None:
            ticket.wait()
            unit.end_gather()
