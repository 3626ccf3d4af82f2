"""The memory into which a bucket's updated values are published: the parameters themselves, or a buffer beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Protocol

import torch
from torch import nn

from deepspeed_amsp.partition.optim_states import Master
from deepspeed_amsp.partition.params import ReplicatedUnit, Unit
from deepspeed_amsp.plan.layout import BucketLayout, Piece, Slot
from deepspeed_amsp.plan.resolve import PublishMode


class WorkingBucket(Protocol):
    """One bucket's working copies as the publisher sees them."""

    layout: BucketLayout

    def fill(self, masters: Sequence[Master]) -> None:
        """Write the owner's updated ``masters`` where they are sent from."""
        ...

    def parts(self, owners: range) -> list[torch.Tensor]:
        """What belongs to these owners, neighbours, as flat tensors to send or receive in place."""
        ...

    def whole(self) -> torch.Tensor:
        """All sections behind one another, padding included [layout.numel]; only of a buffer."""
        ...

    def finish(self) -> None:
        """Everything has arrived: make the parameters show it."""
        ...


class BucketInPlace:
    """s_p = 1: parameters are views of one flat tensor in the order of their owners, which is sent as it lies.

    A parameter that is cut into row blocks for several owners keeps its own memory; its blocks are sent one by
    one. There is no padding, so the working copy takes what the parameters take.
    """

    def __init__(self, layout: BucketLayout, units: Mapping[int, Unit]) -> None:
        self.layout = layout
        self._units = units
        packed = [slot for slot in layout.slots if slot.piece.whole]
        self._cut = [slot for slot in layout.slots if not slot.piece.whole]
        packed.sort(key=lambda slot: slot.offset)
        self._params = [_parameter(units, slot) for slot in packed]
        sizes = [slot.piece.numel for slot in packed]
        starts = list(accumulate(sizes, initial=0))
        owned = [sum(slot.piece.numel for slot in packed if slot.owner == o) for o in range(len(layout.sections))]
        self._bounds = list(accumulate(owned, initial=0))
        example = units[layout.units[0]].piece_view(layout.slots[0].piece)
        self.flat = torch.empty(starts.pop(), dtype=example.dtype, device=example.device)
        self._offsets = dict(zip((slot.offset for slot in packed), starts, strict=True))
        self._ranges = list(zip(starts, sizes, strict=True))
        for param, (start, numel) in zip(self._params, self._ranges, strict=True):
            self.flat[start : start + numel].copy_(param.data.reshape(-1))
        self.point()

    def point(self) -> None:
        """Make the parameters views of ``flat``, wherever that is now."""
        for param, (start, numel) in zip(self._params, self._ranges, strict=True):
            param.data = self.flat[start : start + numel].view(param.shape)
        self._addresses = [param.data_ptr() for param in self._params]
        self._parts: dict[tuple[int, int], list[torch.Tensor]] = {}
        """Views to send, made once."""

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Those that are views of ``flat``."""
        return self._params

    def fill(self, masters: Sequence[Master]) -> None:
        for master in masters:
            self._view(master.slot).copy_(master.value.data.view(-1))

    def parts(self, owners: range) -> list[torch.Tensor]:
        key = owners.start, owners.stop
        if key not in self._parts:
            start, stop = self._bounds[owners.start], self._bounds[owners.stop]
            self._parts[key] = [self.flat[start:stop]] if stop > start else []
        if not self._cut:
            return self._parts[key]
        blocks = _joined([slot.piece for slot in self._cut if slot.owner in owners])
        return self._parts[key] + [self._units[piece.unit].piece_view(piece) for piece in blocks]

    def whole(self) -> torch.Tensor:
        raise NotImplementedError("parameters in place have no padding, which an AllGather needs")

    def finish(self) -> None:
        """Whoever gave a parameter other memory (``param.data = ...``) gets the value there."""
        for index, (param, address) in enumerate(zip(self._params, self._addresses, strict=True)):
            if param.data_ptr() != address:
                start, numel = self._ranges[index]
                param.data.copy_(self.flat[start : start + numel].view(param.shape))

    def _view(self, slot: Slot) -> torch.Tensor:
        if not slot.piece.whole:
            return self._units[slot.piece.unit].piece_view(slot.piece)
        start = self._offsets[slot.offset]
        return self.flat[start : start + slot.piece.numel]


class BucketBuffer:
    """Values travel in a buffer in the bucket's own layout and are copied into the working copies on arrival.

    For shards (s_p > 1), whose pieces lie in their units' order, and for AllGather, which needs the padding.
    """

    def __init__(self, layout: BucketLayout, units: Mapping[int, Unit]) -> None:
        self.layout = layout
        self._units = units
        self._buffer: torch.Tensor | None = None

    def fill(self, masters: Sequence[Master]) -> None:
        layout = self.layout
        example = self._units[layout.units[0]].piece_view(layout.slots[0].piece)
        self._buffer = buffer = torch.empty(layout.numel, dtype=example.dtype, device=example.device)
        for start, stop in layout.gaps:
            # Padding travels too; it must not be whatever the allocator left there.
            buffer[start:stop].zero_()
        for master in masters:
            slot = master.slot
            buffer[slot.offset : slot.offset + slot.piece.numel].copy_(master.value.data.view(-1))

    def parts(self, owners: range) -> list[torch.Tensor]:
        """One range, from the first owner's section to the end of what the last one uses."""
        used = [owner for owner in owners if self.layout.owned_numel(owner)]
        if not used:
            return []
        start = self.layout.sections[used[0]][0]
        stop = self.layout.sections[used[-1]][0] + self.layout.owned_numel(used[-1])
        return [self.whole()[start:stop]]

    def whole(self) -> torch.Tensor:
        assert self._buffer is not None, "filled before it is sent"
        return self._buffer

    def finish(self) -> None:
        buffer, self._buffer = self.whole(), None
        for slot in self.layout.slots:
            view = self._units[slot.piece.unit].piece_view(slot.piece)
            view.copy_(buffer[slot.offset : slot.offset + slot.piece.numel])


def working_buckets(
    layouts: Sequence[BucketLayout], units: Mapping[int, Unit], mode: PublishMode
) -> list[WorkingBucket]:
    """The working memory of every bucket, as it is published."""
    return [
        BucketBuffer(layout, units)
        if mode.gathers(layout) or not all(isinstance(units[unit], ReplicatedUnit) for unit in layout.units)
        else BucketInPlace(layout, units)
        for layout in layouts
    ]


def _parameter(units: Mapping[int, Unit], slot: Slot) -> nn.Parameter:
    unit = units[slot.piece.unit]
    return unit.parameters[unit.layout.params.index(slot.piece.param)]


def _joined(pieces: Sequence[Piece]) -> list[Piece]:
    """Neighbouring blocks of one parameter as one."""
    joined: list[Piece] = []
    for piece in sorted(pieces, key=lambda p: (p.unit, p.param.name, p.start)):
        last = joined[-1] if joined else None
        if last is not None and last.param == piece.param and last.stop == piece.start:
            joined[-1] = replace(last, stop=piece.stop)
        else:
            joined.append(piece)
    return joined
