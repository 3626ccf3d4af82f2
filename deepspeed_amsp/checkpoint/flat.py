"""Tensors as torch.distributed.checkpoint stores them here: flattened, in pieces at offsets, whoever holds them.

A piece of a parameter is a run of elements of the flattened parameter, whether it is the whole of it, a block of
rows or what a shard has cut out (`plan.layout.Piece`). So everything is stored as one-dimensional tensors whose chunks
begin at an offset, and any other cut can be read from them. The planners follow torch 2.13's
`torch.distributed.checkpoint.planner` (unchanged in what is used here since 2.7).
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint import (
    ChunkStorageMetadata,
    LoadPlan,
    LoadPlanner,
    Metadata,
    ReadItem,
    SavePlan,
    SavePlanner,
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


class FlatSavePlanner(SavePlanner):
    """Writes every part of every `FlatTensor` that its rank was given."""

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        self._tensors: dict[str, FlatTensor] = state_dict
        self._values = {(key, part.start): part.values for key, tensor in state_dict.items() for part in tensor.parts}

    def create_local_plan(self) -> SavePlan:
        return SavePlan(
            [
                WriteItem(
                    index=MetadataIndex(key, (part.start,)),
                    type=WriteItemType.SHARD,
                    tensor_data=TensorWriteData(
                        chunk=_chunk(part),
                        properties=TensorProperties(dtype=tensor.dtype),
                        size=torch.Size((tensor.numel,)),
                    ),
                )
                for key, tensor in self._tensors.items()
                for part in tensor.parts
            ]
        )

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """On the coordinator. Raises CheckpointError unless every element has exactly one writer."""
        plans, metadata = create_default_global_save_plan(all_plans)
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
        return plans, metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        assert write_item.index.offset is not None
        return self._values[write_item.index.fqn, write_item.index.offset[0]]


class FlatLoadPlanner(LoadPlanner):
    """Reads into every part of every `FlatTensor`, from whatever blocks hold its elements."""

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        assert metadata is not None
        self._tensors: dict[str, FlatTensor] = state_dict
        self._metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        """Raises CheckpointError for a tensor that is not stored, or has another size."""
        items: list[ReadItem] = []
        for key, tensor in self._tensors.items():
            entry = self._metadata.state_dict_metadata.get(key)
            if not isinstance(entry, TensorStorageMetadata) or entry.size[0] != tensor.numel:
                raise CheckpointError(f"the checkpoint holds no {key} of {tensor.numel} elements")
            items += create_read_items_for_chunk_list(key, entry, [_chunk(part) for part in tensor.parts])
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise NotImplementedError("only tensors are stored this way")

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        # By number and not by offset: two parameters that were tied when they were stored want the same elements.
        assert read_item.dest_index.index is not None
        part = self._tensors[read_item.dest_index.fqn].parts[read_item.dest_index.index]
        return part.values.narrow(0, read_item.dest_offsets[0], read_item.lengths[0])

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """`resolve_tensor` gave the memory itself."""


def _chunk(part: Part) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size((part.start,)), torch.Size((part.values.numel(),)))
