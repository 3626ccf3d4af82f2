"""Folders of checkpoints that are whole or recognisably not, whenever the writers are killed.

A checkpoint is written into ``TAG.incomplete``, made durable, and renamed to ``TAG``; ``latest`` follows last. One
that takes the place of another of the same tag goes through ``TAG.replaced``: in the moment when there is no ``TAG``,
the old one is found there.
"""

from __future__ import annotations

import errno
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from deepspeed_amsp.checkpoint.claim import LOCK, Claim, in_use, remove_abandoned, take
from deepspeed_amsp.checkpoint.crc import crc32
from deepspeed_amsp.checkpoint.together import CheckpointError


class Block(NamedTuple):
    """Consecutive bytes of a file, and their CRC-32."""

    bytes: int
    crc32: int


class FileInfo(NamedTuple):
    """A file of a checkpoint: its size, and the blocks that it is made of, from its first byte to its last."""

    bytes: int
    blocks: tuple[Block, ...]


INCOMPLETE, REPLACED = ".incomplete", ".replaced"
LATEST, SCRIPT = "latest", "zero_to_fp32.py"
MANIFEST = "amsp_checkpoint.json"
_CHUNK = 1 << 23
_NO_FOLDER_SYNC = {errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}
"""What a file system answers that makes names durable in its own time, as several over a network do."""


def begin(save_dir: Path, tag: str) -> Claim:
    """A new empty folder to write ``tag`` into; what an interrupted save has left of it is removed. On one rank.

    Raises:
        OSError: the folder cannot be made.
        CheckpointError: another save is writing it; or the tag is one that names incomplete folders, or no folder in
            ``save_dir``, or a file, or a folder that holds folders: checkpoints whose tags begin with this one, or
            what is none.
    """
    _check_new_tag(tag)
    claim = take(save_dir / (tag + INCOMPLETE))
    try:
        if in_use(save_dir / tag):
            raise CheckpointError(f"another save is completing {save_dir / tag}: wait for it, or choose another tag")
        settle(save_dir, tag)
        _check_replaceable(save_dir / tag)
    except BaseException:
        claim.discard()
        raise
    return claim


def sweep(folder: Path, claim: Claim) -> list[str]:
    """Remove what interrupted saves have left in ``folder``, and nothing that a live one writes; returns its names."""
    old = [path for path in folder.glob("*" + REPLACED) if (path.with_suffix("") / MANIFEST).is_file()]
    for path in old:
        shutil.rmtree(path, ignore_errors=True)
    dead = [path for path in folder.glob("*" + INCOMPLETE) if path != claim.folder and remove_abandoned(path)]
    return sorted(path.name for path in old + dead)


def settle(save_dir: Path, tag: str) -> None:
    """Finish or undo an exchange that was interrupted: ``TAG`` exists afterwards if it did before."""
    folder, replaced = save_dir / tag, save_dir / (tag + REPLACED)
    if not replaced.exists():
        return
    if folder.exists():
        shutil.rmtree(replaced, ignore_errors=True)  # who has just taken its place may be removing it, too
    else:
        replaced.rename(folder)


def commit(claim: Claim, save_dir: Path, tag: str, latest: bool) -> None:
    """Everything of ``tag`` is written: make it durable under its own name. On one rank.

    What may lack space is written first, so that an error leaves what was there; then there are only renames.

    Args:
        latest: whether ``latest`` names it from now on.
    """
    folder, replaced = save_dir / tag, save_dir / (tag + REPLACED)
    if latest:
        _write(claim.folder / LATEST, tag.encode())
    _sync(claim.folder)
    if folder.exists():
        folder.rename(replaced)
    try:
        claim.folder.rename(folder)
    except OSError:
        settle(save_dir, tag)
        raise
    _sync(folder.parent)
    if latest:
        (folder / LATEST).rename(save_dir / LATEST)
        _sync(save_dir)
    # The checkpoint is complete; `settle` and `sweep` remove what is left. The lock goes last: until then, another
    # save of the tag does not begin, and is not disturbed.
    shutil.rmtree(replaced, ignore_errors=True)
    with suppress(OSError):
        (folder / LOCK).unlink()
    claim.release()


def latest(load_dir: Path) -> str | None:
    """The tag that ``latest`` names, if there is one."""
    path = load_dir / LATEST
    return path.read_text(encoding="utf-8").strip() if path.is_file() else None


