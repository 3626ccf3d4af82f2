"""DeepSpeed's wall_clock_breakdown with this package's phases: what was waited for, by kind, and the update."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from deepspeed_amsp.trace.reading import KINDS

UPDATE = "optimizer_step"
"""As in the lines of DeepSpeed's own ZeRO optimizers: the owners' update, without norm and publishing."""


class Breakdown:
    """Adds up, from the end of a step to that of the next, on this rank.

    Args:
        timers: DeepSpeed's: of the host on CPUs, else pairs of events on the current stream. Starting and stopping
            one never waits; reading waits for the device.
    """

    def __init__(self, timers: Any) -> None:
        self._timers = timers
        self.last_step: dict[str, float] = {}
        """Exposed milliseconds by kind; empty before the first step."""
        self._inside: Counter[str] = Counter()
        # With a comms_logger the threads that issue later stages wait, too.
        self._lock = threading.Lock()
        for name in (*map(exposed, KINDS), UPDATE):
            timers(name).reset()  # there from the first line on

    @contextmanager
    def timing(self, name: str) -> Iterator[None]:
        """The block counts for the timer ``name``; blocks of one name inside or beside each other count once."""
        with self._lock:
            self._inside[name] += 1
            if self._inside[name] == 1:
                self._timers(name).start()
        try:
            yield
        finally:
            with self._lock:
                self._inside[name] -= 1
                if not self._inside[name]:
                    self._timers(name).stop()

    def exposed(self, kind: str) -> AbstractContextManager[None]:
        """In the block the computation stands still for collectives of this kind."""
        return self.timing(exposed(kind))

    def step_over(self) -> None:
        """Print DeepSpeed's kind of line on rank 0, and begin anew."""
        with self._lock:
            self.last_step = {kind: self._timers(exposed(kind)).elapsed(reset=False) for kind in KINDS}
            self._timers.log([*map(exposed, KINDS), UPDATE])


def exposed(kind: str) -> str:
    """The name of the timer that counts what was exposed of ``kind``."""
    return f"exposed_{kind}"
