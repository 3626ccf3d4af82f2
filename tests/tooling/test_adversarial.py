"""The adversarial process group: right values after the wait, poison before it, no false alarms.

Each job runs on all ranks; what it asserts there fails the test here.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.pool import WorkerPool
from tests.tooling.ops import ALL_OPS, COLLECTIVES, WORLD, is_poisoned, issue, new_group, same

Pool = Callable[[int], WorkerPool]


def op_delivers(op: str, dtype_name: str, split: bool) -> None:
    """Poison before the wait, the result after it; a second wait changes nothing."""

    import torch
    import torch.distributed as dist

    from tests.support import adversarial

    group = new_group(seed=1)
    if split:
        halves = [dist.new_group(ranks, backend="adversarial") for ranks in ([0, 1], [2, 3])]
        group = halves[dist.get_rank() // 2]
    ticket, inputs, outputs, expected = issue(op, group, getattr(torch, dtype_name))
    assert all(is_poisoned(output) for output in outputs)
    only_read = [one for one in inputs if not any(one is output for output in outputs)]
    assert not any(is_poisoned(one) for one in only_read), "an input may be read in flight"
    assert not ticket.is_completed()
    assert len(adversarial.unwaited()) == 1
    ticket.wait()
    assert ticket.is_completed()
    for output, wanted in zip(outputs, expected, strict=True):
        assert same(output, wanted), (output, wanted)
        output.zero_()
    ticket.wait()
    assert not any(output.any() for output in outputs)
    adversarial.assert_all_waited()


def uneven_all_to_all(world: int) -> None:
    """Rank r sends r + 1 elements to each rank."""

    import torch
    import torch.distributed as dist

    group = new_group()
    rank = dist.get_rank()
    output = torch.zeros(sum(range(1, world + 1)))
    sent = torch.full((world * (rank + 1),), float(rank))
    splits = list(range(1, world + 1)), [rank + 1] * world
    dist.all_to_all_single(output, sent, *splits, group=group)
    assert output.tolist() == [float(r) for r in range(world) for _ in range(r + 1)]


def reductions_and_blocking_calls() -> None:
    """AVG and MAX, bfloat16, blocking calls, ``dist.barrier`` and DeepSpeed's wrappers."""

    import deepspeed.comm
    import torch
    import torch.distributed as dist

    from tests.support import adversarial

    group = new_group()
    rank, size = group.rank(), group.size()
    mean = torch.full((3,), float(rank), dtype=torch.bfloat16)
    dist.all_reduce(mean, op=dist.ReduceOp.AVG, group=group)
    assert mean.tolist() == [(size - 1) / 2] * 3
    largest = torch.tensor(rank)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    assert largest == size - 1
    gathered = torch.zeros(size)
    deepspeed.comm.all_gather_into_tensor(gathered, torch.tensor([float(rank)]), group=group)
    assert gathered.tolist() == [float(one) for one in range(size)]
    scattered = torch.zeros(1)
    deepspeed.comm.reduce_scatter_tensor(scattered, torch.arange(float(size)), group=group)
    assert scattered == rank * size
    dist.barrier(group=group)
    adversarial.assert_all_waited()


def object_collectives() -> None:
    """What is built on byte tensors."""

    import torch
    import torch.distributed as dist

    group = new_group()
    rank, size = group.rank(), group.size()
    everyone: list[Any] = [None] * size
    dist.all_gather_object(everyone, {"rank": rank, "pad": "x" * 10 * rank}, group=group)
    assert [one["rank"] for one in everyone] == list(range(size))
    sent: list[Any] = [("from", rank)]
    dist.broadcast_object_list(sent, group_src=size - 1, group=group)
    assert sent == [("from", size - 1)]
    at_root: list[Any] | None = [None] * size if rank == 0 else None
    dist.gather_object(rank, at_root, group_dst=0, group=group)
    assert at_root == (list(range(size)) if rank == 0 else None)
    piece = torch.zeros(2)
    parts = [torch.full((2,), float(other)) for other in range(size)] if rank == 0 else None
    dist.scatter(piece, parts, group_src=0, group=group)
    assert piece.tolist() == [rank, rank]


def gather_in_place() -> None:
    """The input is a piece of the output, as engines do it."""

    import torch
    import torch.distributed as dist

    group = new_group()
    rank, size = group.rank(), group.size()
    flat = torch.zeros(2 * size)
    mine = flat[2 * rank : 2 * rank + 2].fill_(rank)
    version = flat._version
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(flat, mine, group=group, async_op=True).wait()
    assert flat.tolist() == [float(r) for r in range(size) for _ in range(2)]
    assert flat._version == version, "a collective is invisible to autograd"


