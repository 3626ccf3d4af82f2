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
    by_dtype: dict[torch.dtype, list[list[Piece]]] = {}
    for unit in units:
        pieces = shard_pieces(unit.layout, unit.index, coordinate)
        by_dtype.setdefault(unit.dtype, []).append([piece for piece in pieces if piece.param.name in trainable])
    layouts: list[BucketLayout] = []
    for groups in by_dtype.values():
        layouts += build_buckets(
            groups,
            owners,
            bucket_numel,
            whole_tensors=whole_tensors,
            padding_limit=padding_limit,
        )
    return renumber(layouts)
