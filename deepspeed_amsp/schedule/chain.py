"""Collectives in several stages whose later stages are issued without the host's main thread.

A rank may read a parameter, or not, while others do something else (rank 0 alone writes a log), so the second
stage of a publish must not wait for somebody to come by: the ranks that it reaches would wait for it.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from deepspeed.accelerator import get_accelerator

from deepspeed_amsp.comm import Communicator, Log, Ticket, waits_on_host

STAGES = 2
"""Across nodes, then in node."""

Stages = Generator[list[Ticket], None, None]


class Chain(Protocol):
    """Runs stages in the order in which they were started."""

    def start(self, key: int, stages: Stages) -> None:
        """Issue the first stage now and see to it that the others follow."""
        ...

    def finish(self, key: int) -> None:
        """Wait until the last stage has arrived. Nothing to do for a key that was not started."""
        ...

    def close(self) -> None: ...


class DirectChain:
    """Everything is issued at once; a stage waits for the one before on a stream of its own, if there are streams."""

    def __init__(self, stream: Any = None) -> None:
        self._stream = stream
        self._last: dict[int, list[Ticket]] = {}

    def start(self, key: int, stages: Stages) -> None:
        if self._stream is None:
            self._last[key] = self._issue(stages)
            return
        accelerator = get_accelerator()
        self._stream.wait_stream(accelerator.current_stream())
        with accelerator.stream(self._stream):
            self._last[key] = self._issue(stages)

    def finish(self, key: int) -> None:
        for ticket in self._last.pop(key, ()):
            ticket.wait()

    def close(self) -> None:
        self._last.clear()

    def _issue(self, stages: Stages) -> list[Ticket]:
        first = next(stages)
        return first if self._stream is None else _issue_rest(stages, first)


@dataclass
class _Job:
    stages: Stages
    tickets: list[Ticket]
    log: Log
    issued: threading.Event = field(default_factory=threading.Event)
    error: Exception | None = None


class ThreadChain:
    """On the CPU waiting blocks a thread, so there is one for it. It ends with `close`."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._jobs: dict[int, _Job] = {}
        self._queue: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="amsp-publish", daemon=True)
        self._thread.start()

    def start(self, key: int, stages: Stages) -> None:
        job = _Job(stages, next(stages), self._comm.log)
        self._jobs[key] = job
        self._queue.put(job)

    def finish(self, key: int) -> None:
        job = self._jobs.pop(key, None)
        if job is None:
            return
        with self._comm.blocked(job.tickets[0].entry) if job.tickets else nullcontext():
            job.issued.wait()
        if job.error is not None:
            raise job.error
        for ticket in job.tickets:
            ticket.wait()

    def close(self) -> None:
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()

    def _run(self) -> None:
        while (job := self._queue.get()) is not None:
            try:
                with self._comm.logging_to(job.log):
                    job.tickets = _issue_rest(job.stages, job.tickets)
            except Exception as error:  # noqa: BLE001 (handed to whoever waits for the job)
                job.error = error
            job.issued.set()


def _issue_rest(stages: Stages, tickets: list[Ticket]) -> list[Ticket]:
    """Every stage after the first, each behind the one before; the last one is the reader's to wait for."""
    for _ in range(STAGES - 1):
        for ticket in tickets:
            ticket.wait(aside=True)
        tickets = next(stages)
    return tickets


def make_chain(comm: Communicator, device: torch.device, staged: bool) -> Chain:
    """The chain for one or two stages on ``device``; a single stage never needs help."""
    if not staged:
        return DirectChain()
    return ThreadChain(comm) if waits_on_host(device) else DirectChain(get_accelerator().Stream())
