"""A persistent pool of forked gloo workers, for tests that need several ranks.

    from tests.support.pool import pool

    def mean_of_ranks(factor: float) -> float:            # top level: it travels by name
        value = torch.tensor(factor * dist.get_rank())
        dist.all_reduce(value, op=dist.ReduceOp.AVG)
        return float(value)

    assert pool(4).run(mean_of_ranks, 2.0) == [3.0] * 4

In a job the default gloo group exists, and lives on from job to job; any other group is destroyed after its
job. Each job starts from the same random state; changes to ``os.environ`` are undone. What a test patches in
the parent is not patched in the workers: patch inside the job.

Workers are forked (never spawned) from this process once it has imported what the first engine of a rank
would import lazily, so an engine test takes a fraction of a second. These imports cost seconds: they happen
at the first ``pool()`` and not at collection. The other side is ``tests.support.worker``.
"""

from __future__ import annotations

import atexit
import importlib
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from tests.support import worker
from tests.support.worker import ErrorReport, Outcome

MAX_POOLS = 2
START_TIMEOUT_S = 60.0
GRACE_S = 3.0
"""How long the other ranks may still take once one has failed: they may be waiting for it for ever."""
_DUMP_S = 0.3
_PRELOADED = (
    "torch",
    "numpy",
    "deepspeed",
    "torch._dynamo",
    "torch._inductor",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "deepspeed_amsp.engine",
)


class RankError(RuntimeError):
    """A job failed on at least one rank; the message holds every rank's story, the first failing rank first.

    ``rank``: the first failing rank. ``type_name``, ``remote_message``, ``remote_traceback``: its exception;
    for a rank that died or hung, "died" or "hung", what is known, and its stacks.
    """

    def __init__(self, rank: int, type_name: str, message: str, remote_traceback: str, others: str = "") -> None:
        self.rank, self.type_name, self.remote_message = rank, type_name, message
        self.remote_traceback, self.others = remote_traceback, others
        super().__init__(f"rank {rank}: {type_name}: {message}\n{remote_traceback.rstrip()}{others}")

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles by the arguments of ``__init__``; an exception's default is its message alone."""
        return RankError, (self.rank, self.type_name, self.remote_message, self.remote_traceback, self.others)


