"""When things happen: what is ahead, what is held at the same time, what the host waits for."""

from __future__ import annotations

import gc
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from deepspeed_amsp.comm import Communicator
from deepspeed_amsp.mesh import launch_order_warning
from deepspeed_amsp.plan.factors import ShardFactor, Sharding
from deepspeed_amsp.schedule.chain import make_chain
from deepspeed_amsp.schedule.order import Use, UseOrder
from deepspeed_amsp.schedule.pipeline import ThreadPipeline
from deepspeed_amsp.schedule.reduce import IN_FLIGHT
from tests.parity.cases import NIGHTLY, case_for
from tests.semantics import modules as m
from tests.semantics.harness import (
    MIXED,
    TRIO,
    UNEQUAL,
    ZERO3,
    Held,
    OnRank,
    Run,
    Trainer,
    assert_matches,
    loss_of,
    on_ranks,
    over,
    reference,
)
from tests.support.jobs import Case, train
from tests.support.pool import pool

# ---- order -------------------------------------------------------------------------------------------------


def _passes(*uses: Use) -> UseOrder:
    order = UseOrder("backward")
    order.start()
    for use in uses:
        order.use(use)
    order.start()
    return order


def test_one_layer_ahead_under_recomputation() -> None:
    """Layers of two units, recomputed in forward order, then their gradients in the opposite order."""
    layers = [(4, 5), (2, 3), (0, 1)]
    record = [use for a, b in layers for use in (Use(a, True), Use(b, True), Use(b), Use(a))]
    order = _passes(*record)
    order.use(record[0])
    assert [use.unit for use in order.next_layer() if use.recomputed] == [5, 2, 3], "its own rest, and the next layer"
    for use in record[1:5]:
        order.use(use)
    assert [use.unit for use in order.next_layer() if use.recomputed] == [3, 0, 1]
    for use in record[5:9]:
        order.use(use)
    assert [use.unit for use in order.next_layer() if use.recomputed] == [1], "nothing follows the last layer"


class Layers(nn.Module):
    """Checkpointed layers of two matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(m.FEATURES, m.WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(m.WIDTH, m.WIDTH), nn.Tanh(), nn.Linear(m.WIDTH, m.WIDTH)) for _ in range(4)
        )
        self.last = nn.Linear(m.WIDTH, m.FEATURES)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        hidden = self.first(m.features(rows))
        for layer in self.layers:
            hidden = hidden + torch.utils.checkpoint.checkpoint(layer, hidden, use_reentrant=False)
        return self.last(hidden)


def _events(trainer: OnRank) -> list[tuple[str, str]]:
    """("needs" | "issues", unit) of one more step's backward, the gathers and the uses that ask for them."""
    gatherer = trainer.engine.optimizer._gatherer
    found: list[tuple[str, str]] = []
    use, issue = gatherer.use, gatherer._comm.all_gather

    def noted_use(unit: Any, backward: bool, recomputed: bool = False) -> None:
        if backward:
            found.append(("recomputes" if recomputed else "needs", unit.name))
        use(unit, backward, recomputed)

    def noted_gather(group: Any, shard: Any, full: Any, label: str) -> Any:
        found.append(("issues", label))
        return issue(group, shard, full, label)

    rows = trainer.rows(0, 0)
    loss = loss_of(trainer(rows), rows)
    with mock.patch.object(gatherer, "use", noted_use), mock.patch.object(gatherer._comm, "all_gather", noted_gather):
        trainer.backward(loss)
    trainer.step()
    return found


@over([MIXED, ZERO3])
def test_gathers_of_a_backward_are_ahead_of_their_use(sharding: Sharding) -> None:
    """When layer i is recomputed, all of layer i - 1 is under way; and nothing of layer i - 2."""
    for mine in on_ranks(Run(sharding, Layers, observe=_events)):
        events: list[tuple[str, str]] = mine.seen
        for layer in (3, 2, 1):
            starts = events.index(("recomputes", f"layers.{layer}.0"))
            next_start = events.index(("recomputes", f"layers.{layer}.2"))
            issued = {name for kind, name in events[:next_start] if kind == "issues"}
            assert {f"layers.{layer - 1}.0", f"layers.{layer - 1}.2"} <= issued
            early = {name for kind, name in events[:starts] if kind == "issues"}
            assert not {name for name in early if name.startswith(f"layers.{layer - 2}.")} or layer == 1


