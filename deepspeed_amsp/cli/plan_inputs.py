"""What ``amsp plan`` reads besides its options: a ds_config and a hostfile."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deepspeed_amsp.config import AmspBlock, ConfigError, load_config_file, read_block
from deepspeed_amsp.config_preflight import lookup
from deepspeed_amsp.config_zero import ZeroSettings, parsed_zero, read_zero_settings
from deepspeed_amsp.plan.resolve import Overlap
from deepspeed_amsp.plan.solver import Modes
from deepspeed_amsp.topology import counted

OPTIMIZER_NAMES = {
    "adam": "adamw", "adamw": "adamw", "fusedadam": "adamw", "lion": "lion", "fusedlion": "lion",
    "adafactor": "adafactor", "muon": "muon", "sgd": "sgd", "adam8bit": "adam8bit", "adamw8bit": "adam8bit",
}  # fmt: skip
"""DeepSpeed's types, in lower case -> ours."""

HALVES = ("bf16", "bfloat16", "fp16")
"""Sections one of which makes working copies 16 bits wide; DeepSpeed trains in fp32 without."""

PUBLISHED = ("allgather_bucket_size", "stage3_allgather_bucket_size")

DTYPES = {"fp32": "fp32", "bf16": "bf16", "fp16": "fp16"}


STAYING = ("optimizer", "grad_dtype", "parameter_bytes", "gradient_clipping")
"""Arguments that a ds_config decides and a plan does not: who writes into one plans with them."""


class InputError(ValueError):
    """A file that cannot be used; one line that names it."""


@dataclass(frozen=True)
class FromConfig:
    """What a ds_config says: arguments of `plan`, modes, and the block itself.

    values: only what it does say. sequences: of a step on all GPUs, accumulation: M, if it says so. zero: what the
    engine takes from zero_optimization where the block is silent.
    """

    values: dict[str, Any] = field(default_factory=dict)
    modes: Modes = field(default_factory=Modes)
    block: AmspBlock | None = None
    sequences: int | None = None
    accumulation: int | None = None
    zero: ZeroSettings | None = None


def read_existing(path: Path, exact: bool = False) -> dict[str, Any]:
    """A ds_config from a file. ``exact``: numbers as they are written, of which DeepSpeed's reader makes 1 of 1.0.

    Raises:
        InputError: it cannot be read, or is no JSON object.
        ConfigError: a key stands in it twice.
    """
    try:
        config = load_config_file(path)
    except FileNotFoundError as error:
        raise InputError(str(error)) from error
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read: {error}") from error
    except ConfigError:
        raise
    except ValueError as error:
        raise InputError(f"{path}: is no JSON: {' '.join(str(error).split())}") from error
    if exact:
        with suppress(json.JSONDecodeError):  # with comments, which DeepSpeed allows, it stays as it was read
            return dict(json.loads(path.read_text(encoding="utf-8-sig")))
    return config


def from_config(path: Path) -> FromConfig:
    """What matters to a plan in a file. Raises as `read_existing` and `understood`."""
    return understood(read_existing(path), path)


def understood(config: dict[str, Any], path: Path) -> FromConfig:
    """What matters to a plan in a ds_config. ``path``: for errors.

    Raises:
        InputError: its optimizer is not known, or a size in zero_optimization is none.
        ConfigError: its amsp block is wrong.
    """
    block = read_block(config)
    try:
        zero = read_zero_settings(config, parsed_zero(config))
    except ValueError as error:
        raise InputError(f"{path}: {error}") from error
    values: dict[str, Any] = {}
    micro_batch = _count(config.get("train_micro_batch_size_per_gpu"))
    if micro_batch is not None:
        values["micro_batch"] = micro_batch
    kind = lookup(config, "optimizer.type")
    if isinstance(kind, str) and kind != "auto":
        if kind.lower() not in OPTIMIZER_NAMES:
            raise InputError(f"{path}: optimizer {kind!r} is not known to the planner; say --optimizer")
        values["optimizer"] = OPTIMIZER_NAMES[kind.lower()]
    dtype = lookup(config, "data_types.grad_accum_dtype")
    if dtype in DTYPES:
        values["grad_dtype"] = DTYPES[dtype]
    if not any(_enabled(lookup(config, f"{name}.enabled")) for name in HALVES):
        values["parameter_bytes"] = 4
        values.setdefault("grad_dtype", "fp32")
    clip = config.get("gradient_clipping")
    if isinstance(clip, (int, float)):
        values["gradient_clipping"] = clip > 0
    if block is not None:
        values |= {"profile": block.profile} if block.profile else {}
        values |= {"gpu_memory": block.memory_limit_gb} if block.memory_limit_gb else {}
        gpus = block.topology.gpus_per_node
        values |= {"gpus_per_node": gpus} if gpus else {}
    return FromConfig(
        values,
        _modes(block, config, zero, values.get("parameter_bytes", 2)),
        block,
        _count(config.get("train_batch_size")),
        _count(config.get("gradient_accumulation_steps")),
        zero,
    )


