"""What would make a job fit that does not: every change tried, cheapest first."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from deepspeed_amsp.plan.explain import factors
from deepspeed_amsp.plan.factors import preset
from deepspeed_amsp.plan.memory import P
from deepspeed_amsp.plan.profile import ProfileError
from deepspeed_amsp.plan.report import Table, duration, size
from deepspeed_amsp.plan.resolve import PublishMode, ReduceMode
from deepspeed_amsp.plan.solver import Evaluated, Problem, Search, search, smallest_need
from deepspeed_amsp.plan.specs import GB, OPTIMIZERS, ClusterSpec, SpecError, TrainSpec

MOST_NODES, MOST_GPUS = 64, 16_384
"""How many times as many nodes are tried, and up to how many GPUs."""

SEARCHED_GPUS = 512
"""Up to here all factors are looked at on more nodes; above, ZeRO-3's, which say whether anything fits."""

LIGHTER = ("lion", "adam8bit")
"""Optimizers that train much as AdamW does with less state."""


@dataclass(frozen=True)
class Change:
    """Something to do differently. option: as it is written on the command line."""

    what: str
    option: str
    problem: Problem


@dataclass(frozen=True)
class Remedy:
    """A change with which something fits, and the best plan then."""

    what: str
    option: str
    best: Evaluated
    gpus: int

    @property
    def gpu_seconds_per_token(self) -> float:
        """What a token costs: seconds of one GPU."""
        return 1 / self.best.tokens_per_gpu_second


def lean(problem: Problem) -> Problem:
    """The same with one way to reduce and to publish, which needs least memory: for what is asked many times."""
    modes = replace(
        problem.modes, reduce=(ReduceMode.TWO_LEVEL,), publish=(PublishMode.BROADCAST,), hierarchical=(False,)
    )
    return replace(problem, modes=modes)


def remedies(result: Search) -> tuple[Remedy, ...]:
    """Changes that make it fit, cheapest first in predicted GPU time for a token.

    Single ones; together with recomputation, 2-byte gradients and a lighter optimizer where none of these is enough.
    More nodes and more memory are always among them, if any number of them helps.
    """
    problem = result.problem
    found = [remedy for change in _training(problem) if (remedy := _tried(change))]
    if not found:
        found += [remedy for change in _together(problem) if (remedy := _tried(change))][:1]
    nodes = _nodes(problem)
    if nodes is None and not any("--recompute" in r.option for r in found) and not problem.trainings[0].recompute:
        nodes = _nodes(_with(problem, recompute=True), "recompute activations and ", "--recompute ")
    found += [remedy for remedy in (nodes, _memory(result)) if remedy]
    return tuple(sorted(found, key=lambda remedy: (remedy.gpu_seconds_per_token, remedy.gpus)))


def _tried(change: Change) -> Remedy | None:
    try:
        best = search(change.problem).best
    except (SpecError, ProfileError):  # not on this cluster, or not measured
        return None
    return None if best is None else Remedy(change.what, change.option, best, change.problem.cluster.world_size)


def _with(problem: Problem, **changes: object) -> Problem:
    trainings = tuple(replace(train, **changes) for train in problem.trainings)  # type: ignore[arg-type]
    return replace(lean(problem), trainings=trainings)


def _training(problem: Problem) -> Iterator[Change]:
    """Changes of how one trains, one at a time."""
    train = problem.trainings[0]
    if not train.recompute:
        yield Change("recompute activations", "--recompute", _with(problem, recompute=True))
    if train.gradient_bytes > train.parameter_bytes:
        yield Change("gradients of 2 bytes", "--grad-dtype bf16", _with(problem, gradient_bytes=2))
    for name in LIGHTER:
        if OPTIMIZERS[name].moments < train.optimizer.moments:
            yield Change(f"optimizer {name}", f"--optimizer {name}", _with(problem, optimizer=OPTIMIZERS[name]))
    for smaller in _smaller(train) if len(problem.trainings) == 1 else []:
        yield Change(
            f"micro-batch {smaller.micro_batch}, M {smaller.micro_batches}",
            f"--micro-batch {smaller.micro_batch}",
            replace(lean(problem), trainings=(smaller,)),
        )
    if problem.margin:
        yield Change("no margin", "--margin 0", replace(lean(problem), margin=0.0))


