"""Text as bytes: which files, which of them are for validation, and which windows a rank reads at a step.

Everything is a pure function of the files, the seed and the step, so that every world size trains on the
same global batches, and a run can be repeated.
"""

from __future__ import annotations

import hashlib
import math
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

VOCAB = 256
SKIPPED_FOLDERS = frozenset(
    {"__pycache__", "dist-packages", "idle_test", "lib2to3", "node_modules", "site-packages", "test", "tests"}
)
VALIDATION_SHARE = 20  # one file in twenty
_SNIFFED = 4096  # bytes looked at to tell text from binary


@dataclass(frozen=True)
class Corpus:
    """The bytes of the training files and of the validation files, and where they came from."""

    train: Tensor
    valid: Tensor
    source: str


def standard_library() -> Path:
    """The folder of Python's own source files: real text that every machine has."""
    return Path(sysconfig.get_paths()["stdlib"])


def text_files(root: Path, suffix: str = "") -> Iterator[Path]:
    """Files below root in a fixed order, without hidden files, caches, tests and installed packages."""
    for folder, children, names in os.walk(root):
        # Assigning to the slice tells os.walk which folders to enter, and in which order.
        children[:] = sorted(c for c in children if c not in SKIPPED_FOLDERS and not c.startswith("."))
        for name in sorted(names):
            if name.endswith(suffix) and not name.startswith("."):
                yield Path(folder, name)


def is_validation(relative_name: str) -> bool:
    """Whether a file belongs to the validation text: decided by its name alone, on every machine alike."""
    digest = hashlib.sha256(relative_name.encode("utf-8", "surrogateescape")).digest()
    return int.from_bytes(digest[:8], "big") % VALIDATION_SHARE == 0


def load_corpus(root: Path | None, max_bytes: int, window: int) -> Corpus:
    """Read a folder of text (None: the standard library's *.py), at most max_bytes in all."""
    folder = standard_library() if root is None else root
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such folder of text")
    train, valid = _read(folder, ".py" if root is None else "", max_bytes)
    if min(len(train), len(valid)) <= window:
        # Too few files for a split by name (a folder with one book): the last part is for validation.
        text = train + valid
        cut = len(text) - len(text) // VALIDATION_SHARE
        train, valid = text[:cut], text[cut:]
    if min(len(train), len(valid)) <= window:
        needed = VALIDATION_SHARE * (window + 1)
        raise ValueError(f"{folder}: {len(train) + len(valid)} bytes of text, at least {needed} are needed")
    return Corpus(_as_tensor(train), _as_tensor(valid), str(folder))


def _read(folder: Path, suffix: str, max_bytes: int) -> tuple[bytearray, bytearray]:
    """The training and the validation bytes of a folder, each file whole except the last one."""
    train, valid = bytearray(), bytearray()
    for path in text_files(folder, suffix):
        room = max_bytes - len(train) - len(valid)
        if room <= 0:
            break
        content = path.read_bytes()[:room]
        if b"\0" in content[:_SNIFFED]:
            continue  # a binary file
        (valid if is_validation(path.relative_to(folder).as_posix()) else train).extend(content)
    return train, valid


def _as_tensor(text: bytearray) -> Tensor:
    """A uint8 tensor over the same memory."""
    return torch.frombuffer(text, dtype=torch.uint8)


def windows_at(text: Tensor, offsets: Tensor, window: int) -> Tensor:
    """The windows of window + 1 bytes (inputs and the byte after each) that start at the offsets."""
    return text[offsets[:, None] + torch.arange(window + 1)].long()


@dataclass(frozen=True)
class TrainWindows:
    """The training windows of one rank: slices of global batches that do not depend on the world size."""

    text: Tensor
    window: int
    global_batch: int
    seed: int
    rank: int
    world: int

    def __post_init__(self) -> None:
        """A rank outside the world would read nothing, silently."""
        if not 0 <= self.rank < self.world:
            raise ValueError(f"rank {self.rank} is not in a world of {self.world}")

    def global_offsets(self, step: int) -> Tensor:
        """Where the windows of a step's global batch start, the same on every rank."""
        # The multiplier keeps (seed, step) pairs of practical size apart.
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        return torch.randint(len(self.text) - self.window, (self.global_batch,), generator=generator)

    def rank_offsets(self, step: int) -> Tensor:
        """This rank's share of them."""
        return self.global_offsets(step)[self.rank :: self.world]

    def micro_batches(self, step: int, count: int) -> tuple[Tensor, ...]:
        """This rank's windows of a step, in `count` micro-batches of equal size."""
        return windows_at(self.text, self.rank_offsets(step), self.window).chunk(count)


def validation_windows(text: Tensor, window: int, count: int) -> Tensor:
    """`count` windows spread evenly over the validation text."""
    last = len(text) - window - 1
    return windows_at(text, torch.linspace(0, last, count, dtype=torch.float64).long(), window)


def byte_frequency_loss(train: Tensor, targets: Tensor) -> float:
    """Nats per byte of a model that knows only how often each byte occurs in the training text.

    One is added to every count, so that a byte never seen in training has a finite loss.
    """
    counts = torch.bincount(train.flatten().long(), minlength=VOCAB).double() + 1
    log_frequencies = (counts / counts.sum()).log()
    loss = -log_frequencies[targets.flatten().long()].mean().item()
    if not math.isfinite(loss):
        raise ValueError("no bytes to score")
    return loss
