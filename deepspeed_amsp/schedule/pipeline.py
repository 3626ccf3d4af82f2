"""Collectives in several stages, in flight while the host does other things."""

from __future__ import annotations

import queue
import threading
import weakref
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

import torch

from deepspeed_amsp.comm import Communicator, Log, Ticket

Stages = Generator[Sequence[Ticket], None, None]
"""Issues a stage's collectives, yields their tickets, goes on when those were waited for. A stage in which there is
nothing to send yields none: the n-th yield of every route of a pipeline must use the same group."""

EXIT_PATIENCE_S = 1.0
"""How long the end of the process may wait for a thread whose collective does not complete."""


class Pipeline(Protocol):
    """Routes in flight. All ranks start them in the same order, and issue each stage in that order, too."""

    def start(self, key: int, route: Stages, last: int = 0) -> None:
        """Issue the first stage of ``route``, one of those that `finish` knows as ``key``.

        Args:
            last: number of the last stage in which something may be sent; see `settle`.
        """
        ...

    def finish(self, key: int) -> None:
        """Finish the routes of ``key``, and before them those that were started earlier."""
        ...

    def settle(self) -> None:
        """See to it that whatever is left to be issued is issued without this rank's main thread.

        Who leaves a backward goes wherever the user's loop goes, a barrier for one, while another rank may still
        wait in its own backward for a stage of these routes.
        """
        ...

    def drain(self) -> None:
        """Finish every route."""
        ...

    def close(self) -> None:
        """Nothing will be started any more."""
        ...

    @property
    def in_flight(self) -> int:
        """Routes that were started and are not at their end."""
        ...


# ---- by the order of the host's calls --------------------------------------------------------------------------


@dataclass
class _Stage:
    key: int
    route: Stages
    last: int
    number: int
    tickets: Sequence[Ticket]

    def next(self) -> _Stage | None:
        """Wait for this stage and issue the one behind it, None at the end of the route."""
        for ticket in self.tickets:
            ticket.wait()
        return _issue(self.key, self.route, self.last, self.number + 1)


def _issue(key: int, route: Stages, last: int, number: int) -> _Stage | None:
    try:
        return _Stage(key, route, last, number, next(route))
    except StopIteration:
        return None


