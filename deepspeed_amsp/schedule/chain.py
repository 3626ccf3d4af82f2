"""Publishing in flight: all stages are issued without the host's main thread.

A rank may read a parameter, or not, while others do something else (rank 0 alone writes a log), so the second
stage of a publish must not wait for somebody to come by: the ranks that it reaches would wait for it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from deepspeed.accelerator import get_accelerator

from deepspeed_amsp.comm import Communicator, Ticket, waits_on_host
from deepspeed_amsp.schedule.pipeline import Stages, ThreadPipeline

STAGES = 2
"""Across nodes, then in node."""


class Chain(Protocol):
    """Runs stages in the order in which they were started."""

    def start(self, key: int, stages: Stages) -> None:
        """Issue the first stage now and see to it that the others follow."""
        ...

    def finish(self, key: int) -> None:
        """Wait until the last stage has arrived. Nothing to do for a key that was not started."""
        ...

    def close(self) -> None: ...


class DirectChain:
    """Everything is issued at once; a stage waits for the one before on a stream of its own, if there are streams."""

    def __init__(self, stages: int, stream: Any = None) -> None:
        self._stages = stages
        self._stream = stream
        self._last: dict[int, Sequence[Ticket]] = {}

    def start(self, key: int, stages: Stages) -> None:
        if self._stream is None:
            self._last[key] = self._issue(stages)
            return
        accelerator = get_accelerator()
        self._stream.wait_stream(accelerator.current_stream())
        with accelerator.stream(self._stream):
            self._last[key] = self._issue(stages)

    def finish(self, key: int) -> None:
        for ticket in self._last.pop(key, ()):
            ticket.wait()

    def close(self) -> None:
        self._last.clear()

    def _issue(self, stages: Stages) -> Sequence[Ticket]:
        """Every stage behind the one before; the last one is the reader's to wait for."""
        tickets = next(stages)
        for _ in range(self._stages - 1):
            for ticket in tickets:
                ticket.wait(aside=self._stream is not None)
            tickets = next(stages)
        return tickets


def make_chain(comm: Communicator, device: torch.device, staged: bool, merged: bool) -> Chain:
    """The chain for one or two stages on ``device``.

    Where communicators are ``merged`` no thread may issue: its calls would fall among the host's in any order.
    """
    if not staged:
        return DirectChain(stages=1)
    if not waits_on_host(device):
        return DirectChain(STAGES, get_accelerator().Stream())
    return DirectChain(STAGES) if merged else ThreadPipeline(comm, [True] * STAGES, sys.maxsize, "amsp-publish")
