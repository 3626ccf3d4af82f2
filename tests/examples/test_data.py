"""The demo's data: a fixed split, the same global batches for every world size, a baseline by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from examples.bytes_data import (
    TrainWindows,
    byte_frequency_loss,
    is_validation,
    load_corpus,
    text_files,
    validation_windows,
    windows_at,
)

WINDOW = 8
MakeFolder = Callable[[dict[str, bytes]], Path]


@pytest.fixture
def make_folder(tmp_path: Path) -> MakeFolder:
    """Write files given as {relative name: content}."""

    def make(files: dict[str, bytes]) -> Path:
        for name, content in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        return tmp_path

    return make


def many_files() -> dict[str, bytes]:
    """Two hundred files, each with a line that names it."""
    return {f"part{i % 7}/chapter{i}.txt": f"this is chapter number {i:03d};".encode() for i in range(200)}


def as_bytes(text: torch.Tensor) -> bytes:
    """A uint8 tensor as bytes."""
    return bytes(text.tolist())


def test_split_is_deterministic_disjoint_and_complete(make_folder: MakeFolder) -> None:
    """Each file is on exactly one side, the same one whenever the folder is read."""
    files = many_files()
    folder = make_folder(files)
    corpus, again = load_corpus(folder, 10**6, WINDOW), load_corpus(folder, 10**6, WINDOW)
    assert torch.equal(corpus.train, again.train)
    assert torch.equal(corpus.valid, again.valid)
    train, valid = as_bytes(corpus.train), as_bytes(corpus.valid)
    assert len(train) + len(valid) == sum(map(len, files.values()))
    for name, content in files.items():
        assert (content in valid) == is_validation(name)
        assert (content in train) == (not is_validation(name))


def test_split_does_not_depend_on_where_the_folder_is(make_folder: MakeFolder) -> None:
    """Only the name below the folder counts."""
    files = many_files()
    here = load_corpus(make_folder(files), 10**6, WINDOW)
    moved = make_folder({f"elsewhere/{name}": content for name, content in files.items()}) / "elsewhere"
    there = load_corpus(moved, 10**6, WINDOW)
    assert torch.equal(here.valid, there.valid)


def test_one_file_gives_its_last_part_for_validation(make_folder: MakeFolder) -> None:
    """A folder that holds a single book is split by position."""
    book = bytes(1 + i % 250 for i in range(1000))
    corpus = load_corpus(make_folder({"book.txt": book}), 10**6, WINDOW)
    assert as_bytes(corpus.train) + as_bytes(corpus.valid) == book
    assert len(corpus.valid) == 50


def test_tests_packages_hidden_and_binary_files_are_left_out(make_folder: MakeFolder) -> None:
    """What is read is text that somebody wrote for this folder."""
    files = {"a.txt": b"text " * 200}
    left_out = {"test/b.txt": b"B", "site-packages/c.txt": b"C", ".git/d.txt": b"D", ".e": b"E"}
    folder = make_folder(files | left_out | {"f.bin": b"F\0"})
    corpus = load_corpus(folder, 10**6, WINDOW)
    assert as_bytes(corpus.train) + as_bytes(corpus.valid) == files["a.txt"]
    assert [path.name for path in text_files(folder)] == ["a.txt", "f.bin"]


def test_at_most_max_bytes_are_read(make_folder: MakeFolder) -> None:
    """The limit holds to the byte."""
    corpus = load_corpus(make_folder(many_files()), 2000, WINDOW)
    assert len(corpus.train) + len(corpus.valid) == 2000


def test_bad_folders_are_named(make_folder: MakeFolder) -> None:
    """No folder, and too little text, are errors that say which folder."""
    with pytest.raises(FileNotFoundError, match="nowhere: no such folder"):
        load_corpus(Path("nowhere"), 10**6, WINDOW)
    folder = make_folder({"tiny.txt": b"hello"})
    with pytest.raises(ValueError, match="5 bytes of text, at least 180 are needed"):
        load_corpus(folder, 10**6, WINDOW)


def test_standard_library_is_enough_text() -> None:
    """Every Python has both parts."""
    corpus = load_corpus(None, 2_000_000, 256)
    assert len(corpus.train) > 1_000_000
    assert len(corpus.valid) > 256


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_slices_cover_the_global_batch_once(world: int) -> None:
    """Interleaved, the ranks' slices are the global batch; and that is the same for every world size."""
    text = torch.arange(5000).remainder(256).to(torch.uint8)
    alone = TrainWindows(text, WINDOW, global_batch=12, seed=3, rank=0, world=1)
    ranks = [TrainWindows(text, WINDOW, global_batch=12, seed=3, rank=r, world=world) for r in range(world)]
    for step in (1, 2, 50):
        slices = [rank.rank_offsets(step) for rank in ranks]
        assert all(len(part) == 12 // world for part in slices)
        assert torch.equal(torch.stack(slices, dim=1).flatten(), alone.global_offsets(step))


def test_steps_and_seeds_differ_and_repeat() -> None:
    """A batch depends on the seed and the step, and on nothing else."""
    text = torch.zeros(100_000, dtype=torch.uint8)
    data = [TrainWindows(text, WINDOW, 12, seed, 0, 1) for seed in (0, 0, 1)]
    assert torch.equal(data[0].global_offsets(7), data[1].global_offsets(7))
    assert not torch.equal(data[0].global_offsets(7), data[0].global_offsets(8))
    assert not torch.equal(data[0].global_offsets(7), data[2].global_offsets(7))


def test_micro_batches_are_the_slice_in_order() -> None:
    """Accumulation cuts a rank's slice; windows overlap by the one byte that is target and input."""
    text = torch.arange(4000).remainder(256).to(torch.uint8)
    data = TrainWindows(text, WINDOW, global_batch=12, seed=0, rank=1, world=2)
    parts = data.micro_batches(5, 3)
    assert [tuple(part.shape) for part in parts] == [(2, WINDOW + 1)] * 3
    assert torch.equal(torch.cat(parts), windows_at(text, data.rank_offsets(5), WINDOW))


def test_a_rank_outside_the_world_is_refused() -> None:
    """Its slice would be empty."""
    with pytest.raises(ValueError, match="rank 2 is not in a world of 2"):
        TrainWindows(torch.zeros(100), WINDOW, 12, 0, rank=2, world=2)


def test_validation_windows_reach_both_ends() -> None:
    """The first window starts the text, the last one ends it."""
    text = torch.arange(200, dtype=torch.uint8)
    windows = validation_windows(text, WINDOW, 4)
    assert windows[0].tolist() == list(range(9))
    assert windows[-1].tolist() == list(range(191, 200))


def test_byte_frequency_loss_by_hand() -> None:
    """Text "aab", one added to each of 256 counts: a has 3 of 259, b 2 of 259, any other byte 1 of 259."""
    train = torch.tensor(list(b"aab"), dtype=torch.uint8)
    targets = torch.tensor([list(b"ab"), list(b"bz")])
    expected = -(math.log(3 / 259) + 2 * math.log(2 / 259) + math.log(1 / 259)) / 4
    assert byte_frequency_loss(train, targets) == pytest.approx(expected, rel=1e-12)


def test_byte_frequency_loss_of_nothing_is_an_error() -> None:
    """An average over no bytes is not a number."""
    with pytest.raises(ValueError, match="no bytes"):
        byte_frequency_loss(torch.zeros(3, dtype=torch.uint8), torch.zeros(0, dtype=torch.long))
