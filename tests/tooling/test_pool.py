"""The pool of forked workers: results by rank, persistence, and that jobs do not leak into one another."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.pool import WorkerPool

Pool = Callable[[int], WorkerPool]
"""The fixtures: from a world size to a pool."""


def whoami(**extra: Any) -> tuple[int, dict[str, Any]]:
    """The rank, and what the job was given."""

    import torch.distributed as dist

    return dist.get_rank(), extra


def pid() -> int:
    """The process id."""
    return os.getpid()


def rested(pool: Pool, world_size: int) -> WorkerPool:
    """The cached pool, after a job that has found out whether earlier tests wore it out."""
    pool(world_size).run(pid)
    return pool(world_size)


def launch_environment() -> dict[str, str]:
    """What a launcher sets."""
    ranks = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    names = (*ranks, "MASTER_ADDR", "MASTER_PORT", "DS_ACCELERATOR", "TORCH_EXTENSIONS_DIR")
    return {name: os.environ[name] for name in names}


def sum_over_ranks() -> Any:
    """An AllReduce over the default group; returns a tensor."""

    import torch
    import torch.distributed as dist

    value = torch.arange(4.0) + dist.get_rank()
    dist.all_reduce(value)
    return value


def leave_a_mess() -> int:
    """Makes groups, changes the environment, draws random numbers; returns how many groups were there."""

    import torch
    import torch.distributed as dist

    before = len(dist.distributed_c10d._world.pg_map)
    for _ in range(3):
        dist.new_group(list(range(dist.get_world_size())))
    os.environ["AMSP_LEFT_BEHIND"] = "1"
    torch.rand(3)
    return before


def threads() -> int:
    """How many threads the process has, once all groups of earlier jobs are closed."""

    from tests.support.leftovers import wait_until_closed

    wait_until_closed()
    # A thread that was joined may be among the tasks for a moment longer.
    counts = []
    for _ in range(20):
        counts.append(len(os.listdir("/proc/self/task")))
        time.sleep(0.01)
    return min(counts)


KEPT: list[Any] = []


def keep_groups(count: int) -> None:
    """Makes groups that can never be collected."""

    import torch.distributed as dist

    KEPT.extend(dist.new_group(list(range(dist.get_world_size()))) for _ in range(count))


def keep_objects() -> None:
    """As a job that imports a compiler does."""
    KEPT.extend([] for _ in range(1_000_000))


def state_of_the_worker() -> tuple[int, bool, float]:
    """How many groups there are, whether the environment is dirty, a random number."""

    import torch
    import torch.distributed as dist

    groups = len(dist.distributed_c10d._world.pg_map)
    return groups, "AMSP_LEFT_BEHIND" in os.environ, float(torch.rand(()))


def engine_losses(steps: int) -> tuple[str, list[float], float]:
    """Trains a tiny model under DeepSpeed's ZeRO-1: engine class, losses, seconds."""

    import deepspeed
    import torch
    import torch.distributed as dist

    start = time.monotonic()
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": 1},
        "gradient_clipping": 1.0,
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(dist.get_rank()))
    losses = []
    for _ in range(steps):
        loss = engine(inputs).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
    engine.destroy()
    return type(engine).__name__, losses, time.monotonic() - start


def test_values_come_back_by_rank(pool: Pool) -> None:
    """Arguments go to every rank, ``per_rank`` to one each."""
    per_rank = [{"mine": 10 * rank} for rank in range(4)]
    assert pool(4).run(whoami, per_rank=per_rank, shared=1) == [
        (rank, {"mine": 10 * rank, "shared": 1}) for rank in range(4)
    ]


def test_per_rank_must_match_the_world_size(pool: Pool) -> None:
    """Refused before anything is sent."""
    with pytest.raises(ValueError, match="per_rank needs 4 dicts, one a rank, got 1"):
        pool(4).run(whoami, per_rank=[{}])
    assert pool(4).alive


def test_the_environment_is_a_launcher_s(pool: Pool) -> None:
    """DeepSpeed reads its ranks there."""
    found = pool(4).run(launch_environment)
    assert [one["RANK"] for one in found] == [one["LOCAL_RANK"] for one in found] == ["0", "1", "2", "3"]
    assert {one["WORLD_SIZE"] for one in found} == {one["LOCAL_WORLD_SIZE"] for one in found} == {"4"}
    assert len({(one["MASTER_ADDR"], one["MASTER_PORT"], one["TORCH_EXTENSIONS_DIR"]) for one in found}) == 1
    assert {one["DS_ACCELERATOR"] for one in found} == {"cpu"}


def test_collectives_work_and_processes_persist(pool: Pool) -> None:
    """The same processes serve job after job."""
    pids = rested(pool, 4).run(pid)
    for result in pool(4).run(sum_over_ranks):
        assert result.tolist() == [6.0, 10.0, 14.0, 18.0]
    assert pool(4).run(pid) == pids == pool(4).pids
    assert os.getpid() not in pids


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_parent_that_ran_autograd_can_fork(fresh_pool: Pool, world_size: int) -> None:
    """Reference runs in the parent come before the first pool as well as after."""

    import torch

    torch.nn.Linear(64, 64)(torch.ones(64, 64)).sum().backward()
    name, losses, _ = fresh_pool(world_size).run(engine_losses, 2)[0]
    assert name == "DeepSpeedEngine"
    assert losses[1] < losses[0]


def test_a_job_leaves_nothing_behind(pool: Pool) -> None:
    """Groups, environment and random state are as before it."""
    clean = pool(4).run(state_of_the_worker)
    assert clean == [clean[0]] * 4
    assert pool(4).run(leave_a_mess) == [1] * 4
    assert pool(4).run(state_of_the_worker) == clean
    assert clean[0][:2] == (1, False)


def test_groups_that_a_job_leaves_are_closed(fresh_pool: Pool) -> None:
    """Each would have three threads for ever."""
    workers = fresh_pool(2)
    before = workers.run(threads)
    workers.run(leave_a_mess)
    assert workers.run(threads) == before
    assert not workers.worn


def test_a_pool_that_keeps_much_is_replaced(pool: Pool) -> None:
    """Groups that do not close, and what makes every collection slow."""
    for job, arguments in ((keep_groups, (10,)), (keep_objects, ())):
        workers = pool(2)
        workers.run(job, *arguments)
        workers.run(pid)  # groups had until here to close
        assert workers.worn
        assert pool(2) is not workers
        assert not workers.alive


def test_at_most_two_pools_live(pool: Pool) -> None:
    """Each rank costs a few hundred MB."""
    four = pool(4)
    two = pool(2)
    assert pool(4) is four
    pool(3)
    assert four.alive
    assert not two.alive, "the least recently used one makes room"


def test_a_deepspeed_engine_trains_quickly(pool: Pool) -> None:
    """And the same way again."""
    workers = rested(pool, 4)
    first = workers.run(engine_losses, 3)
    again = workers.run(engine_losses, 3)
    for rank in range(4):
        name, losses, _ = first[rank]
        assert name == "DeepSpeedEngine"
        assert losses[-1] < losses[0]
        assert again[rank][1] == losses, "nothing leaks from one job into the next"
    assert max(seconds for _, _, seconds in again) < 3, "lazy imports would take 12 s"
