"""The geometry of a model under a plan: shards, buckets and owner loads, as the engine makes them.

Made by `plan.layout` as `partition.buckets` uses it on an accelerator. It is that of the ranks with coordinate 0 on
the ``param`` axis, whose shards are full; those of the others may end in padding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from deepspeed_amsp.plan.factors import Sharding
from deepspeed_amsp.plan.layout import (
    GATHERED_PADDING_LIMIT,
    BucketLayout,
    OwnerGrid,
    Piece,
    UnitLayout,
    assign,
    place,
    shard_pieces,
)
from deepspeed_amsp.plan.resolve import Plan, PublishMode
from deepspeed_amsp.plan.specs import ModelSpec, TrainSpec

BUCKET_NUMEL = 500_000_000
"""Elements of a bucket where the plan says nothing: DeepSpeed's default of zero_optimization.reduce_bucket_size."""


@dataclass(frozen=True)
class Stages:
    """Lengths of the stages in which a gradient gets to its owner, as `mesh.Mesh.stages` has them.

    inner: over which every micro-batch is reduced; outer: the last one. In node first where collectives go in two
    stages. replicate, data: (ranks in node, nodes) where an AllReduce over them goes in two stages, else None.
    """

    inner: tuple[int, ...]
    outer: tuple[int, ...]
    replicate: tuple[int, int] | None
    data: tuple[int, int] | None

    @property
    def grid(self) -> OwnerGrid:
        """The ``optim`` axis by owner number."""
        return OwnerGrid((*self.inner, *self.outer))


def stages_of(sharding: Sharding, hierarchical: bool) -> Stages:
    """The stages of a plan's reductions."""
    p, g, os, dp = (sharding.parameters, sharding.gradients, sharding.optimizer_states, sharding.data_parallel)
    inner, outer = (g.s0 // p.s0, g.s1 // p.s1), (os.s0 // g.s0, os.s1 // g.s1)
    if not hierarchical:
        return Stages((inner[0] * inner[1],), (outer[0] * outer[1],), None, None)
    replicate, data = (dp.s0 // os.s0, dp.s1 // os.s1), (dp.s0 // p.s0, dp.s1 // p.s1)
    return Stages(inner, outer, *(axis if min(axis) > 1 else None for axis in (replicate, data)))


@dataclass(frozen=True)
class Geometry:
    """Elements of everything that has a shape; units and buckets in forward order.

    shards: of each unit. full: of its gathered buffer. bucket_of: the bucket of its trained parameters, or None.
    """

    shards: tuple[int, ...]
    full: tuple[int, ...]
    bucket_of: tuple[int | None, ...]
    buckets: tuple[BucketLayout, ...]

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Of every bucket, padding included."""
        return tuple(bucket.numel for bucket in self.buckets)

    @cached_property
    def owned(self) -> tuple[int, ...]:
        """By owner: elements whose optimizer states it has."""
        numels = [0] * self.owners
        for bucket in self.buckets:
            for slot in bucket.slots:
                numels[slot.owner] += slot.piece.numel
        return tuple(numels)

    @cached_property
    def sections(self) -> tuple[int, ...]:
        """By owner: elements of its gradients, padding included."""
        return tuple(sum(bucket.sections[owner][1] for bucket in self.buckets) for owner in range(self.owners))

    @cached_property
    def filled(self) -> tuple[int, ...]:
        """Of every bucket, without padding."""
        return tuple(sum(slot.piece.numel for slot in bucket.slots) for bucket in self.buckets)

    @cached_property
    def updates_forward(self) -> tuple[int, ...]:
        """By bucket: by how many elements its slowest owner's work grows when buckets are updated in forward order.

        Owners work side by side, so a bucket is updated when all of its owners have done their parts of it and of
        the buckets before. The sum is the load of the busiest owner.
        """
        return self._updates(range(len(self.buckets)))

    @cached_property
    def updates_backward(self) -> tuple[int, ...]:
        """The same when the last bucket is updated first, as gradients arrive."""
        return self._updates(range(len(self.buckets) - 1, -1, -1))

    def _updates(self, order: range) -> tuple[int, ...]:
        done = [0] * self.owners
        more, until = [0] * len(self.buckets), 0
        for index in order:
            latest = until
            for slot in self.buckets[index].slots:
                done[slot.owner] += slot.piece.numel
                latest = max(latest, done[slot.owner])
            more[index], until = latest - until, latest
        return tuple(more)

    @property
    def owners(self) -> int:
        """Ranks of the ``optim`` axis."""
        return len(self.buckets[0].sections) if self.buckets else 1


def geometry(model: ModelSpec, plan: Plan, train: TrainSpec) -> Geometry:
    """The geometry of ``model``, made once for all plans that share it."""
    bucket = BUCKET_NUMEL if plan.bucket_bytes is None else max(plan.bucket_bytes // train.parameter_bytes, 1)
    s_p, owners = plan.sharding.s_p, plan.sharding.s_os // plan.sharding.s_p
    whole = train.optimizer.whole_tensors and s_p == 1
    limit = GATHERED_PADDING_LIMIT if plan.publish is PublishMode.ALL_GATHER else train.padding_limit
    if owners == 1:
        limit = 1.0  # nothing to pad: one geometry for all
    key = (s_p, owners, bucket, whole, limit)
    return _known(model, "_geometries", key, lambda: _make(model, *key))


Made = TypeVar("Made")


def _known(model: ModelSpec, what: str, key: tuple[float, ...], make: Callable[[], Made]) -> Made:
    """Kept with the model, like a cached_property: hashing a model of many units takes longer than a look-up may."""
    known: dict[tuple[float, ...], Made] = vars(model).setdefault(what, {})
    if key not in known:
        known[key] = make()
    return known[key]


def _make(model: ModelSpec, s_p: int, owners: int, bucket_numel: int, whole: bool, padding_limit: float) -> Geometry:
    layouts, groups = _known(model, "_pieces", (s_p,), lambda: _pieces(model, s_p))
    assigned = _known(
        model,
        "_assigned",
        (s_p, owners, bucket_numel, whole),
        lambda: assign(groups, owners, bucket_numel, whole_tensors=whole),
    )
    buckets = place(assigned, OwnerGrid((owners,)), padding_limit)
    bucket_of: list[int | None] = [None] * len(layouts)
    for bucket in buckets:
        for index in bucket.units:
            bucket_of[index] = bucket.index
    return Geometry(
        tuple(layout.shard_numel for layout in layouts),
        tuple(layout.numel for layout in layouts),
        tuple(bucket_of),
        tuple(buckets),
    )


def _pieces(model: ModelSpec, s_p: int) -> tuple[list[UnitLayout], list[list[Piece]]]:
    """By unit: its layout, and what a full shard has of its trained parameters."""
    layouts = [UnitLayout(unit.name, unit.params, s_p) for unit in model.units]
    groups = [
        [piece for piece in shard_pieces(layout, index, 0) if piece.param.name not in unit.frozen]
        for index, (unit, layout) in enumerate(zip(model.units, layouts, strict=True))
    ]
    return layouts, groups


def held(bucket: BucketLayout, stages: Stages, owner: int, depth: int) -> int:
    """Elements of ``bucket`` that the rank of ``owner`` holds after ``depth`` stages."""
    grid, digits, rest = stages.grid, [], owner
    for size in reversed(grid.sizes):
        rest, digit = divmod(rest, size)
        digits.append(digit)
    owners = grid.owners(digits[::-1][:depth])
    (start, _), (last, length) = bucket.sections[owners[0]], bucket.sections[owners[-1]]
    return last + length - start
