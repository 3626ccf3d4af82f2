"""Training one strategy on one rank with the clock running."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator

from deepspeed_amsp.comm import from_every_rank
from deepspeed_amsp.compare.cluster import local_counters
from deepspeed_amsp.compare.models import batches, vocabulary
from deepspeed_amsp.compare.strategies import trainer_for
from deepspeed_amsp.compare.strategies.base import Held, Trainer, Work
from deepspeed_amsp.trace.reading import StepSummary, Trip, read_trips, summarise
from deepspeed_amsp.trace.recorder import Recorder

KINDS = {"gather": ("gather",), "reduce": ("param_reduce", "grad_reduce", "grad_gather"), "publish": ("publish",)}
"""What tables call exposed, from the kinds of a trace."""

Bar = dict[str, Any]
"""{"row", "name", "start_s", "end_s"}."""


@dataclass
class Clock:
    """Marks of one rank. bars: of the last step that was measured."""

    steps: list[float] = field(default_factory=list)
    phases: dict[str, list[float]] = field(default_factory=dict)
    bars: list[Bar] = field(default_factory=list)

    def begin_step(self) -> None:
        self.steps.append(time.perf_counter())
        self.bars = []

    def spent(self, phase: str, since: float) -> None:
        """A phase is over."""
        now = time.perf_counter()
        self.phases.setdefault(phase, []).append(now - since)
        start = self.steps[-1]
        self.bars.append({"row": phase, "name": phase, "start_s": since - start, "end_s": now - start})


def measure(work: Work, warm_up: int, steps: int, rank: int, look: bool) -> dict[str, Any] | None:
    """Build, train, take down. What rank 0 reports, None on others. Collective.

    A step lasts from its start to that of the next, so what a strategy publishes under the next forward is where it
    belongs.

    Args:
        look: take one or two steps more, to count bytes and, in a strategy that we can look into, to record.
    """
    before = _resident()
    trainer, data = trainer_for(work), Data(work, rank)
    clock, losses = Clock(), []
    held: Held | None = None
    from_every_rank(None)
    for step in range(warm_up + steps):
        clock.begin_step()
        loss, held = train_step(trainer, clock, data.step(step), ask=step == warm_up + steps - 1)
        losses.append(loss)
    clock.steps.append(time.perf_counter())
    trainer.settle()
    closer = _look(trainer, data, warm_up + steps) if look else {}
    peak = _peak() - before
    trainer.close()
    assert held is not None
    mine: dict[str, Any] = {
        "steps": [b - a for a, b in pairwise(clock.steps)],
        "losses": [float(loss) for loss in losses],
        "sent": closer.pop("sent", None),
        "exposed": closer.pop("exposed", None),
        "memory": {**asdict(held), "peak": max(peak, 0)},
    }
    everyone = from_every_rank(mine)
    if rank:
        return None
    count = work.micro_batches
    of_micro_batches = {
        name: sum(times[-steps * count :]) / steps for name, times in clock.phases.items() if name != "update"
    }
    return {
        "step_s": [mean(times) for times in zip(*(one["steps"][warm_up:] for one in everyone), strict=True)],
        "phases_s": {**of_micro_batches, "update": mean(clock.phases["update"][-steps:])},
        "sent_bytes_per_node": None if mine["sent"] is None else max(one["sent"] for one in everyone),
        "losses": [mean(values) for values in zip(*(one["losses"] for one in everyone), strict=True)],
        "memory": max((one["memory"] for one in everyone), key=lambda parts: parts["peak"]),
        "exposed_s": _mean_of_ranks([one["exposed"] for one in everyone]),
        "timeline": clock.bars,
        **closer,
    }


class Data:
    """This rank's micro-batches."""

    def __init__(self, work: Work, rank: int) -> None:
        self._work, self._rank = work, rank
        self._vocab = vocabulary(work.config.model)

    def step(self, number: int) -> list[torch.Tensor]:
        """Those of one step."""
        work = self._work
        made = batches(
            work.config.model, self._vocab, work.config.training.seed, self._rank, number, work.micro_batches
        )
        return [batch.to(work.device) for batch in made]


