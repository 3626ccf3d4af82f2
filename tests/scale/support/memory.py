"""Bytes of all live storages by category, and their peaks.

A category is what a storage is for. Most follow from where it was allocated (the room of the package, or the
phase of the step), and a buffer that is handed on changes it: `Memory.move`.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections import Counter
from collections.abc import Callable
from enum import Enum
from types import CodeType, FrameType

import torch
from torch.utils._pytree import tree_leaves

import deepspeed_amsp


class Category(str, Enum):
    """What a storage holds."""

    PARAMETERS = "P"  # the working copy at rest
    GRADIENTS = "G"  # staged, kept or owned gradients
    MASTERS = "masters"
    MOMENTS = "moments"
    GATHER = "gather buffers"
    REDUCE = "reduce buffers"
    PUBLISH = "publish buffers"
    ACTIVATIONS = "activations"  # saved or passing, in forward and recomputation
    BACKWARD = "backward"  # gradients of activations, and of weights until a hook takes them over
    STEP = "step"  # what the norm and the optimizer need for a moment
    OTHER = "other"


_ROOMS = {
    "partition/params": Category.GATHER,
    "schedule/gather": Category.GATHER,
    "partition/grads": Category.REDUCE,  # what stays with a bucket is moved to GRADIENTS
    "schedule/reduce": Category.REDUCE,
    "comm": Category.REDUCE,
    "schedule/publish": Category.PUBLISH,
    "partition/working": Category.PUBLISH,
    "partition/optim_states": Category.STEP,
    "update": Category.STEP,
}
_PACKAGE = os.path.dirname(os.path.abspath(deepspeed_amsp.__file__)) + os.sep
_RECOMPUTATION = "/torch/utils/checkpoint.py"


class _Storage:
    """A live storage; ``watch`` tells when it dies."""

    __slots__ = ("bytes", "category", "watch")

    def __init__(self, size: int, category: Category, watch: weakref.ref[torch.UntypedStorage]) -> None:
        self.bytes, self.category, self.watch = size, category, watch


class Memory:
    """Told of every tensor that an operation returns, and of every storage that is resized.

    Args:
        on_free: called with the address of a storage that dies or is emptied.
    """

    def __init__(self, on_free: Callable[[int], None]) -> None:
        self._on_free = on_free
        self._storages: dict[int, _Storage] = {}
        self._rooms: dict[CodeType, Category | str | None] = {}
        self.now: Counter[Category] = Counter()
        self.phase = "setup"
        self.start_peaks()

    def start_peaks(self) -> None:
        """Forget earlier peaks."""
        self.peaks: Counter[Category] = Counter(self.now)
        self.at_peak: Counter[Category] = Counter(self.now)
        self.peak = sum(self.now.values())
        self.peak_phase = self.phase

    def see(self, outputs: object) -> None:
        """Account for the storages of an operation's outputs."""
        for tensor in tree_leaves(outputs):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._storages:
                    self._add(storage)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """A unit's full buffer is filled or emptied."""
        record, size = self._storages.get(storage._cdata), storage.nbytes()
        if record is None or record.bytes == size:
            return
        if not size:
            self._on_free(storage._cdata)
        change, record.bytes = size - record.bytes, size
        self._count(record.category, change)

    def move(self, tensor: torch.Tensor, category: Category) -> None:
        """From now on the storage of ``tensor`` counts as ``category``."""
        record = self._storages[tensor.untyped_storage()._cdata]
        if record.category is not category:
            self.now[record.category] -= record.bytes
            record.category = category
            self._count(category, record.bytes)

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        watch = weakref.ref(storage, lambda _: self._died(key))
        record = _Storage(storage.nbytes(), self._category(sys._getframe(2)), watch)
        self._storages[key] = record
        self._count(record.category, record.bytes)

    def _died(self, key: int) -> None:
        record = self._storages.pop(key)
        self.now[record.category] -= record.bytes
        self._on_free(key)

    def _count(self, category: Category, change: int) -> None:
        self.now[category] += change
        self.peaks[category] = max(self.peaks[category], self.now[category])
        total = sum(self.now.values())
        if total > self.peak:
            self.peak, self.peak_phase = total, self.phase
            self.at_peak = Counter(self.now)

    def _category(self, frame: FrameType | None) -> Category:
        """By the innermost room on the stack that has buffers of its own, else by the phase."""
        recomputing = False
        while frame is not None:
            room = self._room(frame.f_code)
            if isinstance(room, Category):
                return room
            recomputing = recomputing or room == "recomputation"
            frame = frame.f_back
        if self.phase == "forward" or (self.phase == "backward" and recomputing):
            return Category.ACTIVATIONS
        return Category.BACKWARD if self.phase == "backward" else Category.OTHER

    def _room(self, code: CodeType) -> Category | str | None:
        if code not in self._rooms:
            self._rooms[code] = _classify(code.co_filename)
        return self._rooms[code]


def _classify(path: str) -> Category | str | None:
    if path.endswith(_RECOMPUTATION):
        return "recomputation"
    if not path.startswith(_PACKAGE):
        return None
    return _ROOMS.get(path.removeprefix(_PACKAGE).removesuffix(".py"))
