"""Writing a checkpoint: all ranks write their blocks side by side, then rank 0 gives the folder its name."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import FileSystemWriter
from torch.futures import Future

from deepspeed_amsp.checkpoint import folder as folders
from deepspeed_amsp.checkpoint.contents import Contents, aliases, to_write
from deepspeed_amsp.checkpoint.flat import FlatSavePlanner, FlatTensor
from deepspeed_amsp.checkpoint.manifest import MANIFEST, STATE, FileInfo, Manifest, module_key
from deepspeed_amsp.checkpoint.together import CheckpointError, alone, stored, together
from deepspeed_amsp.runtime import Runtime

METADATA = ".metadata"
"""torch.distributed.checkpoint's own index."""
_SHARED = "the folder must be one that all hosts share"


class About(NamedTuple):
    """What rank 0 adds. ``state`` goes to `STATE`; ``latest``: whether ``latest`` shall name the tag."""

    global_steps: int
    state: Mapping[str, Any]
    versions: Mapping[str, str]
    latest: bool


class _Writer(FileSystemWriter):
    """Remembers which files it has written."""

    names: tuple[str, ...] = ()

    def write_data(self, plan: Any, planner: Any) -> Any:
        if not plan.items:
            nothing: Future[list[Any]] = Future()
            nothing.set_result([])
            return nothing
        done = super().write_data(plan, planner)
        self.names = tuple(sorted({result.storage_data.relative_path for result in done.value()}))
        return done


def save(amsp: Runtime, module: nn.Module, save_dir: Path, tag: str, left_out: Collection[str], about: About) -> None:
    """Write the checkpoint ``tag``. Collective.

    Raises:
        CheckpointError: on every rank; what was there before is as it was.
    """
    _Save(amsp, module, save_dir, tag, tuple(sorted(left_out)), about).run()


@dataclass(frozen=True)
class _Save:
    """One save; see `save` for the arguments."""

    amsp: Runtime
    module: nn.Module
    save_dir: Path
    tag: str
    left_out: tuple[str, ...]
    about: About

    @property
    def written(self) -> Path:
        """Where everything is until the checkpoint is complete."""
        return self.save_dir / (self.tag + folders.INCOMPLETE)

    def run(self) -> None:
        rank, what = dist.get_rank(), f"save_checkpoint to {self.save_dir / self.tag}"
        alone(what, rank, lambda: folders.begin(self.save_dir, self.tag))
        mine: dict[str, FlatTensor] = {}
        try:
            everything = _merged(together(what, lambda: self._collect(mine)))
            writer = _Writer(self.written)
            stored(what, lambda: dcp.save(dict(mine), storage_writer=writer, planner=FlatSavePlanner()))
            parts = together(what, lambda: {name: folders.checksum(self.written / name) for name in writer.names})
            files = {name: FileInfo(*info) for part in parts for name, info in part.items()}
            alone(what, rank, lambda: self._finish(everything, files))
        except BaseException:
            if rank == 0:
                folders.discard(self.save_dir, self.tag)
            raise

    def _collect(self, mine: dict[str, FlatTensor]) -> Contents | None:
        """Fills ``mine`` with what this rank writes; returns what it holds, unless a replica says the same."""
        if not self.written.is_dir():
            raise CheckpointError(f"{self.written}, which rank 0 has made, is not there: {_SHARED}")
        assert self.amsp.optimizer is not None
        contents, blocks = to_write(self.amsp.optimizer, self.amsp.mesh, self.module, self.left_out)
        mine.update(blocks)
        return contents if self.amsp.mesh.first_replica or self.amsp.mesh.rank == 0 else None

    def _finish(self, everything: Contents, files: dict[str, FileInfo]) -> None:
        """The last of a save, by rank 0: state, manifest, and the folder's name."""
        for name, info in files.items():
            path = self.written / name
            if not path.is_file() or path.stat().st_size != info.bytes:
                raise CheckpointError(f"rank 0 does not see {path} as another rank wrote it: {_SHARED}")
        with (self.written / STATE).open("wb") as file:
            torch.save(self._state(everything), file)
            file.flush()
            os.fsync(file.fileno())
        for name in (STATE, METADATA):
            files[name] = FileInfo(*folders.checksum(self.written / name))
        manifest = Manifest(
            tag=self.tag,
            plan=self.amsp.plan.fingerprint(),
            global_steps=self.about.global_steps,
            tensors=everything.infos,
            aliases=aliases(self.module),
            left_out=self.left_out,
            buffers=tuple(name for name, _ in self.module.named_buffers() if module_key(name) in everything.infos),
            files=files,
            versions=dict(self.about.versions),
        )
        folders.write_durably(self.written / MANIFEST, manifest.dumps())
        folders.commit(self.save_dir, self.tag)
        if self.about.latest:
            folders.set_latest(self.save_dir, self.tag)

    def _state(self, everything: Contents) -> dict[str, Any]:
        assert self.amsp.optimizer is not None
        states = self.amsp.optimizer.states
        groups = states.optimizer.param_groups
        return {
            **self.about.state,
            "groups": [{key: value for key, value in group.items() if key != "params"} for group in groups],
            "group_names": states.group_names,
            "scalars": everything.scalars,
            "objects": everything.objects,
        }


def _merged(parts: list[Contents | None]) -> Contents:
    """What all ranks hold, without the tensors themselves."""
    everything = Contents()
    for part in parts:
        if part is not None:
            everything.infos.update(part.infos)
            everything.scalars.update(part.scalars)
    first = parts[0]
    if first is not None:
        everything.objects.update(first.objects)
    return everything
