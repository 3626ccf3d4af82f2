"""Pure geometry: which elements of which parameter live in which unit, shard, bucket and section.

Nothing here touches a tensor, so the planner and the tests use the same numbers as the engine.

* A *unit* is a module's own parameters of one dtype, laid out one behind the other in a flat buffer that
  is cut into ``param`` equal shards.
* A *piece* is the part of a parameter that falls into this rank's shard; with s_p = 1 it is the parameter.
* A *bucket* is a run of units in forward order. Its pieces are given to owners on the ``optim`` axis and
  ordered by owner, so that one owner's elements form one contiguous *section* of the bucket's buffer.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

ALIGNMENT = 8
"""Elements to which parameters start inside a flat unit: 16 bytes in 16-bit, what vector loads want."""

PADDING_LIMIT = 1.25
"""On accelerators sections are padded to equal size (one ReduceScatter) while that costs at most this factor."""

GATHERED_PADDING_LIMIT = 2.0
"""The same where a bucket is published by one AllGather. Beyond it Broadcasts of what owners have are faster."""


class LayoutError(ValueError):
    """A model, plan and optimizer that do not fit together."""


def round_up(value: int, multiple: int) -> int:
    """The least multiple of ``multiple`` that is not below ``value``."""
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class ParamSpec:
    """A parameter as the model sees it: fully qualified name and shape."""

    name: str
    shape: tuple[int, ...]

    @cached_property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class UnitLayout:
    """Flat placement of a unit's parameters; sizes in elements."""

    name: str
    params: tuple[ParamSpec, ...]
    shards: int

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        starts, cursor = [], 0
        for param in self.params:
            starts.append(cursor)
            cursor = round_up(cursor + param.numel, self._alignment)
        return tuple(starts)

    @cached_property
    def shard_numel(self) -> int:
        if not self.params:
            return 0
        used = self.offsets[-1] + self.params[-1].numel
        return round_up(math.ceil(used / self.shards), self._alignment)

    @property
    def numel(self) -> int:
        """Elements of the gathered flat buffer, padding included."""
        return self.shard_numel * self.shards

    @property
    def _alignment(self) -> int:
        # An unsharded unit is never flattened: its parameters stay the tensors that the user made.
        return ALIGNMENT if self.shards > 1 else 1


