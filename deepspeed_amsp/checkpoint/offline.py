"""Reading a checkpoint without an engine: no process group, no accelerator, and no more memory than what is read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from deepspeed_amsp.checkpoint import folder as folders
from deepspeed_amsp.checkpoint.flat import FlatTensor, Part
from deepspeed_amsp.checkpoint.manifest import MANIFEST, MASTER, MODULE, OPTIMIZER, Manifest, read_manifest
from deepspeed_amsp.checkpoint.storage import read_blocks
from deepspeed_amsp.checkpoint.together import CheckpointError


@dataclass(frozen=True)
class Archive:
    """A complete checkpoint on disk."""

    folder: Path
    manifest: Manifest

    def read(self, keys: Iterable[str]) -> dict[str, torch.Tensor]:
        """The tensors of these keys, whole, on the CPU, in the dtype in which they were stored.

        Raises:
            CheckpointError: what was read is damaged.
        """
        wanted: dict[str, FlatTensor] = {}
        whole: dict[str, torch.Tensor] = {}
        for key in keys:
            info = self.manifest.tensors[key]
            values = torch.empty(info.numel, dtype=info.torch_dtype)
            whole[key] = values.view(info.shape)
            if info.numel:
                wanted[key] = FlatTensor(info.numel, values.dtype, (Part(0, values),))
        read_blocks(self.folder, self.manifest.files, wanted)
        return whole

    def damage(self) -> list[str]:
        """What is wrong with the files; empty if nothing is."""
        found = []
        for name, info in self.manifest.files.items():
            try:
                folders.check_file(self.folder / name, info)
            except CheckpointError as error:
                found.append(str(error))
        return found

    def kinds(self) -> list[tuple[str, str, int, int]]:
        """(what, dtype, tensors, bytes) of masters, each optimizer state and the rest."""
        tensors: Counter[tuple[str, str]] = Counter()
        sizes: Counter[tuple[str, str]] = Counter()
        for key, info in self.manifest.tensors.items():
            kind, _, rest = key.partition("/")
            what = {MASTER: "masters", MODULE: "frozen, non-float, buffers", OPTIMIZER: rest.partition("/")[0]}[kind]
            tensors[what, info.dtype] += 1
            sizes[what, info.dtype] += info.numel * info.torch_dtype.itemsize
        return [(what, dtype, count, sizes[what, dtype]) for (what, dtype), count in sorted(tensors.items())]


def open_archive(path: Path) -> Archive:
    """The checkpoint in ``path``, or, if that is a folder of checkpoints, the one that its ``latest`` names.

    Raises:
        CheckpointError: there is none, or its manifest is damaged.
    """
    try:
        if not path.exists():
            path = folders.find(path.parent, path.name)  # where another is taking its place
        elif not (path / MANIFEST).is_file():
            tag = folders.latest(path) if path.is_dir() else None
            if tag is None:
                raise CheckpointError(
                    f"{path} holds neither {MANIFEST} nor a file {folders.LATEST} that names a checkpoint"
                )
            path = folders.find(path, tag)
        elif path.name.endswith(folders.INCOMPLETE):
            raise CheckpointError(f"{path} was left by a save that was interrupted")
    except FileNotFoundError as error:
        raise CheckpointError(str(error)) from error
    return Archive(path, read_manifest(path))
