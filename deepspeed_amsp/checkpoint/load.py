"""Reading a checkpoint: every rank reads what it needs, and when all have theirs, all of it is applied, or nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from deepspeed_amsp.checkpoint import folder as folders
from deepspeed_amsp.checkpoint.crc import crc32
from deepspeed_amsp.checkpoint.deepspeed_zero import ZeroCheckpoint
from deepspeed_amsp.checkpoint.flat import FlatTensor
from deepspeed_amsp.checkpoint.manifest import MANIFEST, STATE, Manifest, of_part, part_prefix, prefixed, read_manifest
from deepspeed_amsp.checkpoint.restore import Choice, Restore
from deepspeed_amsp.checkpoint.storage import INDEX, read_blocks
from deepspeed_amsp.checkpoint.together import CheckpointError, alone, together
from deepspeed_amsp.runtime import Runtime


class Checkpoint(Protocol):
    """A checkpoint that can be loaded, whoever wrote it."""

    path: Path
    """What load_checkpoint returns."""
    manifest: Manifest
    state: dict[str, Any]

    def read(self, wanted: Mapping[str, FlatTensor]) -> None:
        """Fill ``wanted``. Raises CheckpointError: it cannot be read, or is damaged."""
        ...


class OwnCheckpoint:
    """One that an amsp engine has written, as this rank's part of the model sees it.

    Raises:
        CheckpointError: it is damaged, as far as that is seen before the tensors are read, or its model was in another
            number of parts.
    """

    def __init__(self, folder: Path, part: int, parts: int) -> None:
        self._folder = folder
        self.path = folder / STATE
        whole = read_manifest(folder)
        if whole.parts != parts:
            raise CheckpointError(
                f"{folder} holds a model in {whole.parts} model-parallel parts, and here are {parts}: load it with as "
                f"many model-parallel ranks as wrote it"
            )
        self._prefix = part_prefix(part, parts)
        self.manifest = whole.part(self._prefix)
        # All ranks together look at every file once; what is in the others is compared block by block as it is read.
        for name in sorted(self.manifest.files)[dist.get_rank() :: dist.get_world_size()]:
            folders.check_size(folder / name, self.manifest.files[name])
        for name in (STATE, INDEX):
            folders.check_file(folder / name, self.manifest.files[name])
        # Like DeepSpeed's: the client's state may hold any object, so load only what you trust.
        state = torch.load(self.path, map_location="cpu", weights_only=False)
        self.state = {**state, **{kind: of_part(state[kind], self._prefix) for kind in ("scalars", "objects")}}

    def read(self, wanted: Mapping[str, FlatTensor]) -> None:
        """Fill ``wanted``. Raises CheckpointError: a file is damaged."""
        stored = {prefixed(key, self._prefix): tensor for key, tensor in wanted.items()}
        read_blocks(self._folder, self.manifest.files, stored)


def load(
    amsp: Runtime,
    module: nn.Module,
    load_dir: Path,
    tag: str | None,
    choice: Choice,
    take: Callable[[Checkpoint, ExitStack], None],
) -> Checkpoint | None:
    """Load a checkpoint of any plan and world size into an engine; None if there is none to load. Collective.

    Args:
        tag: None for the one that ``latest`` names.
        take: what else is taken from the checkpoint, with ways to undo it.

    Raises:
        CheckpointError: on every rank; the engine is as it was.
    """
    what = f"load_checkpoint from {load_dir}"
    if tag is None:
        tag = alone(what, dist.get_rank(), lambda: folders.latest(load_dir))
        if tag is None:
            return None
    what = f"load_checkpoint from {load_dir / tag}"
    read: list[tuple[Checkpoint, Restore]] = []

    def read_all() -> int:
        found = folders.find(load_dir, tag)
        theirs = not (found / MANIFEST).is_file() and ZeroCheckpoint.is_one(found)
        among = amsp.data_parallel
        if theirs and among.parts > 1:
            raise CheckpointError(f"{found} was written by DeepSpeed's engine, whose model-parallel parts are not read")
        checkpoint: Checkpoint = ZeroCheckpoint(found) if theirs else OwnCheckpoint(found, among.part, among.parts)
        restore = Restore(amsp, module, checkpoint.manifest, checkpoint.state, choice)
        checkpoint.read(restore.wanted)
        read.append((checkpoint, restore))
        return crc32(repr(sorted(checkpoint.manifest.files.items())).encode())

    if len(set(together(what, read_all))) > 1:
        raise CheckpointError(
            f"{what} failed: ranks found different checkpoints there. The folder must be one that all hosts share, and "
            f"no save may take its place meanwhile"
        )
    checkpoint, restore = read[0]

    def what_may_fail() -> None:
        restore.apply_what_may_fail(undo)
        take(checkpoint, undo)

    with ExitStack() as undo:
        restore.begin(undo)
        together(what, what_may_fail)
        undo.pop_all()
    restore.apply()
    return checkpoint