def train_step(
    trainer: Trainer, clock: Clock, data: list[torch.Tensor], ask: bool = False
) -> tuple[torch.Tensor, Held | None]:
    """One step; the mean loss of its micro-batches, and what the rank held before the update if ``ask``."""
    losses, held = [], None
    for index, batch in enumerate(data):
        last = index == len(data) - 1
        began = time.perf_counter()
        loss = trainer.forward(batch, last)
        clock.spent("forward", began)
        began = time.perf_counter()
        trainer.backward(loss, last)
        clock.spent("backward", began)
        losses.append(loss.detach())
        if last and ask:
            held = trainer.held()
        began = time.perf_counter()
        trainer.step(last)
        if last:
            get_accelerator().synchronize()
            clock.spent("update", began)
    return torch.stack(losses).float().mean(), held


def _look(trainer: Trainer, data: Data, step: int) -> dict[str, Any]:
    """Bytes that this rank's node sends in a step, all that belongs to it; of a strategy that we can look into also
    the seconds exposed by kind, means over ranks, and rank 0's timeline. Nothing is in flight before or after."""
    watch = getattr(trainer, "looked_into", None)
    count = 1 if watch is None else 2  # publishes of the first step are waited for in the second
    clock = Clock()
    bars: list[Bar] = []
    from_every_rank(None)
    before = _sent()
    with watch() if watch is not None else nullcontext() as recorder:
        for number in range(step, step + count):
            clock.begin_step()
            train_step(trainer, clock, data.step(number))
            bars = bars or clock.bars
        trainer.settle()
        from_every_rank(None)
        after = _sent()
    found: dict[str, Any] = {} if before is None or after is None else {"sent": (after - before) / count}
    if recorder is not None:
        trips = read_trips(recorder)
        found |= {
            "exposed": _exposed(summarise(recorder, trips)[0]),
            "timeline": [*bars, *_flights(recorder, trips)],
        }
    return found


def _exposed(step: StepSummary) -> dict[str, float]:
    return {name: sum(step.exposed.get(kind, 0.0) for kind in kinds) / 1e3 for name, kinds in KINDS.items()}


def _flights(recorder: Recorder, trips: Sequence[Trip]) -> list[Bar]:
    """Collectives that were in flight in the first step of a trace."""
    start, end = (recorder.clock.seconds(stamp) for stamp in recorder.boundaries[:2])
    names = {kind: name for name, kinds in KINDS.items() for kind in kinds}
    return [
        {
            "row": names[trip.entry.purpose.value],
            "name": trip.entry.label,
            "start_s": max(trip.issued, start) - start,
            "end_s": min(trip.done, end) - start,
        }
        for trip in trips
        if trip.entry.purpose.value in names and trip.issued < end and trip.done > start
    ]


def _mean_of_ranks(exposed: Sequence[dict[str, float] | None]) -> dict[str, float] | None:
    known = [one for one in exposed if one is not None]
    return {kind: mean(one[kind] for one in known) for kind in KINDS} if known else None


def _sent() -> int | None:
    """Bytes that this rank's node has sent to others so far; None where nodes have no NIC of their own."""
    counted = local_counters().get("e0")
    return None if counted is None else counted.sent


# ---- memory ------------------------------------------------------------------------------------------------


def _resident() -> int:
    """Bytes before a strategy is built; peaks count from now on."""
    gc.collect()
    accelerator = get_accelerator()
    if accelerator.device_name() != "cpu":
        accelerator.empty_cache()
        accelerator.reset_peak_memory_stats()
        return int(accelerator.memory_allocated())
    _trim()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # VmHWM starts again from here
    return _status("VmRSS")


def _peak() -> int:
    accelerator = get_accelerator()
    if accelerator.device_name() != "cpu":
        return int(accelerator.max_memory_allocated())
    return _status("VmHWM")


def _status(name: str) -> int:
    """A field of /proc/self/status, in bytes."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(name):
            return 1024 * int(line.split()[1])
    return 0


def _trim() -> None:
    """Give freed memory back to the system, where the C library can."""
    import ctypes

    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
