"""Settings for every test, and the fixtures that hand out pools of gloo workers."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator

# Before torch is imported anywhere: workers are forked from this process, and the child of a process with an
# OpenMP thread pool hangs in its first parallel region. DeepSpeed picks its accelerator at import.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("DS_ACCELERATOR", "cpu")

import pytest

from tests.support import pool as pool_module
from tests.support.turns import PROCESSES, beside_others, turn


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """The whole suite runs in two processes, file by file, where pytest-xdist is installed; `-n 0` says no."""
    whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    undecided = config.pluginmanager.hasplugin("xdist") and config.option.numprocesses is None
    if whole and undecided and not beside_others() and not config.option.usepdb and (os.cpu_count() or 1) > 1:
        config.option.numprocesses = PROCESSES
        config.option.dist = "loadfile"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Tests marked `alone` wait until no other process runs a test, and the others wait for them."""
    if not beside_others():
        return (yield)
    with turn(item.config.cache.mkdir("turns"), item.get_closest_marker("alone") is not None):
        return (yield)


@pytest.fixture(scope="session", autouse=True)
def _close_pools_at_the_end() -> Iterator[None]:
    """Closes every pool that is still alive when the session ends."""
    yield
    pool_module.close_all()


@pytest.fixture
def pool() -> Callable[[int], pool_module.WorkerPool]:
    """``pool(world_size)``: the cached pool of that size (see ``tests.support.pool``)."""
    return pool_module.pool


@pytest.fixture
def fresh_pool() -> Iterator[Callable[[int], pool_module.WorkerPool]]:
    """``fresh_pool(world_size)``: a pool of this test's own, closed at its end; the test may kill ranks."""
    made: list[pool_module.WorkerPool] = []

    def make(world_size: int) -> pool_module.WorkerPool:
        made.append(pool_module.fresh(world_size))
        return made[-1]

    yield make
    for workers in made:
        workers.close()