def find(load_dir: Path, tag: str) -> Path:
    """The folder of a complete checkpoint.

    Raises:
        FileNotFoundError: there is none of this tag.
        CheckpointError: there is only what an interrupted save has left.
    """
    _check_tag(tag)
    for name in (tag, tag + REPLACED, tag):  # a save may take its place between two looks
        if (load_dir / name).is_dir():
            return load_dir / name
    if (load_dir / (tag + INCOMPLETE)).is_dir():
        raise CheckpointError(
            f"{load_dir / (tag + INCOMPLETE)} was left by a save that was interrupted, and there is no complete "
            f"checkpoint {tag}; load another tag, or none to load the one that {load_dir / LATEST} names"
        )
    raise FileNotFoundError(f"no such checkpoint: {(load_dir / tag).absolute()}")


def write_whole(path: Path, content: bytes) -> None:
    """Write a small file so that who sees it sees all of it."""
    _beside(path).write_bytes(content)
    _beside(path).rename(path)


def write_durably(path: Path, content: bytes) -> None:
    """Write a small file so that it has its old contents or the new ones, whatever happens."""
    _write(_beside(path), content)
    _beside(path).rename(path)
    _sync(path.parent)


def _beside(path: Path) -> Path:
    return path.with_name(path.name + INCOMPLETE)


def _write(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def summed(path: Path) -> FileInfo:
    """A file that is one block."""
    size, crc = 0, 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            size += len(chunk)
            crc = crc32(chunk, crc)
    return FileInfo(size, (Block(size, crc),))


def check_block(path: Path, content: bytes, block: Block) -> None:
    """Raises CheckpointError: ``content``, which was read from ``path``, is not the ``block`` that was written."""
    check_summed(path, Block(len(content), crc32(content)), block)


def check_summed(path: Path, found: Block, block: Block) -> None:
    """Raises CheckpointError: what was ``found`` in ``path`` is not the ``block`` that was written."""
    if found.bytes != block.bytes:
        raise CheckpointError(f"{path} was cut short: {found.bytes} bytes instead of {block.bytes}")
    if found.crc32 != block.crc32:
        raise CheckpointError(f"{path} is damaged: a checksum is {found.crc32:08x} instead of {block.crc32:08x}")


def check_size(path: Path, info: FileInfo) -> None:
    """Raises CheckpointError: the file is missing or has another size, which is seen without reading it."""
    if not path.is_file():
        raise CheckpointError(f"{path} is missing")
    found = path.stat().st_size
    if found != info.bytes:
        raise CheckpointError(f"{path} has {found} bytes instead of {info.bytes}: it was cut short or overwritten")


def check_file(path: Path, info: FileInfo) -> None:
    """Read a file from end to end.

    Raises:
        CheckpointError: it is missing, was cut short, or has other contents.
    """
    check_size(path, info)
    with path.open("rb") as file:
        for block in info.blocks:
            check_block(path, file.read(block.bytes), block)


def _check_new_tag(tag: str) -> None:
    """Raises CheckpointError: the tag names no folder of its own in that of the checkpoints."""
    _check_tag(tag)
    parts = tag.split("/")
    if {"", ".", ".."} & set(parts) or tag != tag.strip() or parts[0] in (LATEST, SCRIPT):
        raise CheckpointError(
            f"{tag!r} is no tag: it must name a folder in that of the checkpoints, other than {LATEST} and {SCRIPT}, "
            f"without spaces at its ends"
        )


def _check_replaceable(folder: Path) -> None:
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise CheckpointError(f"{folder} is no folder, and a save of this tag would take its place; choose another tag")
    inside = sorted(path.name for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
    if inside:
        raise CheckpointError(
            f"{folder} holds the folder {inside[0]}, which a save of this tag would remove; choose another tag"
        )


def _check_tag(tag: str) -> None:
    for ending, what in ((INCOMPLETE, "of an interrupted save"), (REPLACED, "that another is taking the place of")):
        if any(part.endswith(ending) for part in tag.split("/")):
            raise CheckpointError(f"the tag {tag!r} names the folder {what}; {ending} is no ending for a tag")


def _sync(folder: Path) -> None:
    """Make the names in a folder durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:
            raise
    finally:
        os.close(handle)
