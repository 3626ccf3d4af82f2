"""What a rank does in the tests of tracing."""

from __future__ import annotations

import time
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.support import slow
from tests.support.jobs import Case, Report, make_engine, report_of, train_step

Fact = tuple[int, str, str, str, int]
"""Of a collective: sequence number, operation, purpose, label, bytes."""


@dataclass
class Traced:
    """A training run in which ``steps`` steps after ``skip`` were traced."""

    report: Report
    logs: list[list[Fact]]
    lines: list[str]
    joined: int


def facts(engine: Any) -> list[Fact]:
    if engine.amsp.plan.hierarchical:
        engine.optimizer.wait_for_parameters()  # until then second stages of the step are still being issued
    return [(e.seq, e.op, e.purpose.value, e.label, e.bytes) for e in engine.amsp.comm.last_step]


def train_traced(case: Case, out: Path, skip: int, steps: int) -> Traced:
    """Train ``case.steps`` steps like `tests.support.jobs.train`, some of them traced by the context."""
    engine = make_engine(case)
    losses, norms, logs = [], [], []

    def step(number: int) -> None:
        losses.append(train_step(engine, case, number))
        norms.append(float(engine.get_global_grad_norm()))
        logs.append(facts(engine))

    for number in range(skip):
        step(number)
    with engine.amsp.tracing(out) as session:
        for number in range(skip, skip + steps):
            step(number)
    for number in range(skip + steps, case.steps):
        step(number)
    assert engine.amsp.comm.recorder is None
    report = report_of(engine, losses, norms)
    engine.destroy()
    return Traced(report, logs[skip : skip + steps], session.outcome.lines, session.outcome.joined)


def train_requested(case: Case, out: Path, skip: int, steps: int, keep_going: bool) -> tuple[int, list[list[Fact]]]:
    """The same as `amsp trace` asks for it: (steps begun, collectives of every step that was finished)."""
    from deepspeed_amsp.trace.session import TraceComplete, TraceRequest, requests

    request = TraceRequest(steps, skip, out, keep_going, report=lambda session, outcome: None)
    requests.append(request)
    begun, logs = 0, []
    try:
        engine = make_engine(case)
        for step in range(case.steps):
            begun += 1
            train_step(engine, case, step)
            logs.append(facts(engine))
        engine.destroy()
    except TraceComplete:
        engine.destroy()
    finally:
        requests.clear()
    assert request.done
    return begun, logs


class Pause(torch.autograd.Function):
    """Takes its time in forward and twice that in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return gradients[0], None


class Paused(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = Pause.apply(layer(x), self.seconds)
        return x


def exposure(amsp: dict[str, Any], stage: int, out: Path, delay_s: float, compute_s: float) -> float:
    """Share of the time with communication in flight in which it was exposed, two steps, on this rank."""
    import deepspeed

    from deepspeed_amsp import mesh

    mesh.GROUP_BACKEND = slow.NAME
    slow.configure(delay_s)
    torch.manual_seed(0)
    model = Paused(compute_s)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "steps_per_print": 10**9,
        "amsp": amsp,
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)

    def step() -> None:
        engine.backward(engine(torch.ones(2, 16)).square().mean())
        engine.step()

    step()
    with engine.amsp.tracing(out) as session:
        step()
        step()
        engine(torch.ones(2, 16))  # where the last publishes are waited for
    engine.destroy()
    from deepspeed_amsp.trace.reading import read_trips, seconds_in_flight

    trips = [trip for trip in read_trips(session.recorder) if trip.step < 3]
    return sum(trip.exposed for trip in trips) / seconds_in_flight(trips)


def buffers_live_on(recorded: bool) -> bool:
    """Whether a buffer outlives the wait for its collective although only the ticket and the recorder stay."""
    from deepspeed_amsp.comm import Communicator
    from deepspeed_amsp.mesh import Group, Purpose
    from deepspeed_amsp.trace.clock import HostClock
    from deepspeed_amsp.trace.recorder import Recorder

    comm = Communicator()
    if recorded:
        comm.recorder = Recorder(HostClock())
    world = tuple(range(dist.get_world_size()))
    group = Group(Purpose.GATHER, "param", world, dist.get_rank(), dist.group.WORLD)
    full, shard = torch.zeros(64 * len(world)), torch.ones(64)
    references = [weakref.ref(full), weakref.ref(shard)]
    ticket = comm.all_gather(group, shard, full, "unit")
    ticket.wait()
    assert full.sum() == 64 * len(world)
    del full, shard
    if recorded:
        assert comm.recorder is not None and len(comm.recorder.flights[0].landings) == 1
    # gloo's thread lets go of its work a moment after the wait.
    deadline = time.monotonic() + 5
    while any(reference() is not None for reference in references) and time.monotonic() < deadline:
        time.sleep(0.01)
    return any(reference() is not None for reference in references)


def refuses_a_second_trace(case: Case, out: Path) -> str:
    engine = make_engine(case)
    with engine.amsp.tracing(out):
        try:
            with engine.amsp.tracing(out):
                return "recorded twice"
        except RuntimeError as error:
            message = str(error)
    try:
        with engine.amsp.tracing(out.with_name("raised.json")):
            raise KeyError("user")
    except KeyError:
        assert engine.amsp.comm.recorder is None
    train_step(engine, case, 0)
    engine.destroy()
    return message


def on_two_hosts(case: Case, out: Path, host: str) -> tuple[int, list[str]]:
    """(ranks joined, files elsewhere) of a trace whose ranks have folders of their own, by host."""
    from unittest import mock

    from deepspeed_amsp.trace import session as module

    engine = make_engine(case)
    with (
        mock.patch.object(module.socket, "gethostname", return_value=host),
        mock.patch.object(module, "PATIENCE_OTHER_HOSTS_S", 0.1),
        engine.amsp.tracing(out) as session,
    ):
        train_step(engine, case, 0)
    engine.destroy()
    return session.outcome.joined, session.outcome.elsewhere