class WorkerPool:
    """``world_size`` forked workers that answer one job at a time. Made by ``pool`` or ``fresh``."""

    def __init__(self, world_size: int) -> None:
        """Forks the workers and waits until their default group stands; RankError if it does not."""
        if world_size < 1:
            raise ValueError(f"world_size must be at least 1, got {world_size}")
        prepare_parent()
        self.world_size = world_size
        self._directory = Path(tempfile.mkdtemp(prefix="amsp-pool-"))
        self._connections: list[Connection] = []
        self._processes: list[Any] = []  # of multiprocessing.context.ForkProcess, which not every system has
        self._alive, self._worn = True, False
        _LIVE.append(self)
        for rank in range(world_size):
            self._fork(rank)
        self._rendezvous()

    @property
    def alive(self) -> bool:
        """False once the pool was closed or killed: then ask ``pool()`` for another."""
        return self._alive

    @property
    def worn(self) -> bool:
        """True once a worker holds so much that another would be quicker (see ``tests.support.leftovers``)."""
        return self._worn

    @property
    def pids(self) -> list[int]:
        """Process ids by rank."""
        return [process.pid for process in self._processes]

    def run(
        self,
        fn: Callable[..., Any],
        *args: Any,
        timeout: float = 60,
        per_rank: Sequence[dict[str, Any]] | None = None,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[Any]:
        """Calls ``fn(*args, **kwargs)`` on every rank and returns the results by rank.

        ``fn`` is a top-level function; ``per_rank[r]`` holds further keyword arguments for rank r. Raises
        RankError if a rank raises, dies or does not answer within ``timeout`` seconds (GRACE_S once another
        has failed). With ``return_exceptions`` the list holds each rank's exception in place of its result (a
        RankError where it cannot be pickled), every rank has the whole time, and only ranks that die or hang
        raise. When every rank answers, by value or exception, the pool lives on; else it is killed.
        """
        if not self._alive:
            raise RuntimeError("this pool was closed or killed after a failure: call pool() for a new one")
        payloads = self._payloads(fn, args, kwargs, per_rank)
        for connection, payload in zip(self._connections, payloads, strict=True):
            self._post(connection, "job", timeout, payload)
        grace = timeout if return_exceptions else GRACE_S
        outcomes, lost = self._receive("outcome", timeout, range(self.world_size), grace)
        problem = self._settle() if not lost else "some ranks did not answer"
        if problem:
            self.kill()
        errors = {rank: outcome.error for rank, outcome in outcomes.items() if outcome.error is not None}
        if lost or (errors and not return_exceptions):
            order = sorted(errors, key=lambda rank: outcomes[rank].when)
            raise _rank_error([(rank, errors[rank]) for rank in order], lost)
        if problem and not errors:
            raise RankError(0, "unsettled", problem, "")
        return [_result(rank, outcomes[rank]) for rank in range(self.world_size)]

    def close(self) -> None:
        """Ends the workers: they are asked to stop, and killed if they do not. May be called twice."""
        if not self._alive:
            return
        for connection in self._connections:
            self._post(connection, "stop")
        deadline = time.monotonic() + 1.0
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        """Kills the workers at once, by the process ids that this pool forked."""
        if not self._alive:
            return
        self._alive = False
        _LIVE.remove(self)
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for connection in self._connections:
            connection.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _fork(self, rank: int) -> None:
        ours, theirs = multiprocessing.Pipe()
        process = multiprocessing.get_context("fork").Process(
            target=worker.serve,
            args=(rank, self.world_size, theirs, self._directory),
            name=f"amsp-rank-{rank}-of-{self.world_size}",
            daemon=True,
        )
        process.start()
        theirs.close()  # else the death of the worker would not read as end-of-file here
        self._connections.append(ours)
        self._processes.append(process)

    def _rendezvous(self) -> None:
        """Passes rank 0's port on, waits for every rank; kills the pool and raises RankError if one fails."""
        answers, lost = self._receive("port", START_TIMEOUT_S, [0])
        if not lost:
            for connection in self._connections[1:]:
                self._post(connection, "port", answers[0])
            _, lost = self._receive("ready", START_TIMEOUT_S, range(self.world_size))
        if lost:
            self.kill()
            raise _rank_error([], lost)

    def _payloads(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any],
        per_rank: Sequence[dict[str, Any]] | None,
    ) -> list[bytes]:  # fmt: skip
        """One pickle a rank, all made before the first is sent: one that fails must not strand the others."""
        if per_rank is None:
            return [pickle.dumps((fn, args, kwargs))] * self.world_size
        if len(per_rank) != self.world_size:
            raise ValueError(f"per_rank needs {self.world_size} dicts, one a rank, got {len(per_rank)}")
        return [pickle.dumps((fn, args, {**kwargs, **extra})) for extra in per_rank]

    def _post(self, connection: Connection, *message: Any) -> None:
        try:
            connection.send_bytes(pickle.dumps(message))
        except BrokenPipeError:  # the worker has died: who reads its answer finds that, and reports it
            return

    def _settle(self) -> str:
        """Lets every rank tidy up; says what is wrong, "" if nothing."""
        for connection in self._connections:
            self._post(connection, "settle")
        everyone = range(self.world_size)
        answers, lost = self._receive("settled", worker.SETTLE_TIMEOUT_S, everyone)
        wrong = [f"rank {rank}: {settled.wrong}" for rank, settled in sorted(answers.items()) if settled.wrong]
        self._worn = self._worn or any(settled.worn for settled in answers.values())
        for rank, report in sorted(lost.items()):
            wrong.append(f"rank {rank} while tidying up: {report.message}\n{report.traceback}")
        return "\n".join(wrong)

    def _receive(
        self, kind: str, timeout: float, ranks: Sequence[int], grace: float = GRACE_S
    ) -> tuple[dict[int, Any], dict[int, ErrorReport]]:
        """What each of ``ranks`` says in its message ``kind``, and reports of those that died or were late.

        Late is after ``timeout`` seconds, ``grace`` after another rank raised, GRACE_S after one died.
        """
        deadline = time.monotonic() + timeout
        answers: dict[int, Any] = {}
        lost: dict[int, ErrorReport] = {}
        rank_of: dict[Any, int] = {self._connections[rank]: rank for rank in ranks}
        while rank_of:
            ready = wait(list(rank_of), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            connection: Any  # wait() may give sockets and descriptors too, but it was given none
            for connection in ready:
                rank = rank_of.pop(connection)
                try:
                    received, answers[rank] = pickle.loads(connection.recv_bytes())
                    assert received == kind, f"rank {rank} sent {received!r}, expected {kind!r}"
                except (EOFError, ConnectionResetError):
                    lost[rank] = self._obituary(rank)
                if rank in lost:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
                elif getattr(answers[rank], "error", None) is not None:
                    deadline = min(deadline, time.monotonic() + grace)
        return answers, {**lost, **self._hung(sorted(rank_of.values()), timeout)}

    def _obituary(self, rank: int) -> ErrorReport:
        """Of a worker whose end of the pipe is closed."""
        self._processes[rank].join(1.0)
        code = self._processes[rank].exitcode
        by_signal = code is not None and code < 0
        how = f"signal {signal.Signals(-code).name}" if by_signal else f"exit code {code}"
        return ErrorReport("died", f"the worker ended ({how})", self._stacks(rank), None)

    def _hung(self, ranks: list[int], timeout: float) -> dict[int, ErrorReport]:
        """Asks silent workers for their stacks."""
        for rank in ranks:
            os.kill(self.pids[rank], signal.SIGUSR1)  # faulthandler answers in C, whatever Python is doing
        if ranks:
            time.sleep(_DUMP_S)
        text = f"no answer within {timeout:g} s, or soon after another rank's failure"
        return {rank: ErrorReport("hung", text, self._stacks(rank), None) for rank in ranks}

    def _stacks(self, rank: int) -> str:
        return worker.stacks_path(self._directory, rank).read_text(errors="replace")


def _rank_error(errors: list[tuple[int, ErrorReport]], lost: dict[int, ErrorReport]) -> RankError:
    """One error from all: the dead first (the others failed because of them), then by time, then the hung."""
    dead = [(rank, report) for rank, report in lost.items() if report.type_name == "died"]
    hung = [(rank, report) for rank, report in lost.items() if report.type_name == "hung"]
    (rank, first), *others = [*dead, *errors, *hung]
    text = "".join(f"\n\nrank {r}: {o.type_name}: {o.message}\n{o.traceback.rstrip()}" for r, o in others)
    return RankError(rank, first.type_name, first.message, first.traceback, text)


def _result(rank: int, outcome: Outcome) -> Any:
    """The value of a rank, or its exception."""
    if outcome.error is None:
        assert outcome.value is not None
        return pickle.loads(outcome.value)
    report = outcome.error
    if report.pickled is not None:
        try:
            error = pickle.loads(report.pickled)
        except Exception:  # noqa: BLE001 - often a class whose __init__ does not take its own args: any error
            error = None
        if isinstance(error, BaseException):
            return error
    return RankError(rank, report.type_name, report.message, report.traceback)


_LIVE: list[WorkerPool] = []
_CACHED: OrderedDict[int, WorkerPool] = OrderedDict()


def pool(world_size: int) -> WorkerPool:
    """The cached pool of ``world_size`` ranks, forked if there is none alive; at most MAX_POOLS are kept.

    One that its jobs have worn out is replaced: to fork costs less than to go on with what they left.
    """
    cached = _CACHED.pop(world_size, None)
    if cached is not None and cached.worn:
        cached.close()
    while cached is None and len(_CACHED) >= MAX_POOLS:
        _CACHED.popitem(last=False)[1].close()
    _CACHED[world_size] = cached if cached is not None and cached.alive else WorkerPool(world_size)
    return _CACHED[world_size]


def fresh(world_size: int) -> WorkerPool:
    """A pool that is not cached, for tests that kill ranks; the caller closes it."""
    return WorkerPool(world_size)


def close_all() -> None:
    """Closes every pool of this process."""
    _CACHED.clear()
    while _LIVE:
        _LIVE[-1].close()


def prepare_parent() -> None:
    """Imports what the workers need, and flushes what a fork would print twice."""
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecations among torch and deepspeed are not the test's
        for name in _PRELOADED:
            importlib.import_module(name)
    from deepspeed.accelerator import get_accelerator

    if get_accelerator().device_name() != "cpu":
        raise RuntimeError("the workers run on the CPU: set DS_ACCELERATOR=cpu before deepspeed is imported")
    sys.stdout.flush()
    sys.stderr.flush()


def _close_at_exit(owner: int) -> None:
    if os.getpid() == owner:
        close_all()


atexit.register(_close_at_exit, os.getpid())