@dataclass(frozen=True)
class Piece:
    """Elements [start, stop) of a flattened parameter, at ``shard_offset`` of their unit's shard."""

    param: ParamSpec
    unit: int
    start: int
    stop: int
    shard_offset: int

    @cached_property
    def numel(self) -> int:
        return self.stop - self.start

    @cached_property
    def whole(self) -> bool:
        return self.numel == self.param.numel

    @property
    def row_numel(self) -> int:
        return math.prod(self.param.shape[1:]) if self.param.shape else 1

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the master: the parameter's, a block of whole rows, or flat where a shard cuts a row."""
        if self.whole:
            return self.param.shape
        row = self.row_numel
        if row and self.start % row == 0 and self.stop % row == 0:
            return (self.numel // row, *self.param.shape[1:])
        return (self.numel,)

    def cut(self, limit: int) -> list[Piece]:
        """Blocks of at most ``limit`` elements (but at least a row), on row boundaries where possible."""
        row = self.row_numel if self.shape != (self.numel,) else 1
        step = max(limit // row, 1) * row
        return [
            replace(
                self,
                start=at,
                stop=min(at + step, self.stop),
                shard_offset=self.shard_offset + at - self.start,
            )
            for at in range(self.start, self.stop, step)
        ]


def shard_pieces(unit: UnitLayout, unit_index: int, coordinate: int) -> list[Piece]:
    """The pieces of ``unit`` in the shard of ``param`` coordinate ``coordinate``."""
    low = coordinate * unit.shard_numel
    high = low + unit.shard_numel
    pieces = []
    for param, offset in zip(unit.params, unit.offsets, strict=True):
        start, stop = max(low, offset), min(high, offset + param.numel)
        if start < stop:
            pieces.append(Piece(param, unit_index, start - offset, stop - offset, start - low))
    return pieces


@dataclass(frozen=True)
class Slot:
    """A piece's place in its bucket: its owner on the ``optim`` axis and its offset in the buffer."""

    piece: Piece
    owner: int
    offset: int


@dataclass(frozen=True)
class OwnerGrid:
    """The ``optim`` axis, taken apart into the stages in which gradients are reduced.

    sizes: lengths of the stages, first reduced first. An owner's number is its coordinates read as digits, the
        first stage's the most significant, so that what a rank holds after every stage is one run of owners.
    """

    sizes: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.sizes)

    def owners(self, prefix: Sequence[int]) -> range:
        """Owners whose first coordinates are ``prefix``."""
        number = 0
        for size, coordinate in zip(self.sizes, prefix, strict=False):
            number = number * size + coordinate
        width = math.prod(self.sizes[len(prefix) :])
        return range(number * width, (number + 1) * width)


@dataclass(frozen=True)
class BucketLayout:
    """Pieces that are reduced and published in one go, ordered by owner section."""

    index: int
    slots: tuple[Slot, ...]
    units: tuple[int, ...]
    grid: OwnerGrid
    sections: tuple[tuple[int, int], ...]
    """(offset, length) by owner, one behind the other; padding included."""

    @property
    def label(self) -> str:
        """How logs and errors name the bucket."""
        return f"bucket {self.index}"

    @cached_property
    def numel(self) -> int:
        return sum(length for _, length in self.sections)

    @cached_property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """(start, stop) of the padding, which must be zero before a reduction."""
        edges, gaps = sorted((slot.offset, slot.offset + slot.piece.numel) for slot in self.slots), []
        cursor = 0
        for start, stop in edges:
            if start > cursor:
                gaps.append((cursor, start))
            cursor = stop
        if cursor < self.numel:
            gaps.append((cursor, self.numel))
        return tuple(gaps)

    def owner_slots(self, owner: int) -> tuple[Slot, ...]:
        return tuple(slot for slot in self.slots if slot.owner == owner)

    def owned_numel(self, owner: int) -> int:
        """Elements that ``owner`` holds optimizer states for, without padding."""
        return self._owned_numels[owner]

    @cached_property
    def _owned_numels(self) -> tuple[int, ...]:
        """Asked for in every step, so counted once."""
        numels = [0] * len(self.sections)
        for slot in self.slots:
            numels[slot.owner] += slot.piece.numel
        return tuple(numels)

    def held_range(self, prefix: Sequence[int]) -> tuple[int, int]:
        """(offset, length) of what the ranks with these first coordinates hold after as many stages."""
        owners = self.grid.owners(prefix)
        (start, _), (last, length) = self.sections[owners[0]], self.sections[owners[-1]]
        return start, last + length - start

    def splits(self, prefix: Sequence[int]) -> tuple[int, ...]:
        """How the stage after ``prefix`` cuts what is held before it: lengths by the next coordinate."""
        size = self.grid.sizes[len(prefix)]
        return tuple(self.held_range((*prefix, coordinate))[1] for coordinate in range(size))

    @cached_property
    def uniform(self) -> bool:
        """All sections of one length: one ReduceScatter or AllGather serves the whole bucket."""
        return len({length for _, length in self.sections}) == 1


def build_buckets(
    groups: Sequence[Sequence[Piece]],
    owners: OwnerGrid,
    bucket_numel: int,
    *,
    whole_tensors: bool = False,
    padding_limit: float = PADDING_LIMIT,
) -> list[BucketLayout]:
    """Cut pieces into buckets in forward order and give each piece an owner: `assign` and `place`."""
    assigned = assign(groups, owners.size, bucket_numel, whole_tensors=whole_tensors)
    return place(assigned, owners, padding_limit)


class Assigned(NamedTuple):
    """What is in a bucket, and the owner of each piece."""

    pieces: Sequence[Piece]
    owners: Sequence[int]


def assign(
    groups: Sequence[Sequence[Piece]], owners: int, bucket_numel: int, *, whole_tensors: bool = False
) -> list[Assigned]:
    """Which pieces make up each bucket, in forward order, and who owns them.

    Args:
        groups: pieces by unit, units in forward order, all of one dtype.
        owners: how many ranks the ``optim`` axis has.
        bucket_numel: elements after which a bucket is closed; a larger unit has a bucket of its own.
        whole_tensors: never cut a tensor, because its optimizer needs it whole.

    Owners are chosen largest piece first for the least loaded rank, with loads that persist over buckets;
    ties go to the lower rank. Buckets with the largest pieces choose first, whatever their place, so that the
    others can make up for what a head at the end of the model does to the balance. A piece above an even
    share of everything is cut into row blocks first, since greedy balancing breaks down there (design,
    section 1).
    """
    total = sum(piece.numel for group in groups for piece in group)
    share = max(total // owners, 1)
    cut = []
    for run in runs(groups, bucket_numel):
        pieces = [piece for group in run for piece in group]
        if not whole_tensors and owners > 1:
            pieces = [block for piece in pieces for block in (piece.cut(share) if piece.numel > share else [piece])]
        cut.append(pieces)
    loads = [0] * owners
    assigned: dict[int, list[int]] = {}
    for index in sorted(range(len(cut)), key=lambda i: (-max(piece.numel for piece in cut[i]), i)):
        assigned[index] = _assign(cut[index], loads)
    return [Assigned(pieces, assigned[index]) for index, pieces in enumerate(cut)]


def place(assigned: Sequence[Assigned], owners: OwnerGrid, padding_limit: float) -> list[BucketLayout]:
    """Where everything lies: owners' sections are padded to one length while that makes a bucket at most
    ``padding_limit`` times as long."""
    return [_place(index, *run, owners, padding_limit) for index, run in enumerate(assigned)]


def runs(groups: Sequence[Sequence[Piece]], limit: int) -> list[list[Sequence[Piece]]]:
    """Units with something in this shard, bucket by bucket: a bucket is closed before it exceeds ``limit`` elements."""
    found: list[list[Sequence[Piece]]] = []
    size = 0
    for group in groups:
        numel = sum(piece.numel for piece in group)
        if not numel:
            continue
        if not found or size + numel > limit:
            found.append([])
            size = 0
        found[-1].append(group)
        size += numel
    return found


def _assign(pieces: Sequence[Piece], loads: list[int]) -> list[int]:
    """Owner of each piece; adds to ``loads``."""
    owners = [0] * len(pieces)
    least = [(load, rank) for rank, load in enumerate(loads)]
    heapq.heapify(least)
    for index in sorted(range(len(pieces)), key=lambda i: (-pieces[i].numel, i)):
        load, owner = least[0]
        owners[index] = owner
        loads[owner] = load + pieces[index].numel
        heapq.heapreplace(least, (loads[owner], owner))
    return owners


def _place(
    index: int,
    pieces: Sequence[Piece],
    owner_of: Sequence[int],
    owners: OwnerGrid,
    padding_limit: float,
) -> BucketLayout:
    units = tuple(dict.fromkeys(piece.unit for piece in pieces))
    used = [0] * owners.size
    for piece, owner in zip(pieces, owner_of, strict=True):
        used[owner] += piece.numel
    longest = max(used)
    pad = longest * owners.size <= padding_limit * sum(used)
    lengths = [longest] * owners.size if pad else used
    ends = list(accumulate(lengths[:-1], initial=0))
    sections = tuple(zip(ends, lengths, strict=True))
    slots = []
    for piece, owner in zip(pieces, owner_of, strict=True):
        slots.append(Slot(piece, owner, ends[owner]))
        ends[owner] += piece.numel
    return BucketLayout(index, tuple(slots), units, owners, sections)


def renumber(layouts: Sequence[BucketLayout]) -> list[BucketLayout]:
    """Buckets of several dtypes as one list in forward order."""
    ordered = sorted(layouts, key=lambda layout: (layout.units[0], layout.index))
    return [replace(layout, index=index) for index, layout in enumerate(ordered)]
