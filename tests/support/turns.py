"""Two pytest processes beside each other, and tests that want the machine for themselves."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PROCESSES = 2
"""For the whole suite: while ranks wait for each other, or a reference runs in one process, a core would be idle."""


def beside_others() -> bool:
    """Whether this is one of several pytest processes, which pytest-xdist started."""
    return "PYTEST_XDIST_WORKER" in os.environ


@contextmanager
def turn(folder: Path, alone: bool) -> Iterator[None]:
    """Holds the machine while one test runs: shared with the tests of other processes, or ``alone``.

    folder: where the processes' locks are. Who waits for the machine holds the gate, so that no other process
    begins another test meanwhile.
    """
    with (folder / "gate").open("w") as gate, (folder / "machine").open("w") as machine:
        fcntl.flock(gate, fcntl.LOCK_EX)
        fcntl.flock(machine, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(gate, fcntl.LOCK_UN)
        try:
            yield
        finally:  # not by closing: a pool that was forked meanwhile keeps its copy of the file open
            fcntl.flock(machine, fcntl.LOCK_UN)
