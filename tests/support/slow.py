"""A process group with a slow link: gloo whose every collective takes a fixed time longer.

    mesh.GROUP_BACKEND = "slow"; slow.configure(0.02)

The time passes beside the program, so it is hidden by whoever waits late and exposed by whoever waits at once.
"""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tests.support import worker
from tests.support.adversarial import AdversarialGroup, Start

NAME = "slow"
_delay_s = 0.0


def configure(delay_s: float = 0.0) -> None:
    """Set the delay of all groups of this rank."""
    global _delay_s
    _delay_s = delay_s


class SlowWork(dist.Work):
    """Lands when the operation has finished and the delay since its issue is over."""

    def __init__(self, work: Any) -> None:
        super().__init__()
        self._future: torch.futures.Future[None] = torch.futures.Future()
        self._ready = time.monotonic() + _delay_s
        threading.Thread(target=self._land, args=(work,), daemon=True).start()

    def _land(self, work: Any) -> None:
        work.wait()
        time.sleep(max(self._ready - time.monotonic(), 0.0))
        self._future.set_result(None)

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._future.wait()
        return True

    def is_completed(self) -> bool:
        return self._future.done()

    def get_future(self) -> torch.futures.Future[None]:
        return self._future


class SlowGroup(AdversarialGroup):
    """The adversarial group's translation of every call to gloo, without what is adversarial about it."""

    def getBackendName(self) -> str:
        return NAME

    def _in_place(self, op: str, tensors: list[torch.Tensor], start: Start, deliver: bool = True) -> Any:
        return SlowWork(start(tensors, tensors))

    def _issue(self, op: str, inputs: list[torch.Tensor], outputs: list[torch.Tensor], start: Start) -> Any:
        return SlowWork(start(inputs, outputs))


dist.Backend.register_backend(NAME, SlowGroup, devices=["cpu"])
worker.after_job.append(configure)
