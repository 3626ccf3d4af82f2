"""One rank's share of a save: all that writing it needs, and nothing of the engine, so that training may go on.

Every rank writes its blocks, and beside them a small file that tells rank 0 about them. When all have, rank 0 makes
the index and the manifest of it and gives the folder its name. No collective is called for any of this.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint import WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from deepspeed_amsp.checkpoint import folder as folders
from deepspeed_amsp.checkpoint.claim import Claim
from deepspeed_amsp.checkpoint.contents import Contents
from deepspeed_amsp.checkpoint.flat import FlatTensor, Part, index_of, write_items
from deepspeed_amsp.checkpoint.folder import FileInfo
from deepspeed_amsp.checkpoint.manifest import MANIFEST, STATE, Manifest, module_key
from deepspeed_amsp.checkpoint.storage import INDEX, save_object, write_blocks, write_index
from deepspeed_amsp.checkpoint.together import CheckpointError

SHARED = "the folder must be one that all hosts share"


class Head(NamedTuple):
    """What rank 0 adds of its own.

    state: goes to `STATE`, with what the other ranks' shares say.
    manifest: as far as it is known before anything is written.
    latest: whether ``latest`` shall name the tag.
    script: the text of the folder's `zero_to_fp32.py`.
    """

    state: Mapping[str, Any]
    manifest: Manifest
    latest: bool
    script: str


class Told(NamedTuple):
    """What a rank tells rank 0: of its blocks, and, unless a replica says the same, of what it holds."""

    contents: Contents
    items: list[WriteItem]
    results: list[WriteResult]
    files: dict[str, FileInfo]
    random: Any


@dataclass(frozen=True)
class Share:
    """What one of ``world`` ranks writes of the checkpoint ``tag``.

    contents: what it holds, without the tensors; empty if a replica says the same.
    blocks: the tensors that it writes.
    random: its random states; None if they are not saved.
    head: on rank 0.
    """

    save_dir: Path
    tag: str
    rank: int
    world: int
    contents: Contents
    blocks: Mapping[str, FlatTensor]
    random: Any
    head: Head | None

    @property
    def folder(self) -> Path:
        """Where everything is until the checkpoint is complete."""
        return self.save_dir / (self.tag + folders.INCOMPLETE)

    def own_copy(self) -> Share:
        """The same, in memory on the host that nobody else writes to.

        Raises:
            Exception: whatever keeps the state from being pickled.
        """
        blocks = {
            key: replace(tensor, parts=tuple(Part(p.start, _copied(p.values)) for p in tensor.parts))
            for key, tensor in self.blocks.items()
        }
        objects = _pickled_copy(self.contents.objects)
        contents = replace(self.contents, scalars=deepcopy(self.contents.scalars), objects=objects)
        head = self.head and self.head._replace(state=_pickled_copy(self.head.state))
        return replace(self, contents=contents, blocks=blocks, head=head)

    def write(self) -> None:
        """Write the blocks, and tell rank 0.

        Raises:
            CheckpointError: the folder that rank 0 has made is not there.
            OSError: of the file system.
        """
        if not self.folder.is_dir():
            raise CheckpointError(f"{self.folder}, which rank 0 has made, is not there: {SHARED}")
        results: list[WriteResult] = []
        files: dict[str, FileInfo] = {}
        if self.blocks:
            name = f"__{self.rank}_0.distcp"
            results, files[name] = write_blocks(self.folder / name, self.blocks)
        told = Told(self.contents, write_items(self.blocks), results, files, self.random)
        folders.write_whole(self._told_by(self.rank), pickle.dumps(told))

    def missing(self, among: Iterable[int]) -> list[int]:
        """Ranks that have not written their share yet."""
        return [rank for rank in among if not self._told_by(rank).is_file()]

    def finish(self, claim: Claim) -> None:
        """The last of a save, by rank 0, when all ranks have written: index, state, manifest, and the folder's name.

        Args:
            claim: on the folder, as `folder.begin` gave it.

        Raises:
            CheckpointError: rank 0 does not see what the others have written.
            OSError: of the file system.
        """
        assert self.head is not None
        told = [self._heard_from(rank) for rank in range(self.world)]
        everything = _merged(told)
        files = {name: info for one in told for name, info in one.files.items()}
        write_index(self.folder, index_of([one.items for one in told]), [one.results for one in told])
        with (self.folder / STATE).open("wb") as file:
            save_object(self._state(everything, told), file)
            file.flush()
            os.fsync(file.fileno())
        for name in (STATE, INDEX):
            files[name] = folders.summed(self.folder / name)
        manifest = replace(
            self.head.manifest,
            tensors=everything.infos,
            aliases=everything.aliases,
            left_out=everything.left_out,
            buffers=tuple(name for name in everything.buffers if module_key(name) in everything.infos),
            files=files,
        )
        folders.write_durably(self.folder / MANIFEST, manifest.dumps())
        for rank in range(self.world):
            self._told_by(rank).unlink()
        script = self.folder / folders.SCRIPT  # of our own until it is whole: another save may be writing the same
        script.write_text(self.head.script, encoding="utf-8")
        script.rename(self.save_dir / folders.SCRIPT)
        folders.commit(claim, self.save_dir, self.tag, self.head.latest)

    def _told_by(self, rank: int) -> Path:
        return self.folder / f"rank_{rank}.told"

    def _heard_from(self, rank: int) -> Told:
        path = self._told_by(rank)
        if not path.is_file():
            raise CheckpointError(f"rank 0 does not see {path}, which another rank wrote: {SHARED}")
        told: Told = pickle.loads(path.read_bytes())
        for name, info in told.files.items():
            if not (self.folder / name).is_file() or (self.folder / name).stat().st_size != info.bytes:
                raise CheckpointError(f"rank 0 does not see {self.folder / name} as another rank wrote it: {SHARED}")
        return told

    def _state(self, everything: Contents, told: Sequence[Told]) -> dict[str, Any]:
        assert self.head is not None
        random = [one.random for one in told]
        return {
            **self.head.state,
            "scalars": everything.scalars,
            "objects": everything.objects,
            "random": random if any(one is not None for one in random) else None,
        }


def _merged(told: Sequence[Told]) -> Contents:
    """What all ranks hold, without the tensors themselves."""
    everything = Contents()
    for contents in (one.contents for one in reversed(told)):  # rank 0 has the last word
        everything.infos.update(contents.infos)
        everything.scalars.update(contents.scalars)
        everything.objects.update(contents.objects)
        everything.aliases.update(contents.aliases)
        everything.left_out = tuple(dict.fromkeys((*contents.left_out, *everything.left_out)))
        everything.buffers = tuple(dict.fromkeys((*contents.buffers, *everything.buffers)))
    return everything


def _copied(values: torch.Tensor) -> torch.Tensor:
    return values.detach().to("cpu", copy=True)


def _pickled_copy(state: Mapping[str, Any]) -> dict[str, Any]:
    """A copy that shares nothing with the running engine; what cannot be pickled is found out now."""
    memory = io.BytesIO()
    torch.save(dict(state), memory)
    memory.seek(0)
    copy: dict[str, Any] = torch.load(memory, weights_only=False)
    return copy
