"""What one rank sends and holds in a step, computed from the model's shapes and the plan alone.

Nothing of the package is used, so that an error in its geometry shows here. Sizes are elements unless they are
called bytes; parameters and gradients have 2 bytes, masters and moments 4.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from tests.scale.support.cases import Model, ScalePlan

WORKING, WIDE, COUNT = 2, 4, 8
"""Bytes of an element: bf16; fp32; int64 or fp64."""

SMALL = 2**16
"""What scalars may take."""

ALIGNMENT = 8
PADDED_UP_TO, GATHERED_UP_TO = 1.25, 2.0
"""Of what is in a bucket; padded further, sections keep their lengths, and nothing is gathered."""

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
    def owners(self) -> int:
        return self.plan.sharding.s_os // self.plan.sharding.s_p

    @property
    def nodes(self) -> int:
        """Over how many nodes the optim axis goes in two stages; 1 for one stage."""
        s = self.plan.sharding
        return s.optimizer_states.s1 // s.parameters.s1 if self.plan.hierarchical else 1

    @property
    def owner(self) -> int:
        """Its number on the optim axis, which comes next; in two stages owners are numbered across nodes first."""
        node, place = divmod(self.rank // self.plan.sharding.s_p % self.owners, self.owners // self.nodes)
        return place * self.nodes + node

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
        share = sum(block.size for group in groups for block in group) // self.owners
        cut = [[part for block in group for part in _cut(block, share)] for group in groups]
        return _owned(cut, self.owners, GATHERED_UP_TO if self.plan.publish == "all_gather" else PADDED_UP_TO)

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
            elif self.nodes > 1:
                # After the first stage a node's place holds what its owners, one on every node, share.
                here = bucket.sections[self.owner - self.owner % self.nodes :][: self.nodes]
                issue("reduce_scatter", "grad_reduce", "outer_node", self.owners // self.nodes, 1, whole)
                issue("reduce_scatter", "grad_reduce", "outer_cross", self.nodes, 1, sum(here) * WORKING)
                issue("all_reduce", "grad_reduce", "replicate", s.s_dp // s.s_os, 1, own)
            else:
                # Plans here have s_g at one end, so one of the two axes is the whole optim axis.
                issue("reduce_scatter", "grad_reduce", "inner", s.s_g // s.s_p, m, whole)
                issue("reduce_scatter", "grad_reduce", "outer", s.s_os // s.s_g, 1, whole)
                issue("all_reduce", "grad_reduce", "replicate", s.s_dp // s.s_os, 1, own)
            self._publish(bucket, issue)
        # The squared norm; how parameters were used and, with s_p > 1, every param group's order of gathers.
        issue("all_reduce", "scalars", "shards", s.s_os, 1, COUNT)
        orders = 2 * s.s_dp // s.s_p if s.s_p > 1 else 0
        issue("all_reduce", "scalars", "world", s.s_dp, 1, COUNT * (len(self.units) + orders))
        return log

    def _publish(self, bucket: Bucket, issue: Callable[[str, str, str, int, int, int], None]) -> None:
        """In two stages: from the owner to its place on the other nodes, and from there in the node."""
        nodes, places = self.nodes, self.owners // self.nodes
        if self.gathered(bucket):
            issue("all_gather", "publish", "optim", self.owners, 1, bucket.size * WORKING)
            return
        place = self.owner // nodes
        stages = [("optim", self.owners, [range(owner, owner + 1) for owner in range(self.owners)])]
        if nodes > 1:
            stages = [
                (
                    "optim_cross",
                    nodes,
                    [range(place * nodes + node, place * nodes + node + 1) for node in range(nodes)],
                ),
                ("optim_node", places, [range(other * nodes, (other + 1) * nodes) for other in range(places)]),
            ]
        for axis, size, senders in stages:
            for owners in senders:
                for message in self._parts(bucket, owners):
                    issue("broadcast", "publish", axis, size, 1, message)

    def _parts(self, bucket: Bucket, owners: range) -> list[int]:
        """Bytes of the messages that carry what belongs to ``owners``, neighbours, to the working copies.

        Whole parameters are sent where they lie, one behind the other; a parameter with several owners lies elsewhere,
        and every run of it is sent for itself. With s_p > 1 the sections are sent, but for the padding of the last.
        """
        if self.plan.sharding.s_p > 1:
            used = [owner for owner in owners if bucket.owned(owner)]
            sizes = [sum(bucket.sections[used[0] : used[-1]]) + bucket.owned(used[-1])] if used else []
        else:
            blocks = [block for block, who in zip(bucket.blocks, bucket.owners, strict=True) if who in owners]
            whole = [block for block in blocks if block.size == self.units[block.unit].size]
            sizes = [sum(block.size for block in whole), *_runs([block for block in blocks if block not in whole])]
        return [size * WORKING for size in sizes]

    def gathered(self, bucket: Bucket) -> bool:
        """Whether it is published by one AllGather."""
        return self.plan.publish == "all_gather" and len(set(bucket.sections)) == 1

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

    def limits(self) -> dict[str, int]:
        """Bytes that buffers may take at most, whatever the number of layers.

        G: what rests, and a bucket in the making. Gather: the unit in use and one that prefetching adds beyond its
        64 MiB; a recomputed layer keeps what it gathered, and the next one is prefetched. Reduce: two units, a bucket
        in every stage, one in the making, and the parts that buckets have become. Publish: nothing where parameters
        are sent in place, else all buckets may be under way. Step: fp32 gradients of one bucket, and the norms of its
        pieces. Other: scalars.
        """
        s = self.plan.sharding
        rest, units = self.at_rest(), [WORKING * self.shard(unit) * s.s_p for unit in self.units]
        buckets = [WORKING * bucket.size for bucket in self.buckets]
        in_layer = (len(units) - 3) // self.model.layers
        layer = sum(units[1 : 1 + in_layer]) if self.model.recompute else 0
        sent = buckets if s.s_p > 1 else [WORKING * bucket.size for bucket in self.buckets if self.gathered(bucket)]
        return {
            "G": max(rest["G owned"], rest.get("G resting", 0)) + max(buckets),
            "gather buffers": 2 * layer + 2 * max(units) if s.s_p > 1 else 0,
            "reduce buffers": (4 if self.nodes == 1 else 5) * max(buckets) + (2 * max(units) if s.s_p > 1 else 0),
            "publish buffers": sum(sent),
            "step": WIDE * max(bucket.owned(self.owner) for bucket in self.buckets) + SMALL,
            "other": SMALL,
        }


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


def _owned(groups: Sequence[Sequence[Block]], owners: int, limit: float) -> list[Bucket]:
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
        if max(sizes) * owners <= limit * sum(sizes):
            sizes = [max(sizes)] * owners
        buckets[number] = Bucket(tuple(blocks), tuple(chosen), tuple(sizes))
    return [buckets[number] for number in range(len(groups))]
