"""What DeepSpeed's `zero_to_fp32.py` is asked, for our checkpoints and, by DeepSpeed's own functions, for its."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from pathlib import Path

import torch

from deepspeed_amsp.checkpoint import folder as folders
from deepspeed_amsp.checkpoint.export import export
from deepspeed_amsp.checkpoint.manifest import MANIFEST
from deepspeed_amsp.checkpoint.offline import Archive, open_archive
from deepspeed_amsp.checkpoint.together import CheckpointError

SCRIPT = '''#!/usr/bin/env python
"""Whole fp32 weights of a checkpoint: python zero_to_fp32.py CHECKPOINTS OUT [--tag TAG] [--safe_serialization]"""

from deepspeed_amsp.checkpoint.zero_to_fp32 import (  # noqa: F401
    get_fp32_state_dict_from_zero_checkpoint,
    main,
)

if __name__ == "__main__":
    main()
'''
"""Written beside the checkpoints."""
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str, tag: str | None = None, exclude_frozen_parameters: bool = False
) -> Mapping[str, torch.Tensor]:
    """As DeepSpeed's function of this name: parameters and buffers by name, whole, on the CPU, floats in fp32.

    Raises:
        CheckpointError: there is no such checkpoint, or it is damaged.
    """
    archive = _archive(Path(checkpoint_dir), tag)
    if archive is None:
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint as theirs

        found: Mapping[str, torch.Tensor] = theirs(checkpoint_dir, tag, exclude_frozen_parameters)
        return found
    keys = {name: key for name in archive.manifest.names() if (key := archive.manifest.source(name))}
    if exclude_frozen_parameters:
        keys = {name: key for name, key in keys.items() if name not in archive.manifest.frozen()}
    values = archive.read(keys.values())
    state = {
        name: values[key].float() if values[key].is_floating_point() else values[key] for name, key in keys.items()
    }
    return {**state, **{alias: state[name] for alias, name in archive.manifest.aliases.items() if name in state}}


def main(arguments: list[str] | None = None) -> None:
    """The command line of DeepSpeed's script."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint_dir", type=Path, help="the folder of checkpoints, with a file 'latest'")
    parser.add_argument("output_dir", type=Path, help="a new or empty folder")
    parser.add_argument("--max_shard_size", default="5GB", help="of a file, such as 500MB")
    parser.add_argument("--safe_serialization", action="store_true", help="safetensors instead of torch's format")
    parser.add_argument("-t", "--tag", help="of the checkpoint, if not the one that 'latest' names")
    parser.add_argument("--exclude_frozen_parameters", action="store_true")
    parser.add_argument("-d", "--debug", action="store_true", help="taken for compatibility")
    args = parser.parse_args(arguments)
    try:
        archive = _archive(args.checkpoint_dir, args.tag)
        if archive is not None:
            form = "safetensors" if args.safe_serialization else "torch"
            size = _bytes(args.max_shard_size)
            done = export(archive, args.output_dir, form, "fp32", size, args.exclude_frozen_parameters)
            print(f"{done.tensors} tensors, {done.bytes:,} bytes in {', '.join(path.name for path in done.files)}")
            return
    except (CheckpointError, OSError, ValueError) as error:
        parser.exit(2, f"{error}\n")
    from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict

    convert_zero_checkpoint_to_fp32_state_dict(
        str(args.checkpoint_dir),
        str(args.output_dir),
        max_shard_size=args.max_shard_size,
        safe_serialization=args.safe_serialization,
        tag=args.tag,
        exclude_frozen_parameters=args.exclude_frozen_parameters,
    )


def _archive(path: Path, tag: str | None) -> Archive | None:
    """The checkpoint; None if it is DeepSpeed's."""
    found = tag or (folders.latest(path) if path.is_dir() else None)
    theirs = found is not None and any((path / found).glob("*_optim_states.pt"))
    if theirs and not (path / str(found) / MANIFEST).is_file():
        return None
    return open_archive(path if tag is None else path / tag)


def _bytes(text: str) -> int:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    if match is None or match[2].upper() not in _UNITS:
        raise ValueError(f"--max_shard_size must be a number with a unit such as 5GB, not {text!r}")
    return int(float(match[1]) * _UNITS[match[2].upper()])
