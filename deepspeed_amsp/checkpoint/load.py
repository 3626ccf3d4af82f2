"""Reading a checkpoint: checked as a whole by all ranks together, read side by side, applied when all have theirs."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import FileSystemReader

from deepspeed_amsp.checkpoint import folder as folders
from deepspeed_amsp.checkpoint.flat import FlatLoadPlanner
from deepspeed_amsp.checkpoint.manifest import STATE, Manifest, read_manifest
from deepspeed_amsp.checkpoint.restore import Choice, Restore
from deepspeed_amsp.checkpoint.together import alone, stored, together
from deepspeed_amsp.runtime import Runtime


class Loaded(NamedTuple):
    """Where the state was read from, what the checkpoint says about itself, and the state."""

    path: Path
    manifest: Manifest
    state: dict[str, Any]


def load(amsp: Runtime, module: nn.Module, load_dir: Path, tag: str | None, choice: Choice) -> Loaded | None:
    """Load a checkpoint of any plan and world size into an engine; None if there is none to load. Collective.

    Args:
        tag: None for the one that ``latest`` names.

    Raises:
        CheckpointError: on every rank; the engine is as it was.
    """
    what = f"load_checkpoint from {load_dir}"
    if tag is None:
        tag = alone(what, dist.get_rank(), lambda: folders.latest(load_dir))
        if tag is None:
            return None
    what = f"load_checkpoint from {load_dir / tag}"
    plans: list[tuple[Path, Manifest, dict[str, Any], Restore]] = []

    def check() -> None:
        found = folders.find(load_dir, tag)
        manifest = read_manifest(found)
        folders.check_files(found, _my_files(manifest))

    def plan() -> None:
        found = folders.find(load_dir, tag)
        manifest = read_manifest(found)
        # Like DeepSpeed's: the client's state may hold any object, so load only what you trust.
        state = torch.load(found / STATE, map_location="cpu", weights_only=False)
        plans.append((found, manifest, state, Restore(amsp, module, manifest, state, choice)))

    together(what, check)
    together(what, plan)
    found, manifest, state, restore = plans[0]
    reader = FileSystemReader(found)
    stored(what, lambda: dcp.load(dict(restore.wanted), storage_reader=reader, planner=FlatLoadPlanner()))
    restore.apply()
    return Loaded(found / STATE, manifest, state)


def _my_files(manifest: Manifest) -> list[tuple[str, int, int]]:
    """The files that this rank checks: all ranks together check each once, the largest ones on different ranks."""
    files = sorted(manifest.files.items(), key=lambda entry: (-entry[1].bytes, entry[0]))
    return [(name, *info) for name, info in files[dist.get_rank() :: dist.get_world_size()]]
