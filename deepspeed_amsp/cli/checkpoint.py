"""``amsp checkpoint show`` and ``amsp export``: what is in a checkpoint, and its weights for other programs."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from deepspeed_amsp.cli.options import fail
from deepspeed_amsp.cli.show import show as show_tables
from deepspeed_amsp.plan.factors import COMPONENTS
from deepspeed_amsp.plan.report import Table

checkpoint = typer.Typer(no_args_is_help=True, help="Look at checkpoints; no GPU is needed.")
_PATH = typer.Argument(help="A checkpoint's folder, or a folder of checkpoints with a file 'latest'.")


class Format(str, Enum):
    """Files to write."""

    safetensors = "safetensors"
    torch = "torch"


class Dtype(str, Enum):
    """Of parameters; buffers stay as they are."""

    bf16 = "bf16"
    fp16 = "fp16"
    fp32 = "fp32"


@checkpoint.callback()
def _checkpoint() -> None:
    """Keeps ``show`` a command of its own."""


@checkpoint.command()
def show(path: Annotated[Path, _PATH]) -> None:
    """Plan, step, tensors and bytes of a checkpoint, and whether its files are undamaged (exit code 1 if not)."""
    from deepspeed_amsp.checkpoint.offline import open_archive
    from deepspeed_amsp.checkpoint.together import CheckpointError

    try:
        archive = open_archive(path)
    except (CheckpointError, OSError) as error:
        fail("checkpoint show", str(error))
    manifest, plan = archive.manifest, archive.manifest.plan
    factors = ", ".join(f"{name} {plan['sharding'][name]}" for name in COMPONENTS)
    parts = ""
    if manifest.parts > 1:
        parts = f" of each of {manifest.parts} model-parallel parts (names begin with mp_rank_00. and so on)"
    lines = [
        f"{archive.folder}: tag {manifest.tag}, step {manifest.global_steps}",
        f"written by {plan['world_size']} ranks {plan['data_parallel']}{parts}: {factors}",
        "with " + ", ".join(f"{name} {version}" for name, version in manifest.versions.items()),
    ]
    if manifest.left_out:
        lines.append(f"{len(manifest.left_out)} frozen parameters were left out on purpose")
    rows = tuple((what, dtype, f"{count}", f"{size:,}") for what, dtype, count, size in archive.kinds())
    files = tuple((name, f"{info.bytes:,}", f"{len(info.blocks)}") for name, info in sorted(manifest.files.items()))
    damage = archive.damage()
    tables = [
        Table("Tensors", ("what", "dtype", "tensors", "bytes"), rows, right=frozenset({2, 3})),
        Table("Files", ("file", "bytes", "blocks"), files, right=frozenset({1, 2})),
    ]
    show_tables(lines, tables)
    typer.echo("\n" + ("\n".join(damage) if damage else "all files have their checksums"))
    if damage:
        raise typer.Exit(1)


def export(
    path: Annotated[Path, _PATH],
    out: Annotated[Path, typer.Argument(help="A new or empty folder.")],
    form: Annotated[Format, typer.Option("--format", help="Files to write.")] = Format.safetensors,
    dtype: Annotated[Dtype, typer.Option(help="Of the parameters, from their fp32 masters.")] = Dtype.bf16,
    shard_gb: Annotated[float, typer.Option(min=0, help="Size of a file, in 10^9 bytes.")] = 5.0,
) -> None:
    """Write the whole weights of a checkpoint for other programs, in files as Hugging Face has them. Needs no GPU."""
    from deepspeed_amsp.checkpoint.export import export as write
    from deepspeed_amsp.checkpoint.offline import open_archive
    from deepspeed_amsp.checkpoint.together import CheckpointError

    try:
        done = write(open_archive(path), out, form.value, dtype.value, int(shard_gb * 1e9))
    except (CheckpointError, OSError) as error:
        fail("export", str(error))
    for file in done.files:
        typer.echo(f"{file}  {file.stat().st_size:,} bytes")
    typer.echo(f"{done.tensors} tensors, {done.bytes:,} bytes")
    if done.left_out:
        typer.echo(f"{len(done.left_out)} frozen parameters are not in the checkpoint: {', '.join(done.left_out[:4])}")
