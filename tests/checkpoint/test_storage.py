"""Blocks in files: whatever the tensors are like, whatever the device does to them."""

from __future__ import annotations

import resource
import runpy
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO
from unittest import mock

import pytest
import torch
from torch.serialization import get_crc32_options

from deepspeed_amsp.checkpoint import crc
from deepspeed_amsp.checkpoint.export import _cast, _Entry
from deepspeed_amsp.checkpoint.flat import FlatTensor, Part, index_of, write_items
from deepspeed_amsp.checkpoint.folder import summed
from deepspeed_amsp.checkpoint.storage import INDEX, read_blocks, save_object, write_blocks, write_index
from deepspeed_amsp.checkpoint.together import CheckpointError


def flat(values: torch.Tensor) -> FlatTensor:
    return FlatTensor(values.numel(), values.dtype, (Part(0, values),))


def reader(folder: Path, tensors: Mapping[str, torch.Tensor]) -> Callable[[], dict[str, torch.Tensor]]:
    """Write ``tensors``; returns what reads them."""
    wanted = {key: flat(values) for key, values in tensors.items()}
    results, info = write_blocks(folder / "file", wanted)
    write_index(folder, index_of([write_items(wanted)]), [results])
    files = {"file": info, INDEX: summed(folder / INDEX)}

    def read() -> dict[str, torch.Tensor]:
        found = {key: torch.empty(values.shape, dtype=values.dtype) for key, values in tensors.items()}
        read_blocks(folder, files, {key: flat(values) for key, values in found.items()})
        return found

    return read


def test_elements_are_stored_in_their_order(tmp_path: Path) -> None:
    """Views that torch.save would store as what they are views of: repeated, strided, conjugated, negated."""
    complex_values = torch.randn(6, dtype=torch.complex64)
    tensors = {
        "repeated": torch.arange(5.0).as_strided((5,), (0,)),
        "expanded": torch.ones(1).expand(5),
        "strided": torch.arange(12)[::3],
        "middle": torch.arange(12.0)[3:7],
        "conjugated": complex_values.conj(),
        "negated": complex_values.conj().imag,
        "bool": torch.tensor([True, False, True]),
        "bf16": torch.randn(7).bfloat16(),
    }
    for key, found in reader(tmp_path, tensors)().items():
        assert found.tolist() == tensors[key].tolist(), key


def test_every_bit_that_is_read_is_compared(tmp_path: Path) -> None:
    """Also in what torch.save writes around the elements, which is parsed before the checksum is known."""
    read = reader(tmp_path, {"a": torch.arange(40.0), "b": torch.arange(7).bfloat16()})
    content = (tmp_path / "file").read_bytes()
    for at in range(0, len(content), 11):
        (tmp_path / "file").write_bytes(content[:at] + bytes([content[at] ^ 1 << at % 8]) + content[at + 1 :])
        with pytest.raises(CheckpointError, match="damaged: a checksum"):
            read()


@contextmanager
def files_up_to(limit: int) -> Iterator[None]:
    """A device that takes ``limit`` bytes of a file, and answers as a full one does, in the middle of a write."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_device_that_is_full_in_the_middle(tmp_path: Path) -> None:
    """The reason is told, and not what torch.save makes of it ("unexpected pos 704 vs 598")."""
    values = torch.zeros(1 << 20)

    def save(file: IO[bytes]) -> None:
        save_object({"state": values}, file)

    with files_up_to(1 << 20):
        with pytest.raises(OSError, match="File too large"):
            write_blocks(tmp_path / "blocks", {"a": flat(values)})
        with pytest.raises(OSError, match="File too large"), (tmp_path / "object").open("wb") as file:
            save(file)
    assert get_crc32_options()


def test_checksums_are_the_same_without_isal() -> None:
    with mock.patch.dict(sys.modules, {"isal": None, "isal.isal_zlib": None}):
        assert runpy.run_path(crc.__file__)["crc32"] is zlib.crc32
    octets = torch.randint(256, (100_003,), dtype=torch.uint8).numpy().data
    assert crc.crc32(octets[77:], crc.crc32(octets[:77])) == zlib.crc32(octets) == crc.crc32(octets)


@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float32, torch.bfloat16], ids=str)
def test_an_export_tells_overflow_from_infinity(stored: torch.dtype) -> None:
    """What is inf or nan in the weights stays it; what would become inf is an error. float8 fits into all."""
    entry = _Entry("a", "module/a", torch.float16, 2)
    values = torch.tensor([1.5, float("nan"), *([float("inf")] if stored != torch.float8_e4m3fn else [])])
    assert _cast(entry, values.to(stored)).nan_to_num(nan=7).tolist() == values.half().nan_to_num(nan=7).tolist()
    if stored.itemsize > 1:
        with pytest.raises(CheckpointError, match=r"has values up to 69632, and torch\.float16 ends at 65504"):
            _cast(entry, torch.tensor([1.0, 69632.0, float("inf")]).to(stored))
