"""What a checkpoint says about itself, in JSON: plan, step, tensors, files and checksums."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from deepspeed_amsp.checkpoint.crc import crc32
from deepspeed_amsp.checkpoint.folder import MANIFEST, Block, FileInfo
from deepspeed_amsp.checkpoint.together import CheckpointError

T = TypeVar("T")
STATE = "amsp_state.pt"
"""Everything that is no tensor of the model or the optimizer: schedulers, counters, the client's state."""
FORMAT = 3
MASTER, OPTIMIZER, MODULE = "master", "optimizer", "module"


def scaler_progress(scaler: Any) -> dict[str, Any]:
    """What a dynamic loss scaler has learned, and `STATE` keeps of it; the rest of it is configuration."""
    learned = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
    return {name: vars(scaler)[name] for name in learned if name in vars(scaler)}


class TensorInfo(NamedTuple):
    """A stored tensor, which is flat in the files."""

    shape: tuple[int, ...]
    dtype: str

    @classmethod
    def of(cls, shape: tuple[int, ...], dtype: torch.dtype) -> TensorInfo:
        return cls(tuple(shape), str(dtype).removeprefix("torch."))

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)  # type: ignore[no-any-return]

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()


def master_key(name: str) -> str:
    """Where the fp32 master of parameter ``name`` is stored."""
    return f"{MASTER}/{name}"


def state_key(name: str, key: str) -> str:
    """Where the optimizer state ``key`` ("exp_avg") of parameter ``name`` is stored."""
    return f"{OPTIMIZER}/{key}/{name}"


def module_key(name: str) -> str:
    """Where what has no master is stored as the module has it: frozen and non-float parameters, buffers."""
    return f"{MODULE}/{name}"


def part_prefix(part: int, parts: int) -> str:
    """What names in a checkpoint begin with where model-parallel ranks hold different tensors of one name."""
    return f"mp_rank_{part:02d}." if parts > 1 else ""


def prefixed(key: str, prefix: str) -> str:
    """The key under which a part of a model stores what it knows as ``key``."""
    kind, name = _kind_and_name(key)
    return f"{kind}/{prefix}{name}"


def _kind_and_name(key: str) -> tuple[str, str]:
    *kind, name = key.split("/", 2 if key.startswith(f"{OPTIMIZER}/") else 1)
    return "/".join(kind), name


def of_part(named: Mapping[str, T], prefix: str) -> dict[str, T]:
    """What a part of a model has stored by name, under the names that it knows."""
    return {name.removeprefix(prefix): value for name, value in named.items() if name.startswith(prefix)}


@dataclass(frozen=True)
class Manifest:
    """The contents of `MANIFEST`.

    plan: fingerprint of the plan that wrote the checkpoint; loading does not depend on it, but for "model_parallel":
        how many parts of the model there are (`part_prefix`).
    tensors: key (`master_key` and so on) -> shape and dtype.
    aliases: further names of tied parameters -> the name that their tensor is stored by.
    left_out: frozen parameters that were not saved, by exclude_frozen_parameters.
    buffers: which of the stored names are buffers.
    files: name -> size and checksums of every file beside this one.
    """

    tag: str
    plan: Mapping[str, Any]
    global_steps: int
    tensors: Mapping[str, TensorInfo]
    aliases: Mapping[str, str]
    left_out: tuple[str, ...]
    buffers: tuple[str, ...]
    files: Mapping[str, FileInfo]
    versions: Mapping[str, str]

    def names(self) -> set[str]:
        """Parameters and buffers whose values are stored."""
        kinds = (key.partition("/") for key in self.tensors)
        return {name for kind, _, name in kinds if kind in (MASTER, MODULE)}

    def frozen(self) -> set[str]:
        """Stored parameters that were not trained."""
        kinds = (key.partition("/") for key in self.tensors)
        return {name for kind, _, name in kinds if kind == MODULE} - set(self.buffers)

    def source(self, name: str) -> str | None:
        """The key that holds the value of a parameter or buffer, under whichever of its names it was stored."""
        for known in (name, self.aliases.get(name, name)):
            for key in (master_key(known), module_key(known)):
                if key in self.tensors:
                    return key
        return None

    def states(self, name: str) -> Iterator[tuple[str, str]]:
        """(state, key) of the optimizer states of a parameter that are tensors."""
        known = self.stored_name(name)
        for state in self._states.get(known, ()):
            yield state, state_key(known, state)

    def stored_name(self, name: str) -> str:
        """The name that a parameter or buffer was stored by; its own if it was not stored."""
        source = self.source(name)
        return name if source is None else source.partition("/")[2]

    @property
    def parts(self) -> int:
        """How many parts the model had; checkpoints of before there could be several do not say it."""
        return int(self.plan.get("model_parallel", 1))

    def part(self, prefix: str) -> Manifest:
        """What one part of the model has stored, under the names that it knows."""
        stored = {_kind_and_name(key): info for key, info in self.tensors.items()}
        return replace(
            self,
            tensors={
                f"{kind}/{name.removeprefix(prefix)}": info
                for (kind, name), info in stored.items()
                if name.startswith(prefix)
            },
            aliases={alias: name.removeprefix(prefix) for alias, name in of_part(self.aliases, prefix).items()},
            left_out=tuple(of_part(dict.fromkeys(self.left_out), prefix)),
            buffers=tuple(of_part(dict.fromkeys(self.buffers), prefix)),
        )

    @cached_property
    def _states(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for key in self.tensors:
            if key.startswith(f"{OPTIMIZER}/"):
                _, state, name = key.split("/", 2)
                found.setdefault(name, []).append(state)
        return found

    def dumps(self) -> bytes:
        """As JSON with a checksum of its own."""
        content = json.dumps(asdict(self), sort_keys=True)
        whole = {"format": FORMAT, "crc32": crc32(content.encode()), **json.loads(content)}
        return json.dumps(whole).encode()


def read_manifest(folder: Path) -> Manifest:
    """What ``folder`` says about itself.

    Raises:
        CheckpointError: the folder holds no checkpoint of ours, or the manifest is damaged.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise CheckpointError(
            f"{folder} holds no {MANIFEST}: it is no checkpoint that this version of an amsp engine wrote. Load it "
            f"with what wrote it"
        )
    try:
        content = json.loads(path.read_bytes())
        version, crc = content.pop("format"), content.pop("crc32")
    except (ValueError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    if version != FORMAT:
        raise CheckpointError(f"{path} has format {version}, and this version of deepspeed_amsp reads {FORMAT}")
    if crc32(json.dumps(content, sort_keys=True).encode()) != crc:
        raise CheckpointError(f"{path} is damaged: its contents do not have its checksum")
    tensors = {key: TensorInfo(tuple(shape), dtype) for key, (shape, dtype) in content.pop("tensors").items()}
    files = {
        name: FileInfo(size, tuple(Block(*block) for block in blocks))
        for name, (size, blocks) in content.pop("files").items()
    }
    left_out, buffers = tuple(content.pop("left_out")), tuple(content.pop("buffers"))
    return Manifest(tensors=tensors, files=files, left_out=left_out, buffers=buffers, **content)