def _forwards(trainer: OnRank) -> tuple[dict[int, int], list[list[int]]]:
    """In which bucket each unit is published, and how many gathers were out when each module of a forward had asked for
    its own: in the first forward after a step, and in the second."""
    optimizer = trainer.engine.optimizer
    gatherer, rows, found = optimizer._gatherer, trainer.rows(0, 0), []
    buckets = dict(gatherer._published_with)
    if optimizer._mesh.coordinates.param == 0:
        assert buckets == {unit: layout.index for layout in optimizer.layouts for unit in layout.units}
    trainer.backward(loss_of(trainer(rows), rows))
    trainer.step()
    use, issue = gatherer.use, gatherer._comm.all_gather
    for _ in range(2):
        out, counts = [], []

        def noted_use(*args: Any, out: list[str] = out, counts: list[int] = counts, **kwargs: Any) -> None:
            use(*args, **kwargs)
            counts.append(len(out))

        def noted(group: Any, shard: Any, full: Any, label: str, out: list[str] = out) -> Any:
            out.append(label)
            return issue(group, shard, full, label)

        with (
            mock.patch.object(gatherer, "use", noted_use),
            mock.patch.object(gatherer._comm, "all_gather", noted),
            torch.no_grad(),
        ):
            trainer(rows)
        found.append(counts)
    return buckets, found


@over([MIXED])
def test_a_forward_does_not_stand_until_everything_is_published(sharding: Sharding) -> None:
    """A unit whose bucket is still on its way is only gathered ahead when it is the next; all others as they fit."""
    seen = [mine.seen for mine in on_ranks(Run(sharding, Deep, observe=_forwards))]
    assert all(buckets == seen[0][0] for buckets, _ in seen), "or ranks gather in different orders"
    for buckets, (first, second) in seen:
        units, last = len(buckets), max(buckets.values())
        assert units == 20 and last > 3
        # With the next unit, which is waited for if need be, comes all of its bucket.
        reached = [buckets[min(number + 1, units - 1)] for number in range(units)]
        assert first == [sum(bucket <= limit for bucket in buckets.values()) for limit in reached]
        assert second == [units] * units


# ---- pipeline ----------------------------------------------------------------------------------------------


class _Slow:
    """A ticket that arrives when told so."""

    entry = None

    def __init__(self) -> None:
        self.arrived = threading.Event()
        self.waited = False

    def wait(self, aside: bool = False) -> None:
        assert self.arrived.wait(timeout=10)
        self.waited = True


class _Line:
    """A `ThreadPipeline` of three stages, the second of which never sends, and what it issued."""

    def __init__(self, limit: int = IN_FLIGHT) -> None:
        self.issued: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.tickets: dict[str, _Slow] = {}
        self.pipeline = ThreadPipeline(Communicator(), [True, False, True], limit, "test-line")

    def route(self, name: str) -> Iterator[Any]:
        for stage in range(3):
            ticket = self.tickets.setdefault(f"{name}{stage}", _Slow())
            self.issued.put(f"{name}{stage}")
            yield [] if stage == 1 else [ticket]
        self.issued.put(f"{name} ends")

    def start(self, *names: str) -> None:
        for name in names:
            self.pipeline.start(ord(name), self.route(name))  # type: ignore[arg-type]

    def next(self, count: int) -> list[str]:
        """The next that was issued; waits for it."""
        return [self.issued.get(timeout=10) for _ in range(count)]

    def arrive(self, *stages: str) -> None:
        for stage in stages:
            self.tickets.setdefault(stage, _Slow()).arrived.set()


def test_stages_go_on_without_the_host_and_in_one_order() -> None:
    line = _Line()
    line.start("a", "b")
    assert line.next(2) == ["a0", "b0"]
    line.arrive("b0")
    assert line.issued.empty(), "b's later stages would come before a's"
    line.arrive("a0")
    assert line.next(4) == ["a1", "a2", "b1", "b2"]
    assert line.pipeline.in_flight == 2
    line.arrive("a2", "b2")
    assert line.next(2) == ["a ends", "b ends"]
    line.pipeline.drain()
    assert line.pipeline.in_flight == 0


def test_what_is_in_flight_is_limited() -> None:
    line = _Line(limit=2)
    line.start("a", "b", "c")
    assert line.pipeline.in_flight == 3
    timer = threading.Timer(0.1, line.arrive, ["a0", "a2"])
    timer.start()
    line.start("d")
    assert line.tickets["a2"].waited, "the fourth route had to wait for the first"
    line.arrive("b0", "b2", "c0", "c2", "d0", "d2")
    line.pipeline.finish(ord("c"))
    assert line.tickets["c2"].waited