def two_at_once_on_neighbours() -> None:
    """Fine: operations on separate parts of one storage, and two that only read the same part."""

    import torch
    import torch.distributed as dist

    group = new_group()
    flat = torch.ones(8)
    tickets = [dist.all_reduce(part, group=group, async_op=True) for part in (flat[:4], flat[4:])]
    shared = torch.ones(2)
    outputs = [[torch.zeros(2) for _ in range(group.size())] for _ in range(2)]
    tickets += [dist.all_gather(output, shared, group=group, async_op=True) for output in outputs]
    for ticket in reversed(tickets):
        ticket.wait()
    assert flat.tolist() == [float(group.size())] * 8


def switched_off() -> None:
    """``enabled=False`` is plain gloo."""

    import torch
    import torch.distributed as dist

    from tests.support import adversarial

    group = new_group(enabled=False)
    value = torch.ones(2)
    ticket = dist.all_reduce(value, group=group, async_op=True)
    assert not isinstance(ticket, adversarial.Ticket)
    ticket.wait()
    assert value.tolist() == [float(group.size())] * 2
    assert adversarial.unwaited() == []


def groups_by_default() -> list[str]:
    """Backends of groups made before, within and after ``new_groups``."""

    import deepspeed.comm
    import torch.distributed as dist

    from tests.support import adversarial

    ranks = list(range(dist.get_world_size()))
    made = [dist.new_group(ranks)]
    with adversarial.new_groups():
        made += [dist.new_group(ranks), deepspeed.comm.new_group(ranks)]
        made.append(dist.new_group(ranks, backend="gloo"))
    made.append(dist.new_group(ranks))
    return [dist.get_backend(group) for group in made]


def engine_losses(adversarially: bool, stage: int) -> list[float]:
    """Trains a tiny model under plain DeepSpeed, its own groups adversarial or not."""

    import contextlib

    import deepspeed
    import torch
    import torch.distributed as dist

    from tests.support import adversarial

    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 1.0,
    }
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(dist.get_rank()))
    with adversarial.new_groups() if adversarially else contextlib.nullcontext():
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    losses = []
    for _ in range(3):
        loss = engine(inputs).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
    assert (adversarial.issued() > 0) == adversarially
    adversarial.assert_all_waited()
    return losses


def wait_seconds(seed: int) -> list[float]:
    """How long each of some barriers waits by design."""

    import torch.distributed as dist

    group = new_group(seed=seed, max_delay_ms=30)
    tickets = [dist.barrier(group=group, async_op=True) for _ in range(3)]
    start = time.monotonic()
    for ticket in tickets:
        ticket.wait()
    delays = [ticket.delay_s for ticket in tickets]
    assert time.monotonic() - start >= sum(delays)
    return delays


@pytest.mark.parametrize("op", ALL_OPS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64"])
def test_every_op_delivers_at_the_wait_and_not_before(pool: Pool, op: str, dtype: str) -> None:
    """For floating-point and integer buffers."""
    pool(WORLD).run(op_delivers, op, dtype, split=False)


@pytest.mark.parametrize("op", ALL_OPS)
def test_subgroups(pool: Pool, op: str) -> None:
    """The ranks of a group are not the global ranks."""
    pool(WORLD).run(op_delivers, op, "float32", split=True)


@pytest.mark.parametrize("op", COLLECTIVES)
def test_a_group_of_one(pool: Pool, op: str) -> None:
    """Where a collective could return at once, it is as strict."""
    pool(1).run(op_delivers, op, "float32", split=False)


@pytest.mark.parametrize(
    "job",
    [
        reductions_and_blocking_calls,
        object_collectives,
        gather_in_place,
        two_at_once_on_neighbours,
        switched_off,
    ],
)
@pytest.mark.parametrize("world", [1, WORLD])
def test_legal_uses(pool: Pool, job: Callable[[], None], world: int) -> None:
    """No false alarms."""
    pool(world).run(job)


def test_uneven_splits(pool: Pool) -> None:
    """With split sizes on both sides."""
    pool(WORLD).run(uneven_all_to_all, WORLD)


def test_new_groups_by_default(pool: Pool) -> None:
    """A backend that is named is kept; nothing stays patched."""
    assert pool(WORLD).run(groups_by_default)[0] == ["gloo", "adversarial", "adversarial", "gloo", "gloo"]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_deepspeed_engine_trains_the_same(pool: Pool, stage: int) -> None:
    """DeepSpeed runs on such groups, and gets the same numbers, bit by bit."""
    workers = pool(WORLD)
    assert workers.run(engine_losses, True, stage) == workers.run(engine_losses, False, stage)


def test_delays_repeat_with_the_seed_and_differ_by_rank(pool: Pool) -> None:
    """Else a failure could not be repeated."""
    first = pool(WORLD).run(wait_seconds, 5)
    assert pool(WORLD).run(wait_seconds, 5) == first
    assert pool(WORLD).run(wait_seconds, 6) != first
    assert len({delay for delays in first for delay in delays}) == 3 * WORLD
