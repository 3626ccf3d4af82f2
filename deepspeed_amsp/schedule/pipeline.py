"""Multi-stage communication in flight, moved on without blocking the host where that is possible."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from dataclasses import dataclass

from deepspeed_amsp.comm import Ticket

Stages = Generator["Ticket | None", None, None]
"""Issues a collective, yields its ticket, goes on when that was waited for. A stage in which there is nothing to
send yields None instead: the n-th yield of every route must use the same group (see `Pipeline`)."""


@dataclass
class _Flight:
    key: int
    route: Stages
    last: int
    ticket: Ticket | None
    stage: int

    @property
    def arrived(self) -> bool:
        return self.ticket is None or self.ticket.done()


class Pipeline:
    """Routes in flight. All ranks start them in the same order, and issue each stage in that order, too.

    Args:
        polls: move a route on as soon as its collective is done, whenever somebody looks (gloo: waiting would
            block the host, and a stage that crosses nodes takes long). Ranks may then issue stages of different
            groups in different orders, which is harmless where every group has a queue of its own; the order
            within a group stays that of the routes. Without it (an accelerator, where waiting is the stream's
            business, or merged communicators) starting a route moves every older one a stage on: its
            collective has had the time of a whole bucket's backward to finish.
        limit: how many routes may be in flight when another one starts; beyond it the oldest are waited for.
    """

    def __init__(self, polls: bool = False, limit: int = 1) -> None:
        self._polls = polls
        self._limit = limit
        self._flight: deque[_Flight] = deque()

    def start(self, key: int, route: Stages, last: int = 0) -> None:
        """Issue the first stage of ``route``, one of those that `finish` knows as ``key``.

        Args:
            last: number of the last stage in which something may be sent; see `settle`.
        """
        if self._polls:
            self.poll()
            while len(self._flight) > self._limit:
                self._advance_all()
        else:
            self._advance_all(keep=self._limit - 1)
        first = self._step(key, route, last, 0)
        if first is not None:
            self._flight.append(first)

    def poll(self) -> None:
        """Move on whatever has arrived."""
        if not self._flight or not self._polls:
            return
        ahead: int | None = None
        older, self._flight = self._flight, deque()
        for flight in older:
            current: _Flight | None = flight
            # A stage is issued only when the route before has issued its own, or is through.
            while current is not None and (ahead is None or current.stage < ahead) and current.arrived:
                current = self._next(current)
            if current is not None:
                self._flight.append(current)
                ahead = current.stage

    def finish(self, key: int) -> None:
        """Finish the routes of ``key``, and before them those that were started earlier."""
        while any(flight.key == key for flight in self._flight):
            oldest: _Flight | None = self._flight.popleft()
            while oldest is not None:
                oldest = self._next(oldest)
            self.poll()

    def settle(self) -> None:
        """Issue whatever there is to issue; only last stages may still be under way.

        Who leaves a backward goes wherever the user's loop goes, a barrier for one, while another rank may still
        wait in its own backward for a stage of these routes.
        """
        while any(flight.stage < flight.last for flight in self._flight):
            older, self._flight = self._flight, deque()
            for flight in older:
                current = self._next(flight) if flight.stage < flight.last else flight
                if current is not None:
                    self._flight.append(current)

    def drain(self) -> None:
        """Finish every route, stage by stage in order of their start."""
        while self._flight:
            self._advance_all()

    def _advance_all(self, keep: int = 0) -> None:
        """Wait for a stage of all but the newest ``keep`` routes."""
        older, self._flight = list(self._flight), deque()
        moved = max(len(older) - keep, 0)
        for flight in older[:moved]:
            current = self._next(flight)
            if current is not None:
                self._flight.append(current)
        self._flight.extend(older[moved:])

    def _next(self, flight: _Flight) -> _Flight | None:
        if flight.ticket is not None:
            flight.ticket.wait()
        return self._step(flight.key, flight.route, flight.last, flight.stage + 1)

    def _step(self, key: int, route: Stages, last: int, stage: int) -> _Flight | None:
        try:
            return _Flight(key, route, last, next(route), stage)
        except StopIteration:
            return None
