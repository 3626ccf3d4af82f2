"""Tensors as torch.distributed.checkpoint stores them here: flattened, in pieces at offsets, whoever holds them.

A piece of a parameter is a run of elements of the flattened parameter, whether it is the whole of it, a block of
rows or what a shard has cut out (`plan.layout.Piece`). So everything is stored as one-dimensional tensors whose chunks
begin at an offset, and any other cut can be read from them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.distributed.checkpoint import (
    ChunkStorageMetadata,
    Metadata,
    ReadItem,
    SavePlan,
    TensorStorageMetadata,
    WriteItem,
)
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from deepspeed_amsp.checkpoint.together import CheckpointError

BLOCK_NUMEL = 1 << 24
"""Elements of a stored block at most. A reader reads whole blocks, so that a shard of a large tensor does not cost
reading all of it; and replicas share the writing block by block."""


class Part(NamedTuple):
    """Elements [start, start + len(values)) of a flattened tensor."""

    start: int
    values: torch.Tensor


@dataclass(frozen=True)
class FlatTensor:
    """What a rank holds, or wants, of a tensor of ``numel`` elements."""

    numel: int
    dtype: torch.dtype
    parts: tuple[Part, ...]

    def blocks(self) -> list[Part]:
        """The parts, none longer than a block."""
        return [
            Part(part.start + at, part.values[at : at + BLOCK_NUMEL])
            for part in self.parts
            for at in range(0, part.values.numel(), BLOCK_NUMEL)
        ]


def share(tensors: Mapping[str, FlatTensor], index: int, size: int) -> dict[str, FlatTensor]:
    """Which blocks of what ``size`` replicas hold is written by the one with this ``index``.

    All of them call this with the same tensors. Largest block first to who has least to write.
    """
    blocks = [(key, block) for key, tensor in tensors.items() for block in tensor.blocks()]
    loads = [0] * size
    mine: dict[str, list[Part]] = {}
    for key, block in sorted(blocks, key=lambda entry: (-entry[1].values.nbytes, entry[0], entry[1].start)):
        writer = loads.index(min(loads))
        loads[writer] += block.values.nbytes
        if writer == index:
            mine.setdefault(key, []).append(block)
    return {key: FlatTensor(tensors[key].numel, tensors[key].dtype, tuple(parts)) for key, parts in mine.items()}


def write_items(tensors: Mapping[str, FlatTensor]) -> list[WriteItem]:
    """What a rank writes, for `index_of`."""
    return [
        WriteItem(
            index=MetadataIndex(key, (part.start,)),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                chunk=_chunk(part),
                properties=TensorProperties(dtype=tensor.dtype),
                size=torch.Size((tensor.numel,)),
            ),
        )
        for key, tensor in tensors.items()
        for part in tensor.parts
    ]


def index_of(ranks: Sequence[list[WriteItem]]) -> Metadata:
    """The index of what all ranks write.

    Raises:
        CheckpointError: an element has no writer, or several.
    """
    _, metadata = create_default_global_save_plan([SavePlan(items) for items in ranks])
    for key, entry in metadata.state_dict_metadata.items():
        assert isinstance(entry, TensorStorageMetadata)
        cursor = 0
        for offset, numel in sorted((chunk.offsets[0], chunk.sizes[0]) for chunk in entry.chunks):
            if offset != cursor:
                raise CheckpointError(
                    f"elements {min(offset, cursor)} to {max(offset, cursor)} of {key} would be written "
                    f"{'twice' if offset < cursor else 'by no rank'}"
                )
            cursor += numel
        if cursor != entry.size[0]:
            raise CheckpointError(f"elements {cursor} to {entry.size[0]} of {key} would be written by no rank")
    return metadata


def read_items(tensors: Mapping[str, FlatTensor], metadata: Metadata) -> Iterator[tuple[ReadItem, torch.Tensor]]:
    """Which elements of which block are to be copied into which memory [elements].

    Raises:
        CheckpointError: a tensor is not stored, or has another size.
    """
    for key, tensor in tensors.items():
        entry = metadata.state_dict_metadata.get(key)
        if not isinstance(entry, TensorStorageMetadata) or entry.size[0] != tensor.numel:
            raise CheckpointError(f"the checkpoint holds no {key} of {tensor.numel} elements")
        for item in create_read_items_for_chunk_list(key, entry, [_chunk(part) for part in tensor.parts]):
            # By number and not by offset: parameters that were tied when they were stored want the same elements.
            assert item.dest_index.index is not None
            part = tensor.parts[item.dest_index.index]
            yield item, part.values.narrow(0, item.dest_offsets[0], item.lengths[0])


def _chunk(part: Part) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size((part.start,)), torch.Size((part.values.numel(),)))
