"""Blocks of tensors in files, each with a checksum that is taken as it is written and compared as it is read.

Files and index are torch.distributed.checkpoint's, whose own reader reads them, too. Done here is what its writer and
reader do not: nothing is read a second time for its checksum, and a block that several pieces need is read once.
"""

from __future__ import annotations

import io
import itertools
import os
import pickle
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import torch
from torch.distributed.checkpoint import FileSystemWriter, Metadata, ReadItem
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult
from torch.serialization import get_crc32_options, set_crc32_options

from deepspeed_amsp.checkpoint.crc import crc32
from deepspeed_amsp.checkpoint.flat import FlatTensor, read_items
from deepspeed_amsp.checkpoint.folder import Block, FileInfo, check_block, check_summed

INDEX = ".metadata"
"""torch.distributed.checkpoint's own index."""
ALIGNMENT = 64
"""Bytes; torch.save aligns the elements to them within a block."""
FLUSH_BYTES = 1 << 22
"""After so many, the device begins to write."""
PIECE_BYTES = 1 << 18
"""Summed and then written, or read and then summed, while they are in a core's cache."""


class _Summed(io.RawIOBase):
    """What torch.save writes to: a file, counted and summed block by block."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.blocks: list[Block] = []
        self._bytes = self._crc = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        octets = memoryview(data).cast("B")
        for piece in _pieces(octets):
            self._crc = crc32(piece, self._crc)
            self._file.write(piece)
        self._bytes += len(octets)
        return len(octets)

    def end_block(self) -> int:
        """Fill up to a whole number of `ALIGNMENT`; returns the bytes of the block without that."""
        size = self._bytes
        self.write(b"\0" * (-size % ALIGNMENT))
        self.blocks.append(Block(self._bytes, self._crc))
        self._bytes = self._crc = 0
        return size


def _pieces(octets: memoryview) -> Iterator[memoryview]:
    return (octets[at : at + PIECE_BYTES] for at in range(0, len(octets), PIECE_BYTES))


def write_blocks(path: Path, tensors: Mapping[str, FlatTensor]) -> tuple[list[WriteResult], FileInfo]:
    """Write every part of ``tensors`` as a block of the new file ``path``, durably.

    Returns:
        Where each block is, for `write_index`, and the file's checksums.
    """
    results = []
    with path.open("wb") as file, _summed_once(), ThreadPoolExecutor(1) as beside:
        stream, offset, flushed = _Summed(file), 0, 0
        flushes: list[Future[None]] = []
        for key, tensor in tensors.items():
            for part in tensor.parts:
                save_object(_alone(part.values), cast(IO[bytes], stream))
                place = _StorageInfo(path.name, offset, stream.end_block())
                results.append(WriteResult(MetadataIndex(key, (part.start,)), place.length, place))
                offset += stream.blocks[-1].bytes
                if offset - flushed >= FLUSH_BYTES and all(flush.done() for flush in flushes):
                    # The device writes what is there while we make more of it; the last flush has less to do. At the
                    # interpreter's exit, which a save in the background outlives, no pool takes work any more.
                    file.flush()
                    with suppress(RuntimeError):
                        flushes.append(beside.submit(os.fsync, file.fileno()))
                    flushed = offset
        for flush in flushes:
            flush.result()
        file.flush()
        os.fsync(file.fileno())
    return results, FileInfo(offset, tuple(stream.blocks))


def save_object(value: object, file: IO[bytes]) -> None:
    """torch.save, with the reason why a write failed.

    Raises:
        OSError: of the file system, such as no space.
    """
    try:
        torch.save(value, file)
    except RuntimeError as error:
        # After a failed write it still closes its archive, finds bytes missing, and says only that.
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise


def _alone(values: torch.Tensor) -> torch.Tensor:
    """On the host, in a storage of its own with its elements in their order: torch.save writes whole storages."""
    values = values.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return values if values.untyped_storage().nbytes() == values.nbytes else values.clone()


@contextmanager
def _summed_once() -> Iterator[None]:
    """torch.save takes a checksum of every record of its own, slowly; ours covers them.

    The switch is for the whole process, so it is left alone beside a running script.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = get_crc32_options()
    set_crc32_options(False)
    try:
        yield
    finally:
        set_crc32_options(before)


