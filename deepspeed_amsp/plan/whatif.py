"""How much a choice depends on the cluster: other bandwidths and memory, and other numbers of GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from deepspeed_amsp.plan.advice import on_nodes
from deepspeed_amsp.plan.explain import factors
from deepspeed_amsp.plan.factors import FactorError, preset
from deepspeed_amsp.plan.memory import Memory
from deepspeed_amsp.plan.profile import ProfileError
from deepspeed_amsp.plan.report import Table, duration, percent, size
from deepspeed_amsp.plan.resolve import Plan, ReduceMode
from deepspeed_amsp.plan.solver import Evaluated, MemoryModel, Problem, Search, search
from deepspeed_amsp.plan.specs import ModelSpec, SpecError, TrainSpec

SHIFTS = (0.5, 0.9, 1.1, 1.5)
FEWEST_GPUS, MOST_GPUS = 8, 16_384
RIVALS = ("ddp", "zero1", "zero3", "mics")


@dataclass(frozen=True)
class Shift:
    """The best plan with something changed. staying: by which part the unchanged choice is slower than it then is;
    None where it does not fit any more."""

    what: str
    factor: float
    best: Evaluated | None
    changed: bool
    staying: float | None


def remembered(model: MemoryModel) -> MemoryModel:
    """The same, computed once for each plan and training. For one model only."""
    known: dict[tuple[Plan, TrainSpec], Memory] = {}

    def memory(model_spec: ModelSpec, plan: Plan, train: TrainSpec) -> Memory:
        key = (plan, train)
        if key not in known:
            known[key] = model(model_spec, plan, train)
        return known[key]

    return memory


def _asked_often(problem: Problem, best: Evaluated | None) -> Problem:
    """With the modes that matter to the best plan alone, and memory computed once."""
    publish = (best.plan.publish,) if best else problem.modes.publish[:1]
    modes = replace(problem.modes, reduce=(ReduceMode.TWO_LEVEL,), publish=publish)
    trainings = (best.train,) if best else problem.trainings
    return replace(problem, modes=modes, trainings=trainings, memory=remembered(problem.memory))


def sensitivity(result: Search) -> tuple[Shift, ...]:
    """The choice with 0.5 to 1.5 times the bandwidth between nodes, in a node, and the memory."""
    return (*to_bandwidth(result), *to_memory(result))


def to_bandwidth(result: Search) -> tuple[Shift, ...]:
    """Micro-batch and way to publish stay those of the best plan, and gradients are reduced in two levels."""
    if result.best is None:
        return ()
    problem = _asked_often(result.problem, result.best)
    shifts: list[Shift] = []
    for what in ("inter-node bandwidth", "in-node bandwidth"):
        for factor in SHIFTS:
            links = {"inter" if what.startswith("inter") else "intra": factor}
            found = search(replace(problem, profile=problem.profile.scaled(**links)))
            shifts.append(_shift(what, factor, result.best, found.ranked))
    return tuple(shifts)


def to_memory(result: Search) -> tuple[Shift, ...]:
    """The micro-batch stays that of the best plan, all modes are looked at: a sharding's fastest are those that fit, so
    that other memory may mean others."""
    if result.best is None:
        return ()
    problem = _asked_often(result.problem, result.best)
    shifts: list[Shift] = []
    for factor in SHIFTS:
        cluster = replace(problem.cluster, gpu_memory=problem.cluster.gpu_memory * factor)
        found = search(replace(problem, cluster=cluster, modes=result.problem.modes))
        shifts.append(_shift("memory", factor, result.best, found.ranked))
    return tuple(shifts)


def _shift(what: str, factor: float, choice: Evaluated, ranked: tuple[Evaluated, ...]) -> Shift:
    if not ranked:
        return Shift(what, factor, None, True, None)
    best = ranked[0]
    same = [found.objective for found in ranked if found.plan.sharding == choice.plan.sharding]
    staying = min(same) / best.objective - 1 if same and best.objective else None
    return Shift(what, factor, best, best.plan.sharding != choice.plan.sharding, staying)


def sensitivity_table(shifts: tuple[Shift, ...]) -> Table:
    """One row a change."""
    rows = []
    for shift in shifts:
        change = f"{shift.what} {percent(shift.factor - 1, signed=True)}"
        if shift.best is None:
            rows.append((change, "nothing fits", "", ""))
            continue
        choice = factors(shift.best.plan) if shift.changed else "the same"
        staying = "does not fit" if shift.staying is None else percent(max(shift.staying, 0.0))
        rows.append((change, choice, duration(shift.best.objective), staying))
    columns = ("change", "best P | G | OS then", "time", "cost of staying")
    return Table("Sensitivity of the choice", columns, tuple(rows), right=frozenset({2, 3}))


@dataclass(frozen=True)
class Rival:
    """A known strategy on some GPUs. slower: by which part than the best plan; missing: bytes, where it does not fit;
    neither where the optimizer does not permit it."""

    name: str
    slower: float | None
    missing: float | None


@dataclass(frozen=True)
class Scale:
    """One number of GPUs. why: nothing was computed there, and the reason."""

    gpus: int
    tokens: int
    micro_batches: int
    best: Evaluated | None
    rivals: tuple[Rival, ...]
    why: str = ""


def crossover(result: Search, fewest: int = FEWEST_GPUS, most: int = MOST_GPUS) -> tuple[Scale, ...]:
    """The best plan and the known strategies on 8 to 16384 GPUs, in steps of two.

    The tokens of a step stay as they are: M shrinks as GPUs grow, down to 1, from where on the batch grows with them.
    """
    problem = _asked_often(result.problem, result.best)
    return tuple(_scale(problem, nodes) for nodes in _node_counts(problem, fewest, most))


def _node_counts(problem: Problem, fewest: int, most: int) -> Iterator[int]:
    nodes = 1
    while nodes * problem.cluster.gpus_per_node <= most:
        if nodes * problem.cluster.gpus_per_node >= fewest:
            yield nodes
        nodes *= 2


def _scale(problem: Problem, nodes: int) -> Scale:
    gpus = nodes * problem.cluster.gpus_per_node
    try:
        there = replace(on_nodes(problem, nodes), memory=remembered(problem.memory))
        found = search(there)
        train = there.trainings[0]
        tokens = train.sequence * train.micro_batch * train.micro_batches * there.data_parallel.size
        rivals = tuple(_rival(there, found, name) for name in RIVALS)
    except (SpecError, ProfileError, FactorError) as error:
        return Scale(gpus, 0, 0, None, (), str(error))
    return Scale(gpus, tokens, train.micro_batches, found.best, rivals)


def _rival(problem: Problem, found: Search, name: str) -> Rival:
    sharding = preset(name, problem.data_parallel)
    times = [entry.objective for entry in found.ranked if entry.plan.sharding == sharding]
    if times and found.best is not None:
        return Rival(name, min(times) / found.best.objective - 1 if found.best.objective else 0.0, None)
    missing = (entry.missing for entry in found.rejected if entry.plan.sharding == sharding)
    return Rival(name, None, min(missing, default=None))


def crossover_table(scales: tuple[Scale, ...]) -> Table:
    """One row a number of GPUs."""
    rows = []
    for scale in scales:
        if scale.why:
            rows.append((f"{scale.gpus:,}", "", "", f"not computed: {scale.why}", "", "", *[""] * len(RIVALS)))
            continue
        best = scale.best
        rows.append(
            (
                f"{scale.gpus:,}",
                f"{scale.tokens:,}",
                str(scale.micro_batches),
                factors(best.plan) if best else "nothing fits",
                duration(best.step.seconds) if best else "",
                f"{best.tokens_per_gpu_second:,.0f}" if best else "",
                *(_beside(rival) for rival in scale.rivals),
            )
        )
    columns = ("GPUs", "tokens", "M", "best P | G | OS", "step", "tok/s/GPU", *RIVALS)
    notes = (
        "M shrinks as GPUs grow, down to 1; from there on the tokens of a step grow with the GPUs",
        "strategies: slower than the best plan by this part, or the memory that they miss",
        *_crossings(scales),
    )
    return Table("Crossover", columns, tuple(rows), notes, frozenset({0, 1, 2, 4, 5, 6, 7, 8, 9}))


def _beside(rival: Rival) -> str:
    if rival.slower is None:
        return "needs tensors cut" if rival.missing is None else f"needs {size(rival.missing)} more"
    return percent(max(rival.slower, 0.0), signed=True)


def _crossings(scales: tuple[Scale, ...], part: float = 0.02) -> Iterator[str]:
    """From how many GPUs on each strategy is behind for good."""
    done = [scale for scale in scales if scale.best is not None]
    for index, name in enumerate(RIVALS):
        slower = [(scale.gpus, scale.rivals[index].slower) for scale in done]
        level = [gpus for gpus, by in slower if by is not None and by <= part]
        if not level:
            yield f"{name} is never within {percent(part)} of the best plan"
        elif level[-1] == done[-1].gpus:
            yield f"{name} is within {percent(part)} of the best plan from {level[0]:,} GPUs on or in between"
        else:
            yield f"{name} is within {percent(part)} of the best plan up to {level[-1]:,} GPUs, behind from there on"


def shifts_as_list(shifts: tuple[Shift, ...]) -> list[dict[str, object]]:
    """As JSON values."""
    return [
        {
            "what": shift.what,
            "factor": shift.factor,
            "best": factors(shift.best.plan) if shift.best else None,
            "seconds": shift.best.objective if shift.best else None,
            "changed": shift.changed,
            "staying": shift.staying,
        }
        for shift in shifts
    ]


def scales_as_list(scales: tuple[Scale, ...]) -> list[dict[str, object]]:
    """As JSON values."""
    return [
        {
            "gpus": scale.gpus,
            "tokens": scale.tokens,
            "micro_batches": scale.micro_batches,
            "best": factors(scale.best.plan) if scale.best else None,
            "seconds": scale.best.objective if scale.best else None,
            "rivals": {r.name: {"slower": r.slower, "missing_bytes": r.missing} for r in scale.rivals},
            "why": scale.why,
        }
        for scale in scales
    ]
