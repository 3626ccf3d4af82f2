"""When updated parameters travel: issued bucket by bucket in the step, waited for by the next reader."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from deepspeed_amsp.comm import Communicator, Ticket
from deepspeed_amsp.mesh import Group
from deepspeed_amsp.partition.layout import BucketLayout
from deepspeed_amsp.partition.optim_states import Master
from deepspeed_amsp.partition.params import Unit
from deepspeed_amsp.plan.resolve import PublishMode

Route = Callable[[BucketLayout, torch.Tensor], list[Ticket]]


class Publisher:
    """Sends each owner's updated section of a bucket over the ``optim`` axis into the working copies.

    The values travel in a buffer of their own and are copied into the working copies on arrival, so that a
    reader sees the old or the new value of a parameter, never a mixture.

    Args:
        layouts: buckets in forward order.
        owner: this rank's index on the ``optim`` axis.
    """

    def __init__(
        self,
        layouts: Sequence[BucketLayout],
        units: Mapping[int, Unit],
        comm: Communicator,
        group: Group,
        mode: PublishMode,
        owner: int,
    ) -> None:
        self._layouts = layouts
        self._units = units
        self._comm = comm
        self._group = group
        self._owner = owner
        self._route: Route = self._broadcast if mode is PublishMode.BROADCAST else self._all_gather
        self._in_flight: dict[int, tuple[torch.Tensor, list[Ticket]]] = {}
        self._buckets_of: dict[int, list[int]] = {}
        for layout in layouts:
            for unit in layout.units:
                self._buckets_of.setdefault(unit, []).append(layout.index)

    @property
    def pending(self) -> bool:
        """Whether some working copy may still be the one from before the last step."""
        return bool(self._in_flight)

    @torch.no_grad()
    def publish(self, index: int, masters: Sequence[Master]) -> None:
        """Issue the publishing of bucket ``index`` from its updated ``masters`` (those of this rank)."""
        self._arrive(index)  # a step without a forward in between
        layout = self._layouts[index]
        dtype, device = self._working_type(layout)
        buffer = torch.empty(layout.numel, dtype=dtype, device=device)
        start, length = layout.sections[self._owner]
        used = layout.owned_numel(self._owner)
        # Padding travels too; it must not be whatever the allocator left there.
        buffer[start + used : start + length].zero_()
        for master in masters:
            slot = master.slot
            buffer[slot.offset : slot.offset + slot.piece.numel].copy_(master.value.data.view(-1))
        tickets = self._route(layout, buffer) if self._group.size > 1 else []
        self._in_flight[index] = (buffer, tickets)
        if not tickets:
            self._arrive(index)

    def wait_unit(self, unit: int) -> None:
        """Make the working copies of a unit current."""
        if self._in_flight:
            for index in self._buckets_of.get(unit, ()):
                self._arrive(index)

    def wait_all(self) -> None:
        for index in list(self._in_flight):
            self._arrive(index)

    @torch.no_grad()
    def _arrive(self, index: int) -> None:
        flight = self._in_flight.pop(index, None)
        if flight is None:
            return
        buffer, tickets = flight
        for ticket in tickets:
            ticket.wait()
        for slot in self._layouts[index].slots:
            view = self._units[slot.piece.unit].piece_view(slot.piece)
            view.copy_(buffer[slot.offset : slot.offset + slot.piece.numel])

    def _broadcast(self, layout: BucketLayout, buffer: torch.Tensor) -> list[Ticket]:
        """One Broadcast per owner that has something, issued together (Section 3.4 of the paper)."""
        tickets = []
        for owner, (start, _) in enumerate(layout.sections):
            used = layout.owned_numel(owner)
            if used:
                section = buffer[start : start + used]
                tickets.append(self._comm.broadcast(self._group, section, owner, layout.label))
        return tickets

    def _all_gather(self, layout: BucketLayout, buffer: torch.Tensor) -> list[Ticket]:
        """One AllGather of the owners' sections, padded to one length.

        Sections lie in (inner, outer) order in the bucket but in (outer, inner) order on the axis, so the
        gathered buffer is brought into bucket order when it arrives.
        """
        start, length = layout.sections[self._owner]
        shard = buffer[start : start + length].clone()
        if layout.inner == 1 or layout.outer == 1:
            return [self._comm.all_gather(self._group, shard, buffer, layout.label)]
        gathered = torch.empty_like(buffer)

        def reorder() -> None:
            for owner, (offset, size) in enumerate(layout.sections):
                buffer[offset : offset + size].copy_(gathered[owner * length : owner * length + size])

        ticket = self._comm.all_gather(self._group, shard, gathered, layout.label)
        return [ticket.wait_then(reorder)]

    def _working_type(self, layout: BucketLayout) -> tuple[torch.dtype, torch.device]:
        slot = layout.slots[0]
        view = self._units[slot.piece.unit].piece_view(slot.piece)
        return view.dtype, view.device