def test_an_error_in_a_thread_reaches_who_waits() -> None:
    line = _Line()

    def fails() -> Iterator[Any]:
        yield [line.tickets.setdefault("x0", _Slow())]
        raise ValueError("a stage that cannot be issued")

    line.pipeline.start(0, fails())  # type: ignore[arg-type]
    line.start("b")
    line.arrive("x0", "b0", "b2")
    with pytest.raises(ValueError, match="cannot be issued"):
        line.pipeline.drain()
    line.pipeline.drain()
    assert line.tickets["b2"].waited, "a route behind it is not lost"


def test_threads_finish_what_they_have_and_end() -> None:
    before = set(threading.enumerate())

    def new() -> int:
        return len(set(threading.enumerate()) - before)

    line = _Line()
    line.start("a", "b")
    assert new() == 2
    line.arrive("a0", "a2", "b0", "b2")
    line.pipeline.close()
    assert new() == 0
    assert line.next(8)[-1] == "b ends"

    dropped = _Line()
    assert new() == 2
    del dropped
    gc.collect()
    assert new() == 0, "threads of a pipeline that nobody holds any more"


def test_no_thread_issues_where_communicators_are_merged() -> None:
    """Its calls would fall among the host's in another order on every rank, and gloo mixes their data."""
    chain = make_chain(Communicator(), torch.device("cpu"), staged=True, merged=True)
    second = _Slow()
    first = _Slow()
    first.arrived.set()
    stages = iter([[first], [second]])
    chain.start(0, stages)  # type: ignore[arg-type]
    assert first.waited and not list(stages), "everything is issued when start returns"
    second.arrived.set()
    chain.finish(0)
    assert second.waited


class Four(nn.Module):
    """A bucket in which every rank of four owns something."""

    def __init__(self) -> None:
        super().__init__()
        for name in "abcd":
            self.register_parameter(name, nn.Parameter(0.3 * torch.randn(m.FEATURES, m.FEATURES)))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ (self.a - self.b) + hidden.sin() @ (self.c - self.d)


class Slow(nn.Module):
    """Eleven buckets, with some time between them in backward, so that what was sent has arrived."""

    LAYERS = 2 * (IN_FLIGHT + 1) + 1

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Four() for _ in range(self.LAYERS))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        hidden = m.features(rows)
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
            if dist.is_initialized():
                hidden.register_hook(lambda _: time.sleep(0.02))
        return hidden


def _meeting_between_backward_and_step(trainer: Trainer) -> None:
    """As a loop does that sums up its loss for the log before it steps."""
    for step in range(trainer.run.steps):
        for micro in range(trainer.run.micro_batches):
            rows = trainer.rows(step, micro)
            loss = loss_of(trainer(rows), rows)
            trainer.losses.append(loss.item())
            trainer.backward(loss)
            if trainer.engine is not None:
                dist.barrier()
            trainer.step()


def _late_for_some(run: Run) -> Held:
    """On rank 0 the first stage of the last bucket but one takes its time, on rank 2 every second stage does: rank 2
    has too many in flight in its last start, and waits for a stage that rank 0 has not sent when its backward ends."""
    from deepspeed_amsp.comm import Ticket
    from tests.semantics import harness

    really = Ticket.wait

    def wait(ticket: Ticket, aside: bool = False) -> None:
        entry, rank = ticket.entry, dist.get_rank()
        if (rank == 0 and (entry.axis, entry.label) == ("inner", "bucket 1")) or (rank == 2 and entry.axis == "outer"):
            time.sleep(0.05)
        really(ticket, aside)

    with mock.patch.object(Ticket, "wait", wait):
        return harness.job(run)


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_ranks_may_meet_between_backward_and_step(micro_batches: int, merged: bool) -> None:
    """A backward never waits for what another rank sends after its own: that one may be anywhere by then."""
    run = Run(
        UNEQUAL,
        Slow,
        loop=_meeting_between_backward_and_step,
        bucket_bytes=576,
        micro_batches=micro_batches,
        amsp={"merge_communicators": merged},
    )
    assert_matches(pool(4).run(_late_for_some, run, timeout=20), reference(run))


# ---- memory ------------------------------------------------------------------------------------------------


