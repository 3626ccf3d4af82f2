"""The pool of forked workers when ranks raise, hang or die."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any, NoReturn

import pytest

from tests.support.pool import RankError, WorkerPool
from tests.tooling.test_pool import pid, rested, sum_over_ranks

Pool = Callable[[int], WorkerPool]
"""The fixtures: from a world size to a pool."""


class AwkwardError(Exception):
    """Pickles, but does not unpickle: its __init__ wants more than its args."""

    def __init__(self, left: int, right: int) -> None:
        super().__init__(f"{left} is not {right}")


def raise_on(*ranks: int, then_meet: bool = False) -> str:
    """Raises on ``ranks``; elsewhere returns, or with ``then_meet`` waits for the others in a collective."""

    import torch.distributed as dist

    if dist.get_rank() in ranks:
        raise ValueError(f"planted on {dist.get_rank()}")
    if then_meet:
        sum_over_ranks()
    return "fine"


def raise_awkwardly() -> NoReturn:
    """Raises what cannot be unpickled."""
    raise AwkwardError(1, 2)


def return_a_lambda() -> Any:
    """Returns what cannot be pickled."""
    return lambda: None


def hang_on(rank: int) -> str:
    """Hangs on ``rank``, returns elsewhere."""

    import torch.distributed as dist

    if dist.get_rank() == rank:
        sleep_where_the_stacks_show_it()
    return "fine"


def sleep_where_the_stacks_show_it() -> None:
    """Hangs."""
    time.sleep(600)


def die_on(rank: int) -> str:
    """Kills ``rank``; the others wait for it in a collective."""

    import torch.distributed as dist

    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    sum_over_ranks()
    return "fine"


def all_reduce_alone(rank: int) -> None:
    """Issues a collective that the other ranks never join, and does not wait for it."""

    import torch
    import torch.distributed as dist

    if dist.get_rank() == rank:
        dist.all_reduce(torch.ones(1), async_op=True)


def test_an_error_on_one_rank_is_reported_and_the_pool_lives_on(pool: Pool) -> None:
    """All ranks answered, so the pool is sound."""
    workers = rested(pool, 4)
    with pytest.raises(RankError, match=r"rank 2: builtins\.ValueError: planted on 2") as caught:
        workers.run(raise_on, 2)
    assert caught.value.rank == 2
    assert caught.value.type_name == "builtins.ValueError"
    assert "in raise_on" in caught.value.remote_traceback
    assert workers.alive
    assert pool(4) is workers
    assert workers.run(raise_on) == ["fine"] * 4


def test_an_error_that_leaves_others_waiting_ends_the_pool(pool: Pool) -> None:
    """And the next ``pool()`` forks another."""
    workers = pool(4)
    start = time.monotonic()
    with pytest.raises(RankError) as caught:
        workers.run(raise_on, 1, then_meet=True)
    assert time.monotonic() - start < 8, "waiting ranks get a short grace, not the whole timeout"
    assert caught.value.rank == 1
    assert "rank 0: hung" in str(caught.value)
    assert "in sum_over_ranks" in str(caught.value), "the stacks of the waiting ranks"
    assert not workers.alive
    with pytest.raises(RuntimeError, match="call pool"):
        workers.run(pid)
    assert pool(4) is not workers
    assert len(pool(4).run(pid)) == 4


def test_all_ranks_may_raise(pool: Pool) -> None:
    """In one error, or as a list."""
    workers = pool(4)
    with pytest.raises(RankError) as caught:
        workers.run(raise_on, 0, 1, 2, 3)
    assert all(f"planted on {rank}" in str(caught.value) for rank in range(4))
    found = workers.run(raise_on, 0, 1, 3, return_exceptions=True)
    assert [type(one) for one in found] == [ValueError, ValueError, str, ValueError]
    assert str(found[3]) == "planted on 3"
    assert workers.alive


def test_an_exception_that_cannot_travel_is_described(pool: Pool) -> None:
    """By its type and message."""
    for error in pool(4).run(raise_awkwardly, return_exceptions=True):
        assert isinstance(error, RankError)
        assert error.type_name == "tests.tooling.test_pool_failures.AwkwardError"
        assert error.remote_message == "1 is not 2"


def test_a_value_that_cannot_travel_is_an_error_and_no_hang(pool: Pool) -> None:
    """It fails on the worker, in the job."""
    with pytest.raises(RankError, match="return_a_lambda"):
        pool(4).run(return_a_lambda, timeout=5)
    assert pool(4).alive


def test_a_hang_is_killed_within_the_timeout_with_its_stacks(fresh_pool: Pool) -> None:
    """By process id, all ranks of the pool."""
    workers = fresh_pool(2)
    pids = workers.pids
    start = time.monotonic()
    with pytest.raises(RankError) as caught:
        workers.run(hang_on, 1, timeout=1)
    assert time.monotonic() - start < 4
    assert (caught.value.rank, caught.value.type_name) == (1, "hung")
    assert "sleep_where_the_stacks_show_it" in caught.value.remote_traceback
    assert not workers.alive
    assert not any(is_running(one) for one in pids)


def test_a_worker_s_own_watchdog_ends_it(fresh_pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With no help from the parent: its patience is longer here than the worker's."""

    from tests.support import worker

    monkeypatch.setattr(worker, "WATCHDOG_MARGIN_S", -2.0)  # inherited by the fork
    with pytest.raises(RankError, match="exit code 1") as caught:
        fresh_pool(1).run(hang_on, 0, timeout=3)
    assert "sleep_where_the_stacks_show_it" in caught.value.remote_traceback


def test_a_killed_rank_is_named(fresh_pool: Pool) -> None:
    """Not the ranks whose collective failed because of it."""
    with pytest.raises(RankError, match=r"rank 1: died: .*SIGKILL") as caught:
        fresh_pool(3).run(die_on, 1)
    assert caught.value.rank == 1


def test_workers_do_not_outlive_their_parent(fresh_pool: Pool) -> None:
    """A child of this process makes a pool and is killed: its workers, one of them busy, go by themselves."""
    fresh_pool(1)  # an open pool whose pipe ends the child inherits
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        workers = WorkerPool(2)
        os.write(send, " ".join(map(str, workers.pids)).encode())
        workers.run(hang_on, 1, timeout=600)
    os.close(send)
    pids = [int(one) for one in os.read(receive, 100).split()]
    os.close(receive)
    assert len(pids) == 2
    assert all(is_running(one) for one in pids)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    deadline = time.monotonic() + 5
    while any(is_running(one) for one in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(is_running(one) for one in pids)


def is_running(process: int) -> bool:
    """False for a process that is gone or a zombie that init has not collected yet."""
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_an_unmatched_collective_is_found_in_the_job_that_left_it(
    fresh_pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not in the next test."""

    from tests.support import worker

    monkeypatch.setattr(worker, "SETTLE_TIMEOUT_S", 3.0)
    workers = fresh_pool(2)
    with pytest.raises(RankError, match="out of step"):
        workers.run(all_reduce_alone, 0)
    assert not workers.alive
