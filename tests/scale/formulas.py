"""What one rank sends and holds in a step, computed from the model's shapes and the plan alone.

Nothing of the package is used, so that an error in its geometry shows here. Sizes are elements unless they are
called bytes; parameters and gradients have 2 bytes, masters and moments 4.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from tests.scale.support.cases import Model, ScalePlan

WORKING, WIDE, COUNT = 2, 4, 8
"""Bytes of an element: bf16; fp32; int64 or fp64."""

ALIGNMENT = 8
PADDED_UP_TO = 1.25

Schedule = Counter[tuple[str, str, str, int, int]]
"""(op, purpose, axis, group size, bytes) -> how often in one step."""


class Matrix(NamedTuple):
    """A parameter: every module of a LLaMA has one. A vector has rows of one element."""

    rows: int
    columns: int

    @property
    def size(self) -> int:
        return self.rows * self.columns


class Block(NamedTuple):
    """Elements [start, stop) of a parameter that have one owner."""

    unit: int
    start: int
    stop: int
    row: int  # elements that a cut keeps together

    @property
    def size(self) -> int:
        return self.stop - self.start

    @property
    def whole_rows(self) -> bool:
        return self.start % self.row == 0 and self.stop % self.row == 0


@dataclass(frozen=True)
class Bucket:
    """``blocks`` with their ``owners``; ``sections`` are what each owner gets, padding included."""

    blocks: tuple[Block, ...]
    owners: tuple[int, ...]
    sections: tuple[int, ...]

    @property
    def size(self) -> int:
        return sum(self.sections)

    def owned(self, owner: int) -> int:
        """Without padding."""
        return sum(block.size for block, who in zip(self.blocks, self.owners, strict=True) if who == owner)


def llama(model: Model) -> list[Matrix]:
    """Its parameters in forward order."""
    d, f = model.dim, model.ffn
    norm = Matrix(d, 1)
    layer = [norm, *[Matrix(d, d)] * 4, norm, Matrix(f, d), Matrix(f, d), Matrix(d, f)]
    return [Matrix(model.vocab, d), *layer * model.layers, norm, Matrix(model.vocab, d)]


@dataclass(frozen=True)
class Expected:
    """One rank of one plan."""

    plan: ScalePlan
    model: Model
    rank: int

    @property
    def units(self) -> list[Matrix]:
        return llama(self.model)

    @property
    def param(self) -> int:
        """This rank's place on the param axis, which varies fastest."""
        return self.rank % self.plan.sharding.s_p

    @property
    def owner(self) -> int:
        """Its place on the optim axis, which comes next."""
        s = self.plan.sharding
        return self.rank // s.s_p % (s.s_os // s.s_p)

    def shard(self, unit: Matrix) -> int:
        """Elements of a shard: the s_p-th part, rounded up to the alignment."""
        s_p = self.plan.sharding.s_p
        return unit.size if s_p == 1 else -(-unit.size // (s_p * ALIGNMENT)) * ALIGNMENT

    @cached_property
    def buckets(self) -> list[Bucket]:
        """Units in forward order fill buckets; a bucket is closed when the next unit does not fit in."""
        groups: list[list[Block]] = []
        room = 0
        for index, unit in enumerate(self.units):
            start = self.param * self.shard(unit)
            block = Block(index, start, min(start + self.shard(unit), unit.size), unit.columns)
            if not groups or block.size > room:
                groups.append([])
                room = self.plan.bucket_bytes // WORKING
            groups[-1].append(block)
            room -= block.size
        owners = self.plan.sharding.s_os // self.plan.sharding.s_p
        share = sum(block.size for group in groups for block in group) // owners
        cut = [[part for block in group for part in _cut(block, share)] for group in groups]
        return _owned(cut, owners, equal=self.plan.publish == "all_gather")

    def schedule(self) -> Schedule:
        """All collectives of a step that is not the first."""
        plan, s = self.plan, self.plan.sharding
        m, log = plan.micro_batches, Counter[tuple[str, str, str, int, int]]()

        def issue(op: str, purpose: str, axis: str, size: int, count: int, size_bytes: int) -> None:
            if size > 1 and count and size_bytes:
                log[op, purpose, axis, size, size_bytes] += count

        for unit in self.units:
            full = self.shard(unit) * s.s_p * WORKING
            issue("all_gather", "gather", "param", s.s_p, 2 * m, full)  # for forward, and for backward
            issue("reduce_scatter", "param_reduce", "param", s.s_p, m, full)
        for bucket in self.buckets:
            whole, own = bucket.size * WORKING, bucket.sections[self.owner] * WORKING
            if plan.reduce == "all_reduce":
                issue("all_reduce", "grad_reduce", "inner", s.s_g // s.s_p, m - 1, whole)
                issue("all_reduce", "grad_reduce", "data", s.s_dp // s.s_p, 1, whole)
            else:
                # Plans here have s_g at one end, so one of the two axes is the whole optim axis.
                issue("reduce_scatter", "grad_reduce", "inner", s.s_g // s.s_p, m, whole)
                issue("reduce_scatter", "grad_reduce", "outer", s.s_os // s.s_g, 1, whole)
                issue("all_reduce", "grad_reduce", "replicate", s.s_dp // s.s_os, 1, own)
            if plan.publish == "all_gather":
                issue("all_gather", "publish", "optim", s.s_os // s.s_p, 1, whole)
            else:
                for message in self._broadcasts(bucket):
                    issue("broadcast", "publish", "optim", s.s_os // s.s_p, 1, message * WORKING)
        # The squared norm, and which parameters were used; with s_p > 1 every param group's order of gathers, too.
        issue("all_reduce", "scalars", "shards", s.s_os, 1, COUNT)
        orders = 2 * s.s_dp // s.s_p if s.s_p > 1 else 0
        issue("all_reduce", "scalars", "world", s.s_dp, 1, COUNT * (len(self.units) + orders))
        return log

    def _broadcasts(self, bucket: Bucket) -> list[int]:
        """One from every owner that has something in the bucket. Whole parameters are sent where they lie, one
        behind the other; a parameter with several owners lies elsewhere, and every part of it is sent for itself.
        """
        sizes: list[int] = []
        for owner in range(len(bucket.sections)):
            if self.plan.sharding.s_p > 1:
                sizes.append(bucket.owned(owner))
                continue
            blocks = [block for block, who in zip(bucket.blocks, bucket.owners, strict=True) if who == owner]
            whole = [block for block in blocks if block.size == self.units[block.unit].size]
            sizes.append(sum(block.size for block in whole))
            sizes += _runs([block for block in blocks if block not in whole])
        return sizes

    def replicated_sections(self) -> list[int]:
        """Bytes of this owner's AllReduces over replicas in the order of issue: the last bucket is full first."""
        return [
            bucket.sections[self.owner] * WORKING for bucket in reversed(self.buckets) if bucket.sections[self.owner]
        ]

    def at_rest(self) -> dict[str, int]:
        """Bytes of P, G, masters and moments."""
        s = self.plan.sharding
        owned = sum(bucket.owned(self.owner) for bucket in self.buckets)
        rest = {
            "P": WORKING * sum(self.shard(unit) for unit in self.units),
            "G owned": WORKING * sum(bucket.sections[self.owner] for bucket in self.buckets),
            "masters": WIDE * owned,
            "moments": 2 * WIDE * owned,
        }
        if self.plan.micro_batches > 1:
            kept = sum(bucket.size if s.s_g == s.s_p else bucket.sections[self.owner] for bucket in self.buckets)
            rest["G resting"] = WORKING * kept
        return rest


def _cut(block: Block, share: int) -> list[Block]:
    """A block larger than an even share of everything becomes blocks of at most that, of whole rows if it can."""
    if block.size <= share:
        return [block]
    row = block.row if block.whole_rows else 1
    step = max(share // row, 1) * row
    return [block._replace(start=at, stop=min(at + step, block.stop)) for at in range(block.start, block.stop, step)]


def _runs(blocks: Sequence[Block]) -> list[int]:
    """Sizes of what remains when neighbouring blocks of a parameter are joined."""
    runs: list[int] = []
    end = None
    for block in sorted(blocks):
        if end == (block.unit, block.start):
            runs[-1] += block.size
        else:
            runs.append(block.size)
        end = block.unit, block.stop
    return runs


def _owned(groups: Sequence[Sequence[Block]], owners: int, equal: bool) -> list[Bucket]:
    """Largest first to whoever has least; the bucket with the largest block chooses first."""
    loads = [0] * owners
    buckets: dict[int, Bucket] = {}
    for number in sorted(range(len(groups)), key=lambda n: -max(block.size for block in groups[n])):
        blocks = groups[number]
        chosen = [0] * len(blocks)
        sizes = [0] * owners
        for place in sorted(range(len(blocks)), key=lambda n: -blocks[n].size):
            owner = loads.index(min(loads))
            chosen[place] = owner
            loads[owner] += blocks[place].size
            sizes[owner] += blocks[place].size
        if equal or max(sizes) * owners <= PADDED_UP_TO * sum(sizes):
            sizes = [max(sizes)] * owners
        buckets[number] = Bucket(tuple(blocks), tuple(chosen), tuple(sizes))
    return [buckets[number] for number in range(len(groups))]
