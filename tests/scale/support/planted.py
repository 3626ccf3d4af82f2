"""Errors planted into the package, to see that a run notices them. Each is entered inside the process of a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from deepspeed_amsp.comm import Communicator, Ticket
from deepspeed_amsp.schedule.chain import DirectChain
from tests.scale.support.recording import InFlight


@contextmanager
def no_wait(purpose: str) -> Iterator[None]:
    """Whoever waits for a collective of ``purpose`` goes on at once."""
    wait = Ticket.wait

    def forgotten(ticket: Ticket, aside: bool = False) -> None:
        if ticket.entry.purpose == purpose:
            ticket._works.clear()
        wait(ticket, aside)

    with mock.patch.object(Ticket, "wait", forgotten):
        yield


@contextmanager
def stages_not_chained() -> Iterator[None]:
    """The second stage of a publish is issued beside the first."""

    def hasty(chain: DirectChain, stages: Any) -> list[Ticket]:
        return [ticket for tickets in stages for ticket in tickets]

    with mock.patch.object(DirectChain, "_issue", hasty):
        yield


@contextmanager
def sent_buffer_reused() -> Iterator[None]:
    """What a ReduceScatter sends is written again right after the issue."""
    reduce_scatter = Communicator.reduce_scatter

    def hasty(comm: Communicator, group: Any, sections: torch.Tensor, *rest: Any) -> Ticket:
        ticket = reduce_scatter(comm, group, sections, *rest)
        sections.zero_()
        return ticket

    with mock.patch.object(Communicator, "reduce_scatter", hasty):
        yield


@contextmanager
def gathered_unit_freed() -> Iterator[None]:
    """A unit's full buffer is emptied while its gather is in flight."""
    all_gather = Communicator.all_gather

    def hasty(comm: Communicator, group: Any, shard: torch.Tensor, full: torch.Tensor, label: str) -> Ticket:
        ticket = all_gather(comm, group, shard, full, label)
        full.untyped_storage().resize_(0)
        return ticket

    with mock.patch.object(Communicator, "all_gather", hasty):
        yield


@contextmanager
def buffers_not_kept() -> Iterator[None]:
    """Tickets keep nothing alive, and a broadcast sends a copy that nobody else has."""
    broadcast, make = Communicator.broadcast, Ticket.__init__

    def of_a_copy(comm: Communicator, group: Any, buffer: torch.Tensor, source: int, label: str) -> Ticket:
        return broadcast(comm, group, buffer.clone(), source, label)

    def careless(ticket: Ticket, works: Any, keep: Any, *rest: Any) -> None:
        make(ticket, works, [], *rest)

    with (
        mock.patch.object(Communicator, "broadcast", of_a_copy),
        mock.patch.object(Ticket, "__init__", careless),
    ):
        yield


@contextmanager
def issued_twice() -> Iterator[None]:
    """The norm is reduced twice into one buffer at once."""
    all_reduce = Communicator.all_reduce

    def twice(comm: Communicator, *args: Any, **kwargs: Any) -> Ticket:
        all_reduce(comm, *args, **kwargs)
        return all_reduce(comm, *args, **kwargs)

    with mock.patch.object(Communicator, "all_reduce", twice):
        yield


@contextmanager
def left_behind() -> Iterator[None]:
    """Publishes are taken for finished, and nobody reads a parameter afterwards."""
    with no_wait("publish"), mock.patch.object(InFlight, "touch"):
        yield
