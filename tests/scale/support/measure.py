"""`measure`: one rank of a plan, its collectives and its memory, as figures.

PYTHONPATH=. python -m tests.scale.support.measure 7b --rank 0 --layers 4      # prints them as JSON
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch

from tests.scale.support import recording
from tests.scale.support.cases import CASES, RANKS, Model, ScalePlan
from tests.scale.support.forks import in_a_process
from tests.scale.support.memory import Category, Memory


@dataclass(frozen=True)
class Collective:
    """One issued collective, as comm's log has it; ``first`` is the lowest rank of its group."""

    op: str
    purpose: str
    axis: str
    group: tuple[int, ...]
    bytes: int
    label: str


@dataclass(frozen=True)
class Figures:
    """What one rank did and held. Bytes; categories are those of `memory.Category`.

    at_rest: P, masters and moments between steps; G after the first micro-batch of a window ("G resting", with
        accumulation) and before the step ("G owned").
    peaks: each category's own peak within a step that is not the first, at the moment that suits it best.
    at_peak: all categories when their sum was largest, ``peak`` bytes, in ``peak_phase``.
    issued: the step as the process groups saw it.
    """

    model: str
    layers: int
    rank: int
    schedule: tuple[Collective, ...]
    issued: tuple[recording.Issued, ...]
    at_rest: dict[str, int]
    peaks: dict[str, int]
    at_peak: dict[str, int]
    peak: int
    peak_phase: str
    host_reads: dict[str, int]
    operations: int
    seconds: float
    cpu_seconds: float
    rss_bytes: int

    def summary(self) -> dict[str, Any]:
        """Everything but the single collectives, as JSON values."""
        values = asdict(self)
        del values["schedule"], values["issued"]
        counts: dict[str, list[int]] = {}
        for entry in self.schedule:
            line = counts.setdefault(f"{entry.op} {entry.purpose} {entry.axis}[{len(entry.group)}]", [0, 0])
            line[0] += 1
            line[1] += entry.bytes
        return {**values, "collectives": {key: {"count": n, "bytes": size} for key, (n, size) in counts.items()}}


def measure(plan: ScalePlan, model: Model, rank: int) -> Figures:
    """Two steps of ``plan`` on ``model`` as ``rank``, in a process of their own; figures are those of the second."""
    return in_a_process(measure_here, plan, model, rank)


def measure_here(plan: ScalePlan, model: Model, rank: int, planted: Callable[[], Any] = nullcontext) -> Figures:
    """`measure` in this process, which is good for nothing else afterwards.

    Raises:
        RaceError: a buffer was used in flight, or a collective was never waited for.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    from tests.scale.support.watch import Watch
    from tests.scale.support.world import one_rank

    start, cpu_start = time.perf_counter(), time.process_time()
    watch = Watch()
    with ExitStack() as stack:
        data_parallel = plan.sharding.data_parallel
        stack.enter_context(one_rank(rank, plan.sharding.s_dp, data_parallel.s0))
        stack.enter_context(watch.installed())
        stack.enter_context(planted())
        stack.enter_context(FakeTensorMode())
        stack.enter_context(watch)
        engine = _engine(plan, model)
        at_rest = _first_step(engine, plan, model, watch.memory)
        watch.memory.start_peaks()
        watch.host_reads.clear()
        operations = watch.operations
        recording.log.clear()
        for micro_batch in range(plan.micro_batches):
            _micro_batch(engine, model, watch.memory)
            if micro_batch + 1 < plan.micro_batches:
                engine.step()
        watch.memory.phase = "step"
        engine.step()
        issued = tuple(recording.log)
        operations = watch.operations - operations
        engine.optimizer.wait_for_parameters()
        _check_nothing_in_flight()
        return Figures(
            model=model.name,
            layers=model.layers,
            rank=rank,
            schedule=tuple(
                Collective(e.op, e.purpose.value, e.axis, e.ranks, e.bytes, e.label) for e in engine.amsp.comm.last_step
            ),
            issued=issued,
            at_rest=at_rest,
            peaks=_by_name(watch.memory.peaks),
            at_peak=_by_name(watch.memory.at_peak),
            peak=watch.memory.peak,
            peak_phase=watch.memory.peak_phase,
            host_reads=dict(watch.host_reads),
            operations=operations,
            seconds=time.perf_counter() - start,
            cpu_seconds=time.process_time() - cpu_start,
            rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        )


def _engine(plan: ScalePlan, model: Model) -> Any:
    import deepspeed

    import deepspeed_amsp
    from deepspeed_amsp.compare.llama import Llama

    module = Llama(model.config())
    # fused needs no host read of its step counters.
    optimizer = torch.optim.AdamW(module.parameters(), fused=True)
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=plan.ds_config())
    assert isinstance(engine, deepspeed_amsp.AMSPEngine)
    return engine


def _micro_batch(engine: Any, model: Model, memory: Memory) -> None:
    memory.phase = "forward"
    loss = engine(torch.zeros(1, model.sequence + 1, dtype=torch.int64))
    memory.phase = "backward"
    engine.backward(loss)


def _first_step(engine: Any, plan: ScalePlan, model: Model, memory: Memory) -> dict[str, int]:
    """Records the order of units, makes the moments, and looks at what rests when nothing is in flight."""
    from deepspeed_amsp.partition.params import ShardedUnit

    for unit in engine.amsp.units:
        for tensor in [unit.shard] if isinstance(unit, ShardedUnit) else [p.data for p in unit.parameters]:
            memory.move(tensor, Category.PARAMETERS)
    optimizer = engine.optimizer
    for master in optimizer.states.all_masters():
        memory.move(master.value, Category.MASTERS)
    at_rest = {}
    for micro_batch in range(plan.micro_batches):
        _micro_batch(engine, model, memory)
        optimizer.drain()
        last = micro_batch + 1 == plan.micro_batches
        if micro_batch == 0 or last:
            at_rest["G owned" if last else "G resting"] = memory.now[Category.GRADIENTS]
        memory.phase = "step"
        engine.step()
    for state in optimizer.state.values():
        for value in state.values():
            if torch.is_tensor(value) and value.dim():
                memory.move(value, Category.MOMENTS)
    for category in (Category.PARAMETERS, Category.MASTERS, Category.MOMENTS):
        at_rest[category.value] = memory.now[category]
    return at_rest


def _check_nothing_in_flight() -> None:
    recording.in_flight.check()
    left = recording.in_flight.unwaited()
    if left:
        raise recording.RaceError("never waited", "; ".join(left))


def _by_name(counter: Any) -> dict[str, int]:
    return {category.value: counter[category] for category in Category if counter[category]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", choices=[case.name for case in CASES])
    parser.add_argument("--rank", type=int, default=RANKS[0])
    parser.add_argument("--layers", type=int, help="fewer layers of the true width")
    options = parser.parse_args()
    case = next(case for case in CASES if case.name == options.case)
    if options.layers:
        case = case.cut(options.layers)
    print(json.dumps(measure(case.plan, case.model, options.rank).summary(), indent=2))


if __name__ == "__main__":
    main()
