"""An adversarial process group: gloo that punishes whoever touches a buffer in flight.

    adversarial.configure(seed=3)
    group = dist.new_group(ranks, backend="adversarial")       # the default group stays gloo
    with adversarial.new_groups():                             # or: every dist.new_group without a backend
        ...
    adversarial.assert_all_waited()

On a device a collective runs beside the program, so a missing wait is a race, which a CPU run, where results
come early, rarely shows. Here every race shows, every time:

- At issue the inputs are copied and the outputs are poisoned: NaN, or the largest integer. Communication runs
  on private copies. Who reads before the wait reads poison.
- ``wait()`` lets the operation finish, sleeps a little (another time on each rank), and checks that since the
  issue nobody wrote to an input or an output and nobody freed or moved their storages. Only then it delivers;
  a violation raises RaceError (the other ranks do not hang: this rank's part is done).
- Issuing an operation on a buffer that another one in flight owns raises RaceError, unless both only read it.
- ``is_completed()`` is False until waited for: a loop that polls never ends.
- Operations never waited for are listed by ``unwaited()``.

What an operation owns, from issue to the end of wait:

    all_reduce     the buffer, poisoned
    broadcast      the buffer; poisoned but on the source, where it may be read and must not change
    reduce         the buffer, poisoned. Off the destination it is still poisoned after the wait: gloo leaves
                   partial sums there, NCCL the input, so nobody may rely on it
    all others     inputs: may be read, must not change. Outputs: poisoned. An input inside the output (an
                   in-place gather) counts as output
"""

from __future__ import annotations

import contextlib
import functools
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import device_mesh

from tests.support import worker
from tests.support.buffers import bytes_of, overlap, poison, private_copy, storage_of
from tests.support.groups import PythonGroup

NAME = "adversarial"
Start = Callable[[list[torch.Tensor], list[torch.Tensor]], Any]
"""Starts the real operation on (inputs, outputs) and returns its work; in place, both are the same list."""


class RaceError(RuntimeError):
    """A buffer was touched while an operation owned it, or an operation was never waited for.

    ``kind``: "written in flight", "freed in flight", "reused in flight" or "never waited".
    """

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(kind, detail)
        self.kind, self.detail = kind, detail

    def __str__(self) -> str:
        """The kind, then the operation with its tensors."""
        return f"{self.kind}: {self.detail}"


@dataclass
class _State:
    """Of this rank, for all groups. ``issued`` counts operations, so that each has a delay of its own."""

    seed: int = 0
    max_delay_ms: float = 2.0
    enabled: bool = True
    issued: int = 0
    in_flight: list[Ticket] = field(default_factory=list)


_state = _State()
_changing = threading.Lock()
"""Held to change ``issued`` or ``in_flight``: the engine's threads issue and wait beside the main one."""


def configure(seed: int = 0, max_delay_ms: float = 2.0, enabled: bool = True) -> None:
    """Sets the behaviour of all groups of this rank, and forgets what is in flight.

    Delays are uniform in [0, max_delay_ms], drawn from (seed, rank, number of the operation). With
    ``enabled=False`` the groups pass every operation straight to gloo. A pool worker returns to the defaults
    after each job.
    """
    vars(_state).update(vars(_State(seed, max_delay_ms, enabled)))


def issued() -> int:
    """How many operations this rank has issued since ``configure``: 0 says a test was not adversarial."""
    return _state.issued


def unwaited() -> list[str]:
    """Describes the operations of this rank that were issued and not waited for, in the order of issue."""
    return [str(ticket) for ticket in _state.in_flight]


def assert_all_waited() -> None:
    """Raises RaceError naming the operations that were never waited for (and forgets them)."""
    left = unwaited()
    _state.in_flight.clear()
    if left:
        raise RaceError("never waited", "; ".join(left))


@contextlib.contextmanager
def new_groups() -> Iterator[None]:
    """Within, ``dist.new_group`` with no backend (so DeepSpeed's, DeviceMesh's) makes adversarial groups."""
    real = dist.distributed_c10d.new_group

    @functools.wraps(real)
    def new_group(ranks: Any = None, timeout: Any = None, backend: Any = None, *args: Any, **kw: Any) -> Any:
        return real(ranks, timeout, NAME if backend is None else backend, *args, **kw)

    # The same function is bound to several names, and callers look it up under any of them.
    with contextlib.ExitStack() as stack:
        for module in (dist, dist.distributed_c10d, device_mesh):
            if hasattr(module, "new_group"):
                stack.enter_context(mock.patch.object(module, "new_group", new_group))
        yield