class OrderedPipeline:
    """Starting a route moves every older one a stage on: for accelerators, where waiting is the stream's business.

    A stage's collective has had the time of a whole bucket's backward to finish when the next one is issued. All
    ranks issue everything in one order, so this is also for communicators that are merged into one.

    Args:
        limit: how many routes may be in flight when another one starts; beyond it the oldest are waited for.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._flight: deque[_Stage] = deque()

    def start(self, key: int, route: Stages, last: int = 0) -> None:
        self._advance_all(keep=self._limit - 1)
        first = _issue(key, route, last, 0)
        if first is not None:
            self._flight.append(first)

    def finish(self, key: int) -> None:
        while any(stage.key == key for stage in self._flight):
            oldest: _Stage | None = self._flight.popleft()
            while oldest is not None:
                oldest = oldest.next()

    def settle(self) -> None:
        """Issue whatever there is to issue; only last stages may still be under way."""
        while any(stage.number < stage.last for stage in self._flight):
            older, self._flight = self._flight, deque()
            for stage in older:
                current = stage.next() if stage.number < stage.last else stage
                if current is not None:
                    self._flight.append(current)

    def drain(self) -> None:
        """Finish every route, stage by stage in order of their start."""
        while self._flight:
            self._advance_all()

    def close(self) -> None:
        self._flight.clear()

    @property
    def in_flight(self) -> int:
        return len(self._flight)

    def _advance_all(self, keep: int = 0) -> None:
        """Wait for a stage of all but the newest ``keep`` routes."""
        older, self._flight = list(self._flight), deque()
        moved = max(len(older) - keep, 0)
        for stage in older[:moved]:
            current = stage.next()
            if current is not None:
                self._flight.append(current)
        self._flight.extend(older[moved:])


# ---- by threads ------------------------------------------------------------------------------------------------


@dataclass
class _Flight:
    """A route on its way through the threads. Whoever has it in hand is the only one to change it."""

    key: int
    route: Stages
    log: Log
    tickets: Sequence[Ticket] = ()
    stage: int = -1
    done: threading.Event = field(default_factory=threading.Event)
    error: Exception | None = None


_Inbox = queue.SimpleQueue["_Flight | None"]


class ThreadPipeline:
    """Each stage has a thread that waits for it and issues the next one at once: for gloo, where waiting blocks.

    The host's main thread is not needed: a rank may read a parameter, or not, while others do something else (rank
    0 alone writes a log), and the last buckets of a backward go on when no further gradient comes. Routes pass
    the threads in the order of their start, so the order within a group is the same on all ranks; between groups
    it may differ, which is harmless where every group has a queue of its own.

    Args:
        comm: whose log and traces the collectives belong to.
        stages: by stage, whether something may be sent in it.
        limit: how many routes may be in flight when another one starts; beyond it the oldest are waited for.
        name: of the threads.
    """

    def __init__(self, comm: Communicator, stages: Sequence[bool], limit: int, name: str) -> None:
        self._comm = comm
        self._limit = limit
        self._flights: deque[_Flight] = deque()
        self._inboxes: dict[int, _Inbox] = {number: queue.SimpleQueue() for number, sends in enumerate(stages) if sends}
        threads = [
            threading.Thread(target=_serve, args=(comm, self._inboxes, number), name=f"{name}-{number}", daemon=True)
            for number in self._inboxes
        ]
        for thread in threads:
            thread.start()
        # Threads know no engine, so one that nobody closed can be collected. Without an end, a thread
        # inside a collective when the interpreter goes would take the process down with it.
        self._end = weakref.finalize(self, _end, self._inboxes, threads)

    def start(self, key: int, route: Stages, last: int = 0) -> None:
        while self._flights and (self._flights[0].done.is_set() or len(self._flights) > self._limit):
            self._conclude(self._flights.popleft())
        flight = _Flight(key, route, self._comm.log)
        if _advance(flight, self._inboxes):
            self._flights.append(flight)
            self._inboxes[flight.stage].put(flight)

    def finish(self, key: int) -> None:
        while any(flight.key == key for flight in self._flights):
            self._conclude(self._flights.popleft())

    def settle(self) -> None:
        """Nothing to do: the threads issue what there is."""

    def drain(self) -> None:
        while self._flights:
            self._conclude(self._flights.popleft())

    def close(self) -> None:
        self._end()

    @property
    def in_flight(self) -> int:
        return sum(not flight.done.is_set() for flight in self._flights)

    def _conclude(self, flight: _Flight) -> None:
        if not flight.done.is_set():
            with self._blocked(flight.tickets):
                flight.done.wait()
        if flight.error is not None:
            raise flight.error

    def _blocked(self, tickets: Sequence[Ticket]) -> AbstractContextManager[None]:
        return self._comm.blocked(tickets[0].entry) if tickets else nullcontext()


def _serve(comm: Communicator, inboxes: Mapping[int, _Inbox], number: int) -> None:
    """The thread of one stage; its end follows the last route to the next thread."""
    while (flight := inboxes[number].get()) is not None:
        try:
            with comm.logging_to(flight.log), torch.no_grad():
                for ticket in flight.tickets:
                    ticket.wait(aside=True)
                goes_on = _advance(flight, inboxes)
        except Exception as error:  # noqa: BLE001 (handed to whoever waits for the route)
            flight.error = error
            goes_on = False
        if goes_on:
            inboxes[flight.stage].put(flight)
        else:
            flight.done.set()
        del flight  # an idle thread keeps no buffer alive
    for later in sorted(inboxes):
        if later > number:
            inboxes[later].put(None)
            break


def _advance(flight: _Flight, inboxes: Mapping[int, _Inbox]) -> bool:
    """Issue the next stage that may send something; False when the route is at its end."""
    for tickets in flight.route:
        flight.tickets = tickets
        flight.stage += 1
        if flight.stage in inboxes:
            return True
    return False


def _end(inboxes: Mapping[int, _Inbox], threads: Sequence[threading.Thread]) -> None:
    for first in sorted(inboxes)[:1]:
        inboxes[first].put(None)
    for thread in threads:
        if thread is not threading.current_thread():  # a collection may run anywhere
            thread.join(EXIT_PATIENCE_S)