def _smaller(train: TrainSpec) -> list[TrainSpec]:
    """Halves of the micro-batch, with the same tokens a step."""
    sequences = train.micro_batch * train.micro_batches
    sizes = [train.micro_batch >> shift for shift in range(1, train.micro_batch.bit_length())]
    return [
        replace(train, micro_batch=size, micro_batches=sequences // size) for size in sizes if sequences % size == 0
    ]


def _together(problem: Problem) -> Iterator[Change]:
    """The changes that cost nothing but time, added one by one until it fits."""
    whats: list[str] = []
    options: list[str] = []
    kept: dict[str, object] = {}
    train = problem.trainings[0]
    steps: list[tuple[bool, str, str, dict[str, object]]] = [
        (not train.recompute, "recompute activations", "--recompute", {"recompute": True}),
        (train.gradient_bytes > 2, "gradients of 2 bytes", "--grad-dtype bf16", {"gradient_bytes": 2}),
    ]
    steps += [
        (
            OPTIMIZERS[name].moments < train.optimizer.moments,
            f"optimizer {name}",
            f"--optimizer {name}",
            {"optimizer": OPTIMIZERS[name]},
        )
        for name in LIGHTER
    ]
    for open_to_it, what, option, change in steps:
        if open_to_it:
            kind = option.split()[0]
            whats = [w for w, o in zip(whats, options, strict=True) if o.split()[0] != kind] + [what]
            options = [o for o in options if o.split()[0] != kind] + [option]
            kept.update(change)
            yield Change(" and ".join(whats), " ".join(options), _with(problem, **kept))
    smallest = min(problem.trainings, key=lambda t: t.micro_batch)
    for smaller in _smaller(smallest)[-1:]:
        changed = replace(smaller, **kept)  # type: ignore[arg-type]
        yield Change(
            " and ".join([*whats, f"micro-batch {smaller.micro_batch}, M {smaller.micro_batches}"]),
            " ".join([*options, f"--micro-batch {smaller.micro_batch}"]),
            replace(lean(problem), trainings=(changed,)),
        )


def on_nodes(problem: Problem, nodes: int) -> Problem:
    """The same job on another number of nodes, at the same tokens a step as far as that goes.

    M shrinks as GPUs grow, rounded down, but not below 1: from there on the batch grows with the GPUs.

    Raises:
        ProfileError: measured with other GPUs in a node.
    """
    cluster: ClusterSpec = replace(problem.cluster, nodes=nodes)
    trainings = {
        replace(train, micro_batches=max(1, train.micro_batches * problem.cluster.nodes // nodes)): None
        for train in problem.trainings
    }
    profile = problem.profile.for_cluster(cluster.data_parallel)
    return replace(problem, cluster=cluster, trainings=tuple(trainings), profile=profile, shardings=None)


def _nodes(problem: Problem, beside: str = "", option: str = "") -> Remedy | None:
    """The fewest nodes, in steps of two, on which everything that may be sharded is, over all GPUs, and fits."""
    whole = all(train.optimizer.whole_tensors for train in problem.trainings)
    factor = 2
    while factor <= MOST_NODES and factor * problem.cluster.world_size <= MOST_GPUS:
        nodes = factor * problem.cluster.nodes
        changed = on_nodes(lean(problem), nodes)
        frugal = replace(changed, shardings=(preset("zero2" if whole else "zero3", changed.data_parallel),))
        try:
            least = search(frugal)
        except ProfileError:  # so many nodes were not measured
            return None
        if least.best is None and _unsharded(least) > problem.capacity:
            return None  # no number of nodes makes that smaller
        if least.best is not None:
            grown = max(t.micro_batches for t in problem.trainings) < factor
            batch = ", with more tokens a step" if grown else ""
            asked = changed if changed.cluster.world_size <= SEARCHED_GPUS else frugal
            return _tried(Change(f"{beside}{nodes} nodes{batch}", f"{option}--nodes {nodes}", asked))
        factor *= 2
    return None


def _unsharded(result: Search) -> float:
    """Bytes that are the same whatever the factors are."""
    nearest = result.rejected[0]
    terms = nearest.memory.terms()
    fixed = ("activations", "backward temporaries", *((P,) if nearest.plan.sharding.s_p == 1 else ()))
    return sum(count for name, _, count in terms if name in fixed)


def _memory(result: Search) -> Remedy | None:
    """GPUs with as much memory as the least demanding plan needs, up to the next 0.1 GB."""
    need = smallest_need(result)
    if not result.rejected or not math.isfinite(need):
        return None
    gigabytes = math.ceil(need / GB * 10) / 10
    problem = replace(
        result.problem,
        cluster=replace(result.problem.cluster, gpu_memory=gigabytes * GB),
        shardings=(result.rejected[0].plan.sharding,),
    )
    return _tried(Change(f"GPUs of {gigabytes:.1f} GB", f"--gpu-memory {gigabytes:.1f}", problem))


def remedies_table(found: tuple[Remedy, ...]) -> Table:
    """What would fit, cheapest first."""
    rows = [
        (
            remedy.what,
            remedy.option,
            f"{remedy.gpu_seconds_per_token * 1e6:,.1f}",
            duration(remedy.best.step.seconds),
            str(remedy.gpus),
            factors(remedy.best.plan),
            size(remedy.best.memory.peak),
        )
        for remedy in found
    ]
    columns = ("change", "option", "GPU us a token", "step", "GPUs", "P | G | OS", "memory")
    notes = () if rows else (f"no single change, and not up to {MOST_NODES} times as many nodes",)
    return Table("What would fit, cheapest first", columns, tuple(rows), notes, frozenset({2, 3, 4, 6}))


def as_list(found: tuple[Remedy, ...]) -> list[dict[str, object]]:
    """As JSON values."""
    return [
        {
            "change": remedy.what,
            "option": remedy.option,
            "gpu_seconds_per_token": remedy.gpu_seconds_per_token,
            "step_seconds": remedy.best.step.seconds,
            "gpus": remedy.gpus,
            "factors": factors(remedy.best.plan),
            "peak_bytes": remedy.best.memory.peak,
        }
        for remedy in found
    ]