class _Watched:
    """A tensor that an operation owns, as it looked right after the issue."""

    def __init__(self, tensor: torch.Tensor, role: str) -> None:
        self.tensor, self.role = tensor, role
        self.text = f"{role} {tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
        self._copy = bytes_of(tensor).clone()
        self._storage = storage_of(tensor)

    def violation(self) -> str | None:
        """What happened to the tensor since: "freed in flight", "written in flight" or None."""
        if storage_of(self.tensor) != self._storage:
            return "freed in flight"
        # Bytes, not values: NaN equals nothing, and -0.0 equals 0.0.
        return None if torch.equal(bytes_of(self.tensor), self._copy) else "written in flight"

    def forbids(self, tensor: torch.Tensor, role: str) -> bool:
        """True if another operation must not use ``tensor`` as ``role`` meanwhile."""
        return (role != "input" or self.role != "input") and overlap(tensor, self.tensor)


class Ticket(dist.Work):
    """An operation in flight. ``wait()`` may be called again; only the first call does anything."""

    def __init__(
        self, text: str, work: Any, watched: list[_Watched], delivery: list[tuple[torch.Tensor, torch.Tensor]]
    ) -> None:
        """``delivery``: (the caller's output, the private buffer that receives its result)."""
        super().__init__()
        self.watched = watched
        self._text, self._work, self._delivery, self._waited = text, work, delivery, False
        with _changing:
            _state.issued += 1
            number = _state.issued
            _state.in_flight.append(self)
        chance = random.Random(f"{_state.seed}/{_rank()}/{number}").random()
        self.delay_s = chance * _state.max_delay_ms / 1000

    def __str__(self) -> str:
        """The operation, its tensors, its rank and group."""
        return self._text

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Delivers the results; raises RaceError if a buffer was touched."""
        if self._waited:
            return True
        self._waited = True
        with _changing:
            _state.in_flight[:] = [other for other in _state.in_flight if other is not self]
        watched, self.watched = self.watched, []  # who keeps a ticket must not keep the copies
        delivery, self._delivery = self._delivery, []
        # Before the checks: this rank's part must be complete before it may fail, or the others hang.
        self._work.wait(*([] if timeout is None else [timeout]))
        time.sleep(self.delay_s)
        for one in watched:
            kind = one.violation()
            if kind is not None:
                raise RaceError(kind, f"{one.text} of {self}")
        for output, result in delivery:
            output.data.copy_(result)
        return True

    def is_completed(self) -> bool:
        """True only once waited for."""
        return self._waited

    def is_success(self) -> bool:
        """As ``is_completed``."""
        return self._waited


class AdversarialGroup(PythonGroup):
    """A process group of its own (not a backend inside one), so that Python sees each call that dist makes.

    The methods are those that ``torch.distributed`` calls on a group, with its arguments; each returns a
    Ticket. What torch 2.13 renamed has its older name as an alias. Receiving from any rank, coalescing and
    functional collectives (which come from C++) are not there.
    """

    backend = NAME

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)

    def allreduce(self, tensors: list[torch.Tensor], *opts: Any) -> Any:
        """``dist.all_reduce``."""
        return self._in_place("all_reduce", tensors, lambda t, _: self._gloo.allreduce(t, *opts))

    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> Any:
        """``dist.broadcast``."""
        if opts.rootRank == self.rank():
            return self._issue("broadcast", tensors, [], lambda i, _: self._gloo.broadcast(i, opts))
        return self._in_place("broadcast", tensors, lambda t, _: self._gloo.broadcast(t, opts))

    def reduce(self, tensors: list[torch.Tensor], opts: Any) -> Any:
        """``dist.reduce``."""
        receives = opts.rootRank == self.rank()
        return self._in_place("reduce", tensors, lambda t, _: self._gloo.reduce(t, opts), deliver=receives)

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, *opts: Any) -> Any:
        """``dist.all_gather_single``, formerly all_gather_into_tensor."""

        def start(inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> Any:
            return self._gloo._allgather_base(outputs[0], inputs[0], *opts)

        return self._issue("all_gather_single", [input], [output], start)

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, *opts: Any) -> Any:
        """``dist.reduce_scatter_single``, formerly reduce_scatter_tensor."""

        def start(inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> Any:
            return self._gloo._reduce_scatter_base(outputs[0], inputs[0], *opts)

        return self._issue("reduce_scatter_single", [input], [output], start)

    def all_to_all_single(
        self, output: torch.Tensor, input: torch.Tensor, output_splits: Any, input_splits: Any, *opts: Any
    ) -> Any:
        """``dist.all_to_all_single``; splits are lists or None, even."""
        splits = output_splits or [], input_splits or []

        def start(inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> Any:
            return self._gloo.alltoall_base(outputs[0], inputs[0], *splits, *opts)

        return self._issue("all_to_all_single", [input], [output], start)

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        """``dist.isend``."""
        return self._issue("message sent", tensors, [], lambda i, _: self._gloo.send(i, rank, tag))

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        """``dist.irecv``."""
        return self._issue("message received", [], tensors, lambda _, o: self._gloo.recv(o, rank, tag))

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], *opts: Any) -> Any:
        """``dist.all_gather``, also of objects."""
        return self._issue("all_gather", inputs, outputs[0], lambda i, o: self._gloo.allgather([o], i, *opts))

    def gather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any) -> Any:
        """``dist.gather``; ``outputs`` is empty off the destination."""
        flat = outputs[0] if outputs else []
        return self._issue("gather", inputs, flat, lambda i, o: self._gloo.gather([o] if o else [], i, opts))

    def scatter(self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any) -> Any:
        """``dist.scatter``; ``inputs`` is empty off the source."""
        at = inputs[0] if inputs else []
        return self._issue("scatter", at, outputs, lambda i, o: self._gloo.scatter(o, [i] if i else [], opts))

    def barrier(self, opts: Any) -> Any:
        """``dist.barrier``."""
        return self._issue("barrier", [], [], lambda _, __: self._gloo.barrier(opts))

    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single

    def _in_place(self, op: str, tensors: list[torch.Tensor], start: Start, deliver: bool = True) -> Any:
        """An operation whose buffers are input and output at once; without ``deliver`` they stay poisoned."""
        if not _state.enabled:
            return start(tensors, tensors)
        private = [private_copy(tensor) for tensor in tensors]
        results = list(zip(tensors, private, strict=True)) if deliver else []
        return self._launch(op, start, (private, private), [("buffer", t) for t in tensors], results)

    def _issue(self, op: str, inputs: list[torch.Tensor], outputs: list[torch.Tensor], start: Start) -> Any:
        """An operation from ``inputs`` to ``outputs``."""
        if not _state.enabled:
            return start(inputs, outputs)
        private = [private_copy(tensor) for tensor in inputs], [private_copy(tensor) for tensor in outputs]
        owned = [*(("input", t) for t in inputs), *(("output", t) for t in outputs)]
        return self._launch(op, start, private, owned, list(zip(outputs, private[1], strict=True)))

    def _launch(
        self,
        op: str,
        start: Start,
        private: tuple[list[torch.Tensor], list[torch.Tensor]],
        owned: list[tuple[str, torch.Tensor]],
        delivery: list[tuple[torch.Tensor, torch.Tensor]],
    ) -> Ticket:
        """Starts the operation on ``private``; of ``owned``, (role, tensor), poisons all but inputs."""
        conflicts = [
            f"{other} already owns the {role} {tuple(tensor.shape)} of {op}"
            for role, tensor in owned
            for other in list(_state.in_flight)
            if any(one.forbids(tensor, role) for one in other.watched)
        ]
        work = start(*private)
        if conflicts:  # raised only now: the other ranks need this rank's part of the operation
            raise RaceError("reused in flight", conflicts[0])
        for role, tensor in owned:
            if role != "input":
                poison(tensor)
        watched = [_Watched(tensor, role) for role, tensor in owned]
        tensors = ", ".join(one.text for one in watched)
        where = f"rank {self.rank()} of {self.size()} in group {self._name!r}"
        return Ticket(f"{op} [{tensors}] on {where}", work, watched, delivery)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


dist.Backend.register_backend(NAME, AdversarialGroup, devices=["cpu"])
worker.after_job.append(configure)
