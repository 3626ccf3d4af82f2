"""The buckets of a whole model on one rank: by dtype, since a bucket travels in one."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from deepspeed_amsp.partition.params import Unit
from deepspeed_amsp.plan.layout import (
    BucketLayout,
    OwnerGrid,
    Piece,
    build_buckets,
    renumber,
    runs,
    shard_pieces,
)


def bucket_layouts(
    units: Sequence[Unit],
    trainable: Collection[str],
    coordinate: int,
    owners: OwnerGrid,
    bucket_numel: int,
    *,
    whole_tensors: bool,
    padding_limit: float,
) -> list[BucketLayout]:
    """Buckets in forward order, numbered through; the last three arguments are those of `build_buckets`.

    Args:
        units: in forward order.
        trainable: names of the parameters that have gradients and optimizer states.
        coordinate: this rank's place on the ``param`` axis.
    """
    layouts: list[BucketLayout] = []
    for groups in _pieces_by_dtype(units, trainable, coordinate):
        layouts += build_buckets(
            groups,
            owners,
            bucket_numel,
            whole_tensors=whole_tensors,
            padding_limit=padding_limit,
        )
    return renumber(layouts)


def first_buckets(units: Sequence[Unit], trainable: Collection[str], bucket_numel: int) -> dict[int, int]:
    """Index of a unit -> number of its bucket at the first place of the ``param`` axis, as every rank can tell.

    Elsewhere buckets are about the same: a unit's shards have one length, and the last may end in padding.
    """
    found: dict[int, int] = {}
    number = 0
    for groups in _pieces_by_dtype(units, trainable, 0):
        for run in runs(groups, bucket_numel):
            found.update((pieces[0].unit, number) for pieces in run)
            number += 1
    return found


def _pieces_by_dtype(units: Sequence[Unit], trainable: Collection[str], coordinate: int) -> list[list[list[Piece]]]:
    """By dtype and unit, the pieces of a place on the ``param`` axis that have optimizer states."""
    by_dtype: dict[torch.dtype, list[list[Piece]]] = {}
    for unit in units:
        pieces = shard_pieces(unit.layout, unit.index, coordinate)
        by_dtype.setdefault(unit.dtype, []).append([piece for piece in pieces if piece.param.name in trainable])
    return list(by_dtype.values())
