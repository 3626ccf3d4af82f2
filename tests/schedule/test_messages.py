"""What goes from rank to rank on gloo, against sums and copies made on one rank."""

from __future__ import annotations

import multiprocessing
import os
import random
import time
from datetime import timedelta
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from deepspeed_amsp.comm import CollectiveError, Communicator, Ticket, exchange
from deepspeed_amsp.compare.launch import free_port
from deepspeed_amsp.mesh import Group, Purpose
from tests.support.pool import pool


def everybody() -> Group:
    """The whole world as a group."""
    ranks = tuple(range(dist.get_world_size()))
    return Group(Purpose.GRAD_REDUCE, "data", ranks, dist.get_rank(), dist.group.WORLD)


def splits_of(world: int, rounds: int, seed: int) -> list[list[int]]:
    """Section lengths by round and rank: some ranks own nothing, in one round nobody does."""
    drawn = random.Random(seed)
    return [[0] * world, *([drawn.choice([0, 1, 7, 1 << 15]) for _ in range(world)] for _ in range(rounds))]


def values(rank: int, number: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """What ``rank`` has in a round; small integers, whose sums are exact."""
    made = torch.Generator().manual_seed(1000 * number + rank)
    return torch.randint(-8, 8, (numel,), generator=made).to(dtype)


def sums_in_flight(seed: int, dtype: torch.dtype) -> None:
    """Issue all rounds, then wait for them from the last to the first."""
    group, communicator, flights = everybody(), Communicator(), []
    for number, splits in enumerate(splits_of(group.size, rounds=12, seed=seed)):
        mine = torch.full((splits[group.index],), float("nan"), dtype=dtype)
        whole = values(group.index, number, sum(splits), dtype)
        flights.append((number, splits, mine, communicator.reduce_scatter(group, whole, mine, splits, "round")))
    for number, splits, mine, ticket in reversed(flights):
        ticket.wait()
        total = sum(values(rank, number, sum(splits), torch.float64) for rank in range(group.size))
        assert isinstance(total, torch.Tensor)
        assert torch.equal(mine.double(), total.split(splits)[group.index])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_sums_of_any_sections_however_many_are_in_flight(world: int, dtype: torch.dtype) -> None:
    pool(world).run(sums_in_flight, world, dtype)


def broadcasts_in_flight() -> None:
    """Both ranks send, in no regular order and of many sizes; waited for from the last to the first."""
    group, communicator, drawn, flights = everybody(), Communicator(), random.Random(0), []
    for number in range(40):
        source, numel = drawn.randrange(group.size), drawn.choice([1, 7, 1 << 15])
        sent = values(source, number, numel, torch.bfloat16)
        buffer = sent.clone() if group.index == source else torch.full_like(sent, float("nan"))
        flights.append((sent, buffer, communicator.broadcast(group, buffer, source, "round", message=True)))
    for sent, buffer, ticket in reversed(flights):
        ticket.wait()
        assert torch.equal(buffer, sent)


@pytest.mark.parametrize("world", [2, 3])
def test_broadcasts_of_all_ranks_at_once(world: int) -> None:
    """As messages where there are two."""
    pool(world).run(broadcasts_in_flight)


class Noted:
    """A group that notes what is posted."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, int]] = []

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> None:
        self.calls.append(("send", rank, tensors[0].numel()))

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> None:
        self.calls.append(("recv", rank, tensors[0].numel()))


def test_receivers_are_ready_before_anything_is_sent() -> None:
    """A sender hears that its receiver is ready behind what that one has sent before, which may take long."""
    sections, group = list(torch.arange(9.0).split([2, 3, 0, 4])), Noted()
    works, parts = exchange(sections, 1, cast(dist.ProcessGroup, group))
    # Also what is empty: all ranks count the same number of messages, which torch's debug mode compares.
    assert group.calls == [
        ("recv", 0, 3),
        ("recv", 2, 3),
        ("recv", 3, 3),
        ("send", 0, 2),
        ("send", 2, 0),
        ("send", 3, 4),
    ]
    assert len(works) == len(group.calls)
    assert parts[1] is sections[1] and [part.shape for part in parts] == [(3,)] * 4


# ---- ranks that are gone ----------------------------------------------------------------------------------------


def issue(name: str) -> Ticket:
    """A reduce-scatter, or a message to rank 0 from the last."""
    group, communicator = everybody(), Communicator()
    if name == "message":
        return communicator.broadcast(group, torch.zeros(4), group.size - 1, "bucket 7", message=True)
    splits = [2] * group.size
    return communicator.reduce_scatter(group, torch.zeros(2 * group.size), torch.zeros(2), splits, "bucket 7")


def failures_after_a_death(name: str, early: bool) -> list[tuple[str, float]]:
    """The last rank dies before it issues anything; the others issue before (``early``) or after that."""
    last = dist.get_rank() == dist.get_world_size() - 1
    if last:
        time.sleep(0.5 * early)
        os._exit(7)
    time.sleep(0.5 * (not early))
    ticket, found = issue(name), []
    for _ in range(2):
        began = time.monotonic()
        with pytest.raises(CollectiveError) as caught:
            ticket.wait()
        found.append((str(caught.value), time.monotonic() - began))
    if dist.get_rank():
        time.sleep(0.5)  # so that rank 0 hears of the death of the last one, not of this one's end
    return found


def spawned(rank: int, world: int, port: int, name: str, early: bool, queue: Any) -> None:
    """A process of its own: one of them dies, which a pool would mind."""
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world, timeout=timedelta(seconds=30))
    queue.put(failures_after_a_death(name, early))


@pytest.mark.parametrize("early", [True, False], ids=["issued before", "issued after"])
@pytest.mark.parametrize(("name", "world"), [("reduce_scatter", 3), ("message", 2)])
def test_whoever_waits_learns_of_a_death_at_once_and_again(name: str, world: int, early: bool) -> None:
    """Also where the message cannot even be issued, and each time that somebody waits."""
    context = multiprocessing.get_context("fork")
    queue, port = context.Queue(), free_port()
    processes = [context.Process(target=spawned, args=(r, world, port, name, early, queue)) for r in range(world)]
    for process in processes:
        process.start()
    found = [queue.get(timeout=60) for _ in range(world - 1)]
    for process in processes:
        process.join(30)
    operation = "broadcast" if name == "message" else name
    for failures in found:
        for text, seconds in failures:
            assert text.startswith(f"{operation} of bucket 7 (grad_reduce) over ranks {list(range(world))} did not")
            assert "Another rank has died" in text
            assert seconds < 10