def uncounted(read: FromConfig) -> Iterator[str]:
    """What the engine takes from a ds_config and no plan counts, in a line each."""
    if read.zero is not None and read.zero.persistence_numel:
        yield (
            f"zero_optimization.stage3_param_persistence_threshold: units of up to {read.zero.persistence_numel:,} "
            f"elements stay gathered between steps; memory and time are counted without"
        )


def _count(value: Any) -> int | None:
    """A whole number of at least 1; "auto" and what is absent say nothing."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _enabled(value: Any) -> bool:
    """ "auto" is somebody's who chooses a 16-bit type, or the user would not shard."""
    return value is True or str(value).lower() in ("true", "1", "auto")


def _modes(block: AmspBlock | None, config: dict[str, Any], zero: ZeroSettings, itemsize: int) -> Modes:
    """Buffers and overlap as the engine has them from this config; ways to reduce and publish are the planner's."""
    sizes: dict[str, Any] = {}
    if block is not None and block.bucket_bytes is not None:
        sizes["bucket_bytes"] = block.bucket_bytes
    elif any(_count(lookup(config, f"zero_optimization.{key}")) for key in ("reduce_bucket_size", *PUBLISHED)):
        sizes["bucket_bytes"] = itemsize * zero.bucket_numel
    ahead, kept = (block or Modes()).prefetch_bytes, zero.kept_bytes(itemsize)
    sizes["prefetch_bytes"] = zero.prefetch_bytes(ahead, itemsize)
    sizes["keep_after_forward"] = (block or Modes()).keep_after_forward if kept is None else kept
    named = block.overlap.model_dump(exclude_unset=True) if block is not None else {}
    sizes["overlap"] = Overlap(**(named | dict.fromkeys(zero.overlap_off, False)))
    return Modes(**sizes)


def read_hostfile(path: Path) -> tuple[int, int]:
    """(nodes, GPUs of each) of a DeepSpeed hostfile: lines of ``host slots=8``, # for comments.

    Raises:
        InputError: it cannot be read, names the line that is wrong, or hosts have different numbers of slots.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"hostfile {path}: cannot be read: {error}") from error
    slots: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        host, *rest = words
        count = rest[0].removeprefix("slots=") if len(rest) == 1 and rest[0].startswith("slots=") else ""
        if not count.isdecimal() or int(count) < 1:
            raise InputError(f"hostfile {path}, line {number}: {line.strip()!r} is not of the form 'host slots=8'")
        if host in slots:
            raise InputError(f"hostfile {path}, line {number}: {host} stands there twice")
        slots[host] = int(count)
    if not slots:
        raise InputError(f"hostfile {path}: names no host")
    if len(set(slots.values())) > 1:
        common, total = math.gcd(*slots.values()), sum(slots.values())
        raise InputError(
            f"hostfile {path}: hosts have different numbers of slots ({counted([*slots.items()])}). Plan for nodes "
            f"that they can be cut into: --nodes {total // common} --gpus-per-node {common} instead of the hostfile, "
            f'and "topology": {{"gpus_per_node": {common}}} in the block'
        )
    return len(slots), next(iter(slots.values()))
