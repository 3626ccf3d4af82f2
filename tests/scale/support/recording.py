"""A process group without data: it records what is issued, and knows whose buffers are in flight.

A buffer belongs to a collective from its issue until somebody has waited for it: inputs may be read meanwhile,
outputs may not be touched. `InFlight.touch` is told of every operation on a tensor and raises RaceError; unlike
the adversarial group (``tests.support.adversarial``) nothing needs values, so that it works on fake tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tests.support.adversarial import RaceError
from tests.support.groups import PythonGroup

NAME = "recording"


class Issued(NamedTuple):
    """A collective as the process group saw it; ``bytes`` is the whole message, as in comm's log."""

    op: str
    ranks: tuple[int, ...]
    bytes: int


class Extent(NamedTuple):
    """Bytes [start, stop) of a storage."""

    storage: int
    start: int
    stop: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Extent:
        size = tensor.element_size()
        start = tensor.storage_offset() * size
        steps = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
        length = (steps + 1) * size if tensor.numel() else 0
        return cls(tensor.untyped_storage()._cdata, start, start + length)


class _Owned(NamedTuple):
    extent: Extent
    output: bool
    flight: Flight


@dataclass
class InFlight:
    """Buffers in flight, by storage."""

    by_storage: dict[int, list[_Owned]] = field(default_factory=dict)
    violation: RaceError | None = None
    """Found where nothing can be raised; `check` raises it."""

    def __bool__(self) -> bool:
        return bool(self.by_storage)

    def check(self) -> None:
        if self.violation is not None:
            raise self.violation

    def add(self, flight: Flight, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        """Take the buffers over; raises RaceError if another collective has one, unless both only read it."""
        for tensors, output in ((inputs, False), (outputs, True)):
            for tensor in tensors:
                self.touch(tensor, write=output, what=f"{flight} reuses", kind="reused in flight")
        for tensors, output in ((inputs, False), (outputs, True)):
            for extent in map(Extent.of, tensors):
                self.by_storage.setdefault(extent.storage, []).append(_Owned(extent, output, flight))

    def remove(self, flight: Flight) -> None:
        for storage in list(self.by_storage):
            rest = [owned for owned in self.by_storage[storage] if owned.flight is not flight]
            if rest:
                self.by_storage[storage] = rest
            else:
                del self.by_storage[storage]

    def touch(self, tensor: torch.Tensor, write: bool, what: str, kind: str = "") -> None:
        """An operation reads or writes ``tensor``."""
        owners = self.by_storage.get(tensor.untyped_storage()._cdata)
        if not owners:
            return
        extent = Extent.of(tensor)
        for owned in owners:
            overlaps = max(owned.extent.start, extent.start) < min(owned.extent.stop, extent.stop)
            if overlaps and (write or owned.output):
                part = "output" if owned.output else "input"
                kind = kind or ("written in flight" if write else "read in flight")
                raise RaceError(kind, f"{what} {tuple(tensor.shape)}, {part} of {owned.flight}")

    def gone(self, storage: int) -> None:
        """A storage is freed or emptied. Freeing happens where an exception would be lost, so `check` raises it."""
        owners = self.by_storage.get(storage)
        if owners and self.violation is None:
            self.violation = RaceError("freed in flight", f"the memory of a buffer of {owners[0].flight}")

    def unwaited(self) -> list[str]:
        return sorted({str(owned.flight) for owners in self.by_storage.values() for owned in owners})


in_flight = InFlight()
"""Of this process: one rank."""

log: list[Issued] = []
"""All that was issued on recording groups, in order."""


class Flight(dist.Work):
    """A collective in flight: it ends when it is waited for, never earlier, as on the slowest network.

    It keeps no buffer alive; that is the ticket's duty.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text
        self._waited = False

    def __str__(self) -> str:
        return self._text

    def wait(self, timeout: timedelta | None = None) -> bool:
        in_flight.remove(self)
        self._waited = True
        return True

    def is_completed(self) -> bool:
        return self._waited

    def is_success(self) -> bool:
        return self._waited


class RecordingGroup(PythonGroup):
    """The methods that ``torch.distributed`` calls on a group, for the collectives that the package uses."""

    backend = NAME

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)

    def allreduce(self, tensors: list[torch.Tensor], *_: Any) -> Flight:
        return self._issue("all_reduce", [], tensors, tensors[0])

    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> Flight:
        sends = opts.rootRank == self.rank()
        return self._issue("broadcast", tensors if sends else [], [] if sends else tensors, tensors[0])

    def reduce(self, tensors: list[torch.Tensor], *_: Any) -> Flight:
        # Off the destination, too: some backends leave partial sums there.
        return self._issue("reduce", [], tensors, tensors[0])

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, *_: Any) -> Flight:
        return self._issue("all_gather", [input], [output], output)

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, *_: Any) -> Flight:
        return self._issue("reduce_scatter", [input], [output], input)

    def all_to_all_single(self, output: torch.Tensor, input: torch.Tensor, *_: Any) -> Flight:
        return self._issue("all_to_all", [input], [output], input)

    def send(self, tensors: list[torch.Tensor], *_: Any) -> Flight:
        return self._issue("send", tensors, [], tensors[0])

    def recv(self, tensors: list[torch.Tensor], *_: Any) -> Flight:
        return self._issue("recv", [], tensors, tensors[0])

    # What torch 2.13 renamed.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single

    def _issue(self, op: str, inputs: list[torch.Tensor], outputs: list[torch.Tensor], message: torch.Tensor) -> Flight:
        ranks = tuple(dist.get_process_group_ranks(self))
        size = message.numel() * message.element_size()
        flight = Flight(f"{op} of {size} bytes over {len(ranks)} ranks from {ranks[0]} on")
        in_flight.add(flight, inputs, outputs)
        log.append(Issued(op, ranks, size))
        return flight


dist.Backend.register_backend(NAME, RecordingGroup, devices=["cpu"])
