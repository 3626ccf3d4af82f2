"""What goes from rank to rank on gloo, against sums and copies made on one rank."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist

from deepspeed_amsp import comm
from deepspeed_amsp.comm import Communicator, exchange
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
        flights.append((sent, buffer, communicator.broadcast(group, buffer, source, "round")))
    for sent, buffer, ticket in reversed(flights):
        ticket.wait()
        assert torch.equal(buffer, sent)


@pytest.mark.parametrize("world", [2, 3])
def test_broadcasts_of_all_ranks_at_once(world: int) -> None:
    pool(world).run(broadcasts_in_flight)


def test_receivers_are_ready_before_anything_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sender hears that its receiver is ready behind what that one has sent before, which may take long."""
    calls: list[tuple[str, int, int]] = []

    def noted(name: str) -> Any:
        return lambda tensor, rank, group: calls.append((name, rank, tensor.numel()))

    for name in ("isend", "irecv"):
        monkeypatch.setattr(comm.dist, name, noted(name))
    sections = list(torch.arange(9.0).split([2, 3, 0, 4]))
    works, parts = exchange(sections, ranks=(10, 11, 12, 13), index=1, group=None)
    # Rank 12 gets nothing from anybody, so nothing is sent to it.
    assert calls == [("irecv", 10, 3), ("irecv", 12, 3), ("irecv", 13, 3), ("isend", 10, 2), ("isend", 13, 4)]
    assert len(works) == len(calls)
    assert parts[1] is sections[1] and [part.shape for part in parts] == [(3,)] * 4
    calls.clear()
    exchange(sections, ranks=(10, 11, 12, 13), index=2, group=None)
    assert calls == [("isend", 10, 2), ("isend", 11, 3), ("isend", 13, 4)]
