"""Blocks of tensors in files, each with a checksum that is taken as it is written and compared as it is read.

Files and index are torch.distributed.checkpoint's, whose own reader reads them, too. Done here is what its writer and
reader do not: nothing is read a second time for its checksum, and a block that several pieces need is read once.
"""

from __future__ import annotations

import io
import itertools
import mmap
import os
import pickle
import struct
import threading
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch.distributed.checkpoint import FileSystemWriter, Metadata, ReadItem
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult
from torch.serialization import get_crc32_options, set_crc32_options

from deepspeed_amsp.checkpoint.flat import FlatTensor, read_items
from deepspeed_amsp.checkpoint.folder import Block, FileInfo, check_block

INDEX = ".metadata"
"""torch.distributed.checkpoint's own index."""
ALIGNMENT = 64
"""Bytes; torch.save aligns the elements to them within a block."""
FLUSH_BYTES = 1 << 22
"""After so many, the device begins to write."""


class _Summed(io.RawIOBase):
    """What torch.save writes to: a file, counted and summed block by block."""

    def __init__(self, file: io.FileIO) -> None:
        self._file = file
        self.blocks: list[Block] = []
        self._bytes = self._crc = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        octets = memoryview(data).cast("B")
        self._crc = zlib.crc32(octets, self._crc)
        self._bytes += len(octets)
        left = octets
        while left:  # a file may take less than it is given
            left = left[self._file.write(left) :]
        return len(octets)

    def end_block(self) -> int:
        """Fill up to a whole number of `ALIGNMENT`; returns the bytes of the block without that."""
        size = self._bytes
        self.write(b"\0" * (-size % ALIGNMENT))
        self.blocks.append(Block(self._bytes, self._crc))
        self._bytes = self._crc = 0
        return size


def write_blocks(path: Path, tensors: Mapping[str, FlatTensor]) -> tuple[list[WriteResult], FileInfo]:
    """Write every part of ``tensors`` as a block of the new file ``path``, durably.

    Returns:
        Where each block is, for `write_index`, and the file's checksums.
    """
    results = []
    with path.open("wb", buffering=0) as file, _summed_once(), ThreadPoolExecutor(1) as beside:
        stream, offset, flushed = _Summed(file), 0, 0
        flushes: list[Future[None]] = []
        for key, tensor in tensors.items():
            for part in tensor.parts:
                torch.save(_alone(part.values), cast(IO[bytes], stream))
                place = _StorageInfo(path.name, offset, stream.end_block())
                results.append(WriteResult(MetadataIndex(key, (part.start,)), place.length, place))
                offset += stream.blocks[-1].bytes
                if offset - flushed >= FLUSH_BYTES and all(flush.done() for flush in flushes):
                    # The device writes what is there while we make more of it; the last flush has less to do. At the
                    # interpreter's exit, which a save in the background outlives, no pool takes work any more.
                    with suppress(RuntimeError):
                        flushes.append(beside.submit(os.fsync, file.fileno()))
                    flushed = offset
        for flush in flushes:
            flush.result()
        os.fsync(file.fileno())
    return results, FileInfo(offset, tuple(stream.blocks))


def _alone(values: torch.Tensor) -> torch.Tensor:
    """On the host, in a storage that holds nothing else: torch.save writes whole storages."""
    values = values.detach().cpu()
    return values if values.untyped_storage().nbytes() == values.nbytes else values.clone()


@contextmanager
def _summed_once() -> Iterator[None]:
    """torch.save takes a checksum of every record of its own, slowly; ours covers them.

    The switch is for the whole process, so it is left alone beside a running script.
    """
    before = get_crc32_options()
    set_crc32_options(before and threading.current_thread() is not threading.main_thread())
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
    for name, by_offset in sorted(copies.items()):
        path, blocks = folder / name, files[name].blocks
        at = dict(zip(itertools.accumulate((block.bytes for block in blocks), initial=0), blocks, strict=False))
        with path.open("rb", buffering=0) as file, _mapped(file) as content:
            for offset, items in sorted(by_offset.items()):
                with content[offset : offset + at[offset].bytes] as octets:
                    check_block(path, octets, at[offset])
                    _copy_out(octets, items, items[0][1].dtype)


def _copy_out(octets: memoryview, items: Iterable[tuple[ReadItem, torch.Tensor]], dtype: torch.dtype) -> None:
    """Copy the elements of a block from where it is in memory; torch.load would make a copy of all of it first."""
    with zipfile.ZipFile(_Octets(octets)) as archive:
        (record,) = (info for info in archive.infolist() if info.filename.endswith("/data/0"))
    name, extra = struct.unpack_from("<HH", octets, record.header_offset + 26)
    start = record.header_offset + 30 + name + extra
    values = torch.frombuffer(octets, dtype=dtype, count=record.file_size // dtype.itemsize, offset=start)
    for item, target in items:
        target.copy_(values.narrow(0, item.storage_offsets[0], item.lengths[0]))


def _read_index(folder: Path, info: FileInfo) -> Metadata:
    content = (folder / INDEX).read_bytes()
    check_block(folder / INDEX, content, info.blocks[0])
    metadata = pickle.loads(content)
    assert isinstance(metadata, Metadata)
    return metadata


@contextmanager
def _mapped(file: io.FileIO) -> Iterator[memoryview]:
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapped, memoryview(mapped) as content:
        yield content


class _Octets(io.RawIOBase):
    """Memory as a file, without a copy of it."""

    def __init__(self, octets: memoryview) -> None:
        self._octets, self._at = octets, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + (0, self._at, len(self._octets))[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        into = memoryview(buffer).cast("B")
        found = self._octets[self._at : self._at + len(into)]
        into[: len(found)] = found
        self._at += len(found)
        return len(found)