def write_index(folder: Path, metadata: Metadata, results: Iterable[list[WriteResult]]) -> None:
    """Write `INDEX` of what all ranks have written, durably."""
    FileSystemWriter(folder).finish(metadata, list(results))


def read_blocks(folder: Path, files: Mapping[str, FileInfo], wanted: Mapping[str, FlatTensor]) -> None:
    """Fill the parts of ``wanted`` from whatever blocks hold their elements.

    Args:
        files: name -> what the manifest says about the file.

    Raises:
        CheckpointError: what was read is damaged, or something is not stored.
    """
    copies: dict[str, dict[int, list[tuple[ReadItem, torch.Tensor]]]] = {}
    metadata = _read_index(folder, files[INDEX])
    for item, target in read_items(wanted, metadata):
        place: _StorageInfo = metadata.storage_data[item.storage_index]
        copies.setdefault(place.relative_path, {}).setdefault(place.offset, []).append((item, target))
    beside = memoryview(bytearray(PIECE_BYTES))
    for name, by_offset in sorted(copies.items()):
        path, blocks = folder / name, files[name].blocks
        at = dict(zip(itertools.accumulate((block.bytes for block in blocks), initial=0), blocks, strict=False))
        with path.open("rb", buffering=0) as file:
            for offset, items in sorted(by_offset.items()):
                _read_block(file, offset, at[offset], items, beside)


def _read_block(
    file: io.FileIO, offset: int, block: Block, items: Sequence[tuple[ReadItem, torch.Tensor]], beside: memoryview
) -> None:
    """Fill the targets of ``items`` with their elements of a block, piece by piece as it is read and summed.

    Args:
        beside: memory for a piece.

    Raises:
        CheckpointError: the block is damaged; the targets may have any values then.
    """
    try:
        section = cast(IO[bytes], _Section(file, offset, block.bytes))
        reader: Any = torch._C.PyTorchFileReader(section)  # whose stub does not know the next method
        elements = reader.get_record_offset("data/0")
    except RuntimeError:  # what torch.save writes around the elements is damaged, as the checksum will say
        elements = block.bytes
    targets = [_Target.of(item, target, elements) for item, target in items]
    file.seek(offset)
    cursor = crc = 0
    while cursor < block.bytes:
        piece = _room(targets, cursor, beside)[: block.bytes - cursor]
        size = file.readinto(piece)
        if not size:
            break
        crc = crc32(piece[:size], crc)
        if len(targets) > 1:
            for target in targets:
                target.take(cursor, piece[:size])
        cursor += size
    check_summed(Path(file.name), Block(cursor, crc), block)


def _room(targets: Sequence[_Target], at: int, beside: memoryview) -> memoryview:
    """Where to read the next bytes of a block to: where they are wanted; in several places or none: ``beside``."""
    if len(targets) != 1 or at >= targets[0].stop:
        return beside
    start, _, into = targets[0]
    return beside[: start - at] if at < start else into[at - start :][:PIECE_BYTES]


class _Target(NamedTuple):
    """Where the bytes [start, stop) of a block go."""

    start: int
    stop: int
    into: memoryview

    @classmethod
    def of(cls, item: ReadItem, target: torch.Tensor, elements: int) -> _Target:
        """``elements``: where they begin in the block."""
        start = elements + item.storage_offsets[0] * target.itemsize
        return cls(start, start + target.nbytes, target.view(torch.uint8).numpy().data)

    def take(self, at: int, piece: memoryview) -> None:
        """Copy what is wanted of ``piece``, which begins at byte ``at`` of the block."""
        first, last = max(self.start, at), min(self.stop, at + len(piece))
        if first < last:
            self.into[first - self.start : last - self.start] = piece[first - at : last - at]


def _read_index(folder: Path, info: FileInfo) -> Metadata:
    content = (folder / INDEX).read_bytes()
    check_block(folder / INDEX, content, info.blocks[0])
    metadata = pickle.loads(content)
    assert isinstance(metadata, Metadata)
    return metadata


class _Section(io.RawIOBase):
    """Bytes [start, start + size) of a file, as a file of their own."""

    def __init__(self, file: io.FileIO, start: int, size: int) -> None:
        self._file, self._start, self._size, self._at = file, start, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self._size)[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        into = memoryview(buffer).cast("B")[: max(0, self._size - self._at)]
        self._file.seek(self._start + self._at)
        got = self._file.readinto(into) or 0
        self._at += got
        return got