class Deep(nn.Module):
    """Twenty equal matrices, a bucket each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(m.FEATURES, m.FEATURES, bias=False) for _ in range(20))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        hidden = m.features(rows)
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        return hidden


def _peak_of_gradients(trainer: OnRank) -> None:
    """Notes the largest (buckets staged or in flight, elements kept between micro-batches) of every backward."""
    optimizer = trainer.engine.optimizer
    reducer = optimizer._reducer
    take, peak = reducer.add, 0

    def add(*args: Any) -> bool:
        nonlocal peak
        complete: bool = take(*args)
        staged = sum(bucket.staged is not None for bucket in optimizer.gradients)
        peak = max(peak, staged + reducer._bucket_pipeline.in_flight)
        return complete

    with mock.patch.object(reducer, "add", add):
        for step in range(2):
            for micro in range(trainer.run.micro_batches):
                rows = trainer.rows(step, micro)
                peak = 0
                loss = loss_of(trainer(rows), rows)
                trainer.losses.append(loss.item())
                trainer.backward(loss)
                optimizer.drain()
                kept = sum(b.kept.numel() for b in optimizer.gradients if b.kept is not None)
                staged = sum(b.staged.numel() for b in optimizer.gradients if b.staged is not None)
                trainer.notes.append((peak, kept, staged))
                trainer.step()


def test_sharded_gradients_are_never_whole() -> None:
    """s_g > s_p: a bucket is released as soon as it is reduced; between micro-batches 1/s_g of it rests."""
    one, node, whole = ShardFactor(1, 1), ShardFactor(2, 1), ShardFactor(2, 2)
    run = Run(Sharding(one, node, whole, whole), Deep, loop=_peak_of_gradients, micro_batches=3, bucket_bytes=144)
    elements = 20 * m.FEATURES**2
    totals = [0, 0]
    for mine in on_ranks(run):
        peaks = [peak for peak, _, _ in mine.notes]
        assert max(peaks) <= IN_FLIGHT + 2 < 20, "in flight, the one that starts, the one that fills"
        for position, (_, kept, staged) in enumerate(mine.notes):
            assert staged == 0
            totals[position % 3 == 2] += kept
    # Two windows of two resting micro-batches; the four ranks are two groups of s_g = 2 that hold everything once.
    assert totals == [2 * 2 * 2 * elements, 0]


# ---- host --------------------------------------------------------------------------------------------------


class _HostReads(TorchDispatchMode):
    """Counts what makes the host wait for the device, by operator."""

    SYNCING = ("_local_scalar_dense", "is_nonzero", "nonzero", "equal", "item", "masked_select", "unique")

    def __init__(self, allowed: set[int]) -> None:
        super().__init__()
        self.found: list[str] = []
        self._allowed = allowed

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if any(name.startswith(word) for word in self.SYNCING) and args[0].data_ptr() not in self._allowed:
            self.found.append(name)
        return func(*args, **(kwargs or {}))


@contextmanager
def _counting(optimizer: Any) -> Iterator[list[str]]:
    """Lists the host reads and synchronisations within, but for torch's step counters, which live on the host."""
    counters = {
        v.data_ptr() for s in optimizer.state.values() for v in s.values() if torch.is_tensor(v) and not v.dim()
    }
    reads = _HostReads(counters)

    def noting(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            reads.found.append(name)
            return real(*args, **kwargs)

        return call

    accelerator = get_accelerator()
    with (
        mock.patch.object(torch.Tensor, "tolist", noting("tolist", torch.Tensor.tolist)),
        mock.patch.object(torch.Tensor, "numpy", noting("numpy", torch.Tensor.numpy)),
        mock.patch.object(type(accelerator), "synchronize", noting("synchronize", type(accelerator).synchronize)),
        reads,
    ):
        yield reads.found


def _count_reads(trainer: OnRank) -> list[str]:
    """Host reads of one whole step after the first ones, forward to publish."""
    rows = trainer.rows(0, 0)
    with _counting(trainer.engine.optimizer) as found:
        loss = loss_of(trainer(rows), rows)
        trainer.backward(loss)
        trainer.step()
    return list(found)


class _Quiet(OnRank):
    def step(self) -> None:
        self.engine.step()


def _reads(run: Run) -> Held:
    from tests.semantics import harness

    with mock.patch.object(harness, "OnRank", _Quiet):
        return harness.job(run)


BF16 = {"enabled": True, "check_grad_overflow": False}
TIMERS = {"throughput": {"enabled": False, "synchronized": False}}
"""DeepSpeed's own throughput timer synchronises twice a step unless told not to."""


@over(TRIO)
@pytest.mark.parametrize("clip", [0.0, 0.5])
@pytest.mark.parametrize("check", [False, True])
def test_a_step_reads_the_host_once_at_most(sharding: Sharding, clip: float, check: bool) -> None:
    """None without overflow checking; one with it, which carries the comparison of ranks as well."""
    extra = {"bf16": {"enabled": True, "check_grad_overflow": check}, "timers": TIMERS}
    run = Run(sharding, m.Plain, dtype=torch.bfloat16, clip=clip, extra=extra, observe=_count_reads)
    reads_order = sharding.s_p > 1  # on a CPU the order of gathers is compared at once, from memory
    for mine in pool(4).run(_reads, run):
        assert mine.seen == (["tolist"] if check or reads_order else []), mine.seen


def _late_reads(run: Run) -> Held:
    """As on an accelerator: the order of gathers comes to the host by itself, and is looked at two steps later."""

    class Event:
        def record(self) -> None: ...

        def synchronize(self) -> None: ...

    accelerator = get_accelerator()
    with (
        mock.patch.object(type(accelerator), "Event", Event, create=True),
        mock.patch("deepspeed_amsp.optimizer.waits_on_host", return_value=False),
    ):
        return _reads(run)


@over([MIXED, ZERO3])
def test_the_comparison_of_ranks_may_come_two_steps_late(sharding: Sharding) -> None:
    run = Run(sharding, m.Plain, dtype=torch.bfloat16, extra={"bf16": BF16})
    late, prompt = pool(4).run(_late_reads, run), pool(4).run(_reads, run)
    for mine, other in zip(late, prompt, strict=True):
        assert mine.losses == other.losses
        assert all(torch.equal(value, other.parameters[name]) for name, value in mine.parameters.items())


def test_nccl_with_several_communicators_is_warned_about() -> None:
    text = launch_order_warning("cuda", False, {})
    assert text is not None and "NCCL_LAUNCH_ORDER_IMPLICIT=1" in text and "merge_communicators" in text
    assert launch_order_warning("cuda", False, {"NCCL_LAUNCH_ORDER_IMPLICIT": "1"}) is None
    assert launch_order_warning("cuda", True, {}) is None
    assert launch_order_warning("cpu", False, {}) is None


# ---- overlap -----------------------------------------------------------------------------------------------

SWITCHES = ("gather", "reduce_scatter", "all_reduce", "publish")
FACTORS = {"unequal": UNEQUAL, "mixed": MIXED}


def _case(sharding: Sharding, on: tuple[bool, ...], hierarchical: bool, **overrides: Any) -> Case:
    choices = {"reduce": "two_level", "publish": "broadcast", "micro_batches": 2, "clip": 0.4}
    case = case_for(sharding, choices, **overrides)
    amsp = {**case.amsp, "overlap": dict(zip(SWITCHES, on, strict=True)), "hierarchical": hierarchical}  # type: ignore[dict-item]
    return replace(case, amsp=amsp)


@pytest.mark.parametrize("hierarchical", [False, True])
@pytest.mark.parametrize("factors", FACTORS)
def test_all_sixteen_settings_are_bit_equal(factors: str, hierarchical: bool) -> None:
    settings = list(product((True, False), repeat=4))
    sharding = FACTORS[factors]
    runs = [
        pool(4).run(train, _case(sharding, on, hierarchical, bf16=True, steps=3, model="recomputed"))
        for on in (settings if NIGHTLY else settings[number(factors, hierarchical) :: 3] + settings[:1])
    ]
    for other in runs[1:]:
        for one, two in zip(runs[0], other, strict=True):
            assert one.losses == two.losses and one.norms == two.norms
            assert all(torch.equal(value, two.masters[piece]) for piece, value in one.masters.items())


def number(factors: str, hierarchical: bool) -> int:
    """In the normal suite each pair takes every third setting, from another start, so that all occur."""
    return (list(FACTORS).index(factors) + 2 * hierarchical) % 3


@pytest.mark.parametrize("publish", ["broadcast", "all_gather"])
@pytest.mark.parametrize("reduce", ["two_level", "all_reduce"])
def test_many_steps_with_random_delays(reduce: str, publish: str) -> None:
    """Every collective is late by a random time: the losses are those of the undelayed run, bit by bit."""
    steps = 200 if NIGHTLY else 8
    for sharding in (UNEQUAL, MIXED):
        choices = {"reduce": reduce, "publish": publish, "micro_batches": 2, "clip": 0.4, "optimizer": "adamw"}
        case = case_for(sharding, choices, model="recomputed", steps=steps)
        delayed, prompt = pool(4).run(train, replace(case, adversarial=True), timeout=300), pool(4).run(train, case)
        for one, two in zip(delayed, prompt, strict=True):
            assert one.losses == two.losses and one.norms == two.norms
