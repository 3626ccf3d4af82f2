"""Two clocks: the host's, and the accelerator's, whose stamps are events on the current stream.

Neither makes the host wait while training runs. Device events are only read once the trace is over.
"""

from __future__ import annotations

import time
from typing import Any, Protocol

Stamp = Any
"""A moment as its clock keeps it: seconds of the host, or an event on a stream."""


class Clock(Protocol):
    """Takes stamps now, reads them after `settle`."""

    name: str
    started: float
    """Unix time at which the clock was made, to compare ranks with."""

    def stamp(self) -> Stamp: ...

    def settle(self) -> None:
        """Make all stamps readable. May wait for the device: not while training runs."""
        ...

    def seconds(self, stamp: Stamp) -> float:
        """Since the clock was made."""
        ...


class HostClock:
    """The host's monotonic clock: where collectives block the host (gloo), this is the time that they cost."""

    name = "host"

    def __init__(self) -> None:
        self.started = time.time()
        self._zero = time.perf_counter()

    def stamp(self) -> Stamp:
        return time.perf_counter()

    def settle(self) -> None:
        pass

    def seconds(self, stamp: Stamp) -> float:
        return float(stamp - self._zero)


class DeviceClock:
    """Events on the current stream: a stamp is the moment at which the *device* gets there.

    Around a wait they show how long the stream stood still. In the callback of a collective's future the
    current stream is one that waits for the collective, so that a stamp there is its end.
    """

    name = "device"

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator
        self._zero = self.stamp()
        accelerator.synchronize()  # once, before the first step, so that the two clocks have a common zero
        self.started = time.time()

    def stamp(self) -> Stamp:
        event = self._accelerator.Event(enable_timing=True)
        event.record()
        return event

    def settle(self) -> None:
        self._accelerator.synchronize()

    def seconds(self, stamp: Stamp) -> float:
        return float(self._zero.elapsed_time(stamp)) / 1e3


def clock_for(device_type: str) -> Clock:
    """The clock of the place where the engine computes."""
    if device_type == "cpu":
        return HostClock()
    from deepspeed.accelerator import get_accelerator

    return DeviceClock(get_accelerator())
