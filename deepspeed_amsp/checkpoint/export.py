"""Whole weights from a checkpoint, in the files that other programs read: safetensors or torch, as Hugging Face's."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from deepspeed_amsp.checkpoint.manifest import Manifest
from deepspeed_amsp.checkpoint.offline import Archive
from deepspeed_amsp.checkpoint.storage import save_object
from deepspeed_amsp.checkpoint.together import CheckpointError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FORMATS = ("safetensors", "torch")
SHARD_BYTES = 5 * 10**9
_SAFETENSORS = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
"""https://huggingface.co/docs/safetensors: a JSON header behind its length, then the bytes of all tensors."""


class Exported(NamedTuple):
    """Files that were written, tensors in them, and frozen parameters that the checkpoint does not hold."""

    files: list[Path]
    tensors: int
    bytes: int
    left_out: tuple[str, ...]


class _Entry(NamedTuple):
    name: str
    key: str
    dtype: torch.dtype
    bytes: int


def export(
    archive: Archive,
    out: Path,
    form: str,
    dtype: str,
    shard_bytes: int = SHARD_BYTES,
    exclude_frozen: bool = False,
) -> Exported:
    """Write the weights of ``archive`` into the folder ``out``, in files of about ``shard_bytes`` with an index.

    Parameters get ``dtype`` (rounded from the fp32 masters); buffers and what is not float stay as they are. Tied
    weights are written once: safetensors has them by their first name only, torch by all names.

    Raises:
        CheckpointError: ``out`` is not empty, the checkpoint is damaged, safetensors has no such dtype, or a value is
            too large for ``dtype``.
        OSError: of the file system. In either case no file is left.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CheckpointError(f"{out} is not empty")
    damage = archive.damage()
    if damage:
        raise CheckpointError("; ".join(damage))
    manifest = archive.manifest
    left_out = manifest.frozen() if exclude_frozen else set()
    entries = [entry for entry in _entries(manifest, DTYPES[dtype]) if entry.name not in left_out]
    if form == "safetensors":
        _check_dtypes(entries)
    shards = _shards(entries, shard_bytes)
    stem, suffix = ("model", "safetensors") if form == "safetensors" else ("pytorch_model", "bin")
    out.mkdir(parents=True, exist_ok=True)
    counts = [f"-{number:05d}-of-{len(shards):05d}" if len(shards) > 1 else "" for number in range(1, len(shards) + 1)]
    files, where = [out / f"{stem}{count}.{suffix}" for count in counts], {}
    write = _write_safetensors if form == "safetensors" else _write_torch
    total = sum(entry.bytes for shard in shards for entry in shard)
    try:
        for shard, path in zip(shards, list(files), strict=True):
            where.update(dict.fromkeys(write(archive, shard, path), path.name))
        if len(shards) > 1:
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
            files.append(out / f"{stem}.{suffix}.index.json")
            files[-1].write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    except BaseException:
        for path in files:
            path.unlink(missing_ok=True)
        raise
    return Exported(files, len(where), total, manifest.left_out)


def _entries(manifest: Manifest, dtype: torch.dtype) -> list[_Entry]:
    entries, buffers = [], set(manifest.buffers)
    for name in sorted(manifest.names()):
        key = manifest.source(name)
        assert key is not None
        info = manifest.tensors[key]
        casts = info.torch_dtype.is_floating_point and name not in buffers
        target = dtype if casts else info.torch_dtype
        entries.append(_Entry(name, key, target, info.numel * target.itemsize))
    return entries


def _check_dtypes(entries: Sequence[_Entry]) -> None:
    for entry in entries:
        if entry.dtype not in _SAFETENSORS:
            raise CheckpointError(f"{entry.name} is {entry.dtype}, which safetensors does not know; use --format torch")


def _shards(entries: Sequence[_Entry], limit: int) -> list[list[_Entry]]:
    shards: list[list[_Entry]] = [[]]
    size = 0
    for entry in entries:
        if shards[-1] and size + entry.bytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(entry)
        size += entry.bytes
    return shards


def _write_torch(archive: Archive, shard: Sequence[_Entry], path: Path) -> list[str]:
    values = archive.read(entry.key for entry in shard)
    state = {entry.name: _cast(entry, values.pop(entry.key)) for entry in shard}
    # The same tensor under a further name is stored once by torch.save.
    state.update({alias: state[name] for alias, name in archive.manifest.aliases.items() if name in state})
    with path.open("wb") as file:
        save_object(state, file)
        file.flush()
        os.fsync(file.fileno())
    return list(state)


def _write_safetensors(archive: Archive, shard: Sequence[_Entry], path: Path) -> list[str]:
    """Tensor after tensor, so that one is in memory at a time."""
    infos = archive.manifest.tensors
    header: dict[str, Mapping[str, object]] = {"__metadata__": {"format": "pt"}}
    cursor = 0
    for entry in shard:
        header[entry.name] = {
            "dtype": _SAFETENSORS[entry.dtype],
            "shape": list(infos[entry.key].shape),
            "data_offsets": [cursor, cursor + entry.bytes],
        }
        cursor += entry.bytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for entry in shard:
            value = _cast(entry, archive.read([entry.key])[entry.key]).contiguous()
            file.write(value.view(-1).view(torch.uint8).numpy().tobytes())
        file.flush()
        os.fsync(file.fileno())
    return [entry.name for entry in shard]


def _cast(entry: _Entry, value: torch.Tensor) -> torch.Tensor:
    """``value`` in the entry's dtype.

    Raises:
        CheckpointError: finite values would become infinite.
    """
    cast = value.to(entry.dtype)
    narrower = cast.is_floating_point() and torch.finfo(cast.dtype).max < torch.finfo(value.dtype).max
    if narrower and bool((cast.isinf() & value.isfinite()).any()):
        largest = float(value[value.isfinite()].abs().max())
        raise CheckpointError(
            f"{entry.name} has values up to {largest:.6g}, and {entry.dtype} ends at "
            f"{torch.finfo(entry.dtype).max:.6g}; use --dtype bf16 or fp32"
        )
    return cast
