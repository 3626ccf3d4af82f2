"""A run notices uses of buffers in flight: in the real engine with an error planted, and one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

from tests.scale.support import planted, recording
from tests.scale.support.cases import CASES
from tests.scale.support.forks import in_a_process, in_processes
from tests.scale.support.measure import measure_here
from tests.scale.support.memory import Category
from tests.scale.support.recording import Flight, InFlight, RaceError
from tests.scale.support.watch import Watch

BY_NAME = {case.name: case.cut(1) for case in CASES}

PLANTED: list[tuple[str, Callable[[], Any], str, str]] = [
    ("7b", partial(planted.no_wait, "publish"), "read in flight", "broadcast"),
    ("7b", partial(planted.no_wait, "grad_reduce"), "freed in flight", "reduce"),
    ("7b-all_reduce", partial(planted.no_wait, "grad_reduce"), "freed in flight", "all_reduce"),
    ("7b-all_reduce", partial(planted.no_wait, "publish"), "read in flight", "broadcast"),
    ("13b", partial(planted.no_wait, "gather"), "read in flight", "all_gather"),
    ("30b", partial(planted.no_wait, "gather"), "read in flight", "all_gather"),
    ("13b", partial(planted.no_wait, "param_reduce"), "read in flight", "reduce_scatter"),
    ("7b", partial(planted.no_wait, "scalars"), "read in flight", "all_reduce"),
    ("7b-mixed", planted.sent_buffer_reused, "written in flight", "reduce_scatter"),
    ("13b", planted.gathered_unit_freed, "freed in flight", "all_gather"),
    ("7b", planted.buffers_not_kept, "freed in flight", "broadcast"),
    ("7b-two_nodes", planted.stages_not_chained, "reused in flight", "broadcast"),
    ("7b", planted.issued_twice, "reused in flight", "all_reduce"),
    ("7b", planted.left_behind, "never waited", "broadcast"),
]


def test_planted_errors_are_caught() -> None:
    """All in one test, so that the processes run two at a time."""
    calls = [(BY_NAME[name].plan, BY_NAME[name].model, 1, plant) for name, plant, _, _ in PLANTED]
    for (name, plant, kind, op), found in zip(PLANTED, in_processes(measure_here, calls), strict=True):
        assert isinstance(found, RaceError), f"{name} with {plant}: {found}"
        assert found.kind == kind, f"{name} with {plant}: {found}"
        assert op in found.detail, f"{name} with {plant}: {found}"


def test_an_error_of_a_process_arrives() -> None:
    with pytest.raises(ZeroDivisionError):
        in_a_process(divmod, 1, 0)


@pytest.fixture
def flights() -> Iterator[InFlight]:
    """The table of this process, empty before and after."""
    recording.in_flight.by_storage.clear()
    yield recording.in_flight
    recording.in_flight.by_storage.clear()
    recording.in_flight.violation = None


def test_parts_of_a_buffer_are_told_apart(flights: InFlight) -> None:
    buffer = torch.zeros(4, 8)
    flights.add(Flight("a broadcast"), [buffer[0]], [buffer[1]])
    with Watch():
        assert buffer[2:].sum() == 0
        buffer[3].add_(1)
        buffer[0].sum()  # an input may be read
        buffer[1].view(2, 4)[0].detach()  # and a view of an output made
        with pytest.raises(RaceError, match="read in flight"):
            buffer.sum()
        with pytest.raises(RaceError, match="written in flight"):
            buffer[0].zero_()
        with pytest.raises(RaceError, match="written in flight"):
            torch._foreach_add_([buffer[3], buffer[1]], 1)
        with pytest.raises(RaceError, match="read in flight"):
            buffer[:, 1].clone()  # a column meets both


def test_waiting_gives_buffers_back(flights: InFlight) -> None:
    buffer = torch.zeros(8)
    flight, other = Flight("a gather"), Flight("another")
    flights.add(flight, [], [buffer[:4]])
    flights.add(other, [buffer[4:]], [])
    assert not flight.is_completed()
    flight.wait()
    assert flight.is_completed()
    assert flights.unwaited() == ["another"]
    with Watch():
        buffer[:4].add_(1)
    other.wait()
    assert not flights


def test_a_collective_may_share_only_what_it_reads(flights: InFlight) -> None:
    buffer = torch.zeros(8)
    flights.add(Flight("one"), [buffer], [])
    flights.add(Flight("two"), [buffer[:4]], [])
    with pytest.raises(RaceError, match="reused in flight"):
        flights.add(Flight("three"), [], [buffer[4:]])


def test_memory_follows_storages() -> None:
    watch = Watch()
    with watch.installed(), watch:
        memory = watch.memory
        memory.phase = "forward"
        first = torch.zeros(1000, dtype=torch.float32)
        view = first[10:]
        second = first + 1
        memory.move(second, Category.PARAMETERS)
        assert memory.now[Category.ACTIVATIONS] == memory.now[Category.PARAMETERS] == 4000
        del first
        assert memory.now[Category.ACTIVATIONS] == 4000, "the view keeps it"
        del view
        assert memory.now[Category.ACTIVATIONS] == 0
        second.untyped_storage().resize_(0)
        assert memory.now[Category.PARAMETERS] == 0
        assert memory.peak == 8000
        assert memory.peaks[Category.ACTIVATIONS] == 8000, "the second was one, too, until it moved"
        assert memory.peaks[Category.PARAMETERS] == 4000
        assert memory.peak_phase == "forward"
