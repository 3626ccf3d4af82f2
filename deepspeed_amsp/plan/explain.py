"""An answer of the planner in words and numbers: pure data to tables and to JSON values."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

from deepspeed_amsp.plan.block import ds_config
from deepspeed_amsp.plan.cost import TERMS
from deepspeed_amsp.plan.factors import Candidate, ShardFactor, Sharding, divisors, violation
from deepspeed_amsp.plan.memory import Memory
from deepspeed_amsp.plan.profile import Op, Profile
from deepspeed_amsp.plan.report import Table, duration, percent, size
from deepspeed_amsp.plan.resolve import Plan
from deepspeed_amsp.plan.solver import Evaluated, Objective, Rejected, Search, fell, smallest_need
from deepspeed_amsp.plan.specs import TrainSpec

NEAR = 0.02
"""Plans this much above the best one are shown beside it: the model is not better than that."""

EXPOSED = {
    "gather": "waiting for parameters to be gathered (AllGather over param)",
    "reduce_scatter": "waiting for gradients over param (ReduceScatter)",
    "all_reduce": "waiting for gradients on their way to their owners, and for the norm",
    "publish": "waiting for updated parameters",
}


def factors(plan: Plan) -> str:
    """ "1x1 | 1x1 | 8x1": P, G and OS."""
    s = plan.sharding
    return f"{s.parameters} | {s.gradients} | {s.optimizer_states}"


def modes(plan: Plan) -> str:
    """How it reduces and publishes, "two_level, broadcast, in two stages"."""
    return f"{plan.reduce.value}, {plan.publish.value}{', in two stages' if plan.hierarchical else ''}"


def mfu(search: Search, found: Evaluated) -> float:
    """Model FLOPs (forward and backward, nothing for recomputation) over what the GPU could do."""
    train, peak = found.train, search.problem.cluster.peak(found.train.parameter_bytes)
    model = search.problem.model.part(train.tensor_parallel, train.pipeline_parallel)
    once = (pass_(train.sequence, train.micro_batch) for pass_ in (model.forward_flops, model.backward_flops))
    return train.micro_batches * sum(map(sum, once)) / (found.step.seconds * peak)


def batch_tokens(search: Search, train: TrainSpec) -> int:
    """Tokens of a step on all GPUs."""
    return train.sequence * train.micro_batch * train.micro_batches * search.problem.data_parallel.size


# --- text -----------------------------------------------------------------------------------------------------


def overview(search: Search) -> tuple[str, ...]:
    """What was asked, a line for each part of it."""
    p, train = search.problem, search.problem.trainings[0]
    cluster = p.cluster
    sizes = sorted({t.micro_batch for t in p.trainings})
    batch = (
        f"micro-batch {train.micro_batch}, M {train.micro_batches}"
        if len(sizes) == 1
        else f"micro-batch one of {', '.join(map(str, sizes))}"
    )
    parallel = "".join(
        f", {name} {count}"
        for name, count in (("tp", train.tensor_parallel), ("pp", train.pipeline_parallel))
        if count > 1
    )
    margin = f", {percent(p.margin)} of it kept free" if p.margin else ""
    lines = [
        f"model: {p.model.name}, {p.model.numel:,} parameters in {p.model.layers} layers",
        f"cluster: {cluster.nodes} nodes x {cluster.gpus_per_node} GPUs of {size(cluster.gpu_memory)}{margin}; "
        f"compute at {percent(cluster.efficiency)} of {cluster.peak(train.parameter_bytes) / 1e12:.4g} TFLOP/s"
        f"{_assumed(p.profile)}",
        f"training: sequences of {train.sequence}, {batch}, {batch_tokens(search, train):,} tokens a step, "
        f"{train.optimizer.name}, parameters in {train.parameter_bytes} bytes, gradients rest in "
        f"{train.gradient_bytes}, "
        f"recomputation {'on' if train.recompute else 'off'}{parallel}",
        f"profile: {p.profile.name} ({p.profile.kind}){f': {p.profile.notes}' if p.profile.notes else ''}",
    ]
    return tuple(lines)


def _assumed(profile: Profile) -> str:
    """What the profile does not say of its GPUs, so that an A100's stands in for it."""
    unsaid = {"FLOP/s": profile.peak_flops, "memory bandwidth": profile.memory_bandwidth}
    names = [name for name, value in unsaid.items() if value is None]
    return f"; {' and '.join(names)} of an A100, since the profile names none" if names else ""


def verdict(search: Search) -> str:
    """The answer in one line."""
    best = search.best
    if best is None:
        need = smallest_need(search)
        nearest = search.rejected[0]
        return (
            f"Nothing fits: the smallest need is {size(need)} a GPU, {size(nearest.missing)} more than there is, "
            f"of P | G | OS = {factors(nearest.plan)}; its largest term is {dominating(nearest.memory)}."
        )
    what = "T_comm" if search.problem.objective is Objective.COMM_TIME else "a step takes"
    return (
        f"P | G | OS = {factors(best.plan)} of {best.plan.sharding.data_parallel}, stage {best.plan.sharding.stage}, "
        f"{modes(best.plan)}: {what} {duration(best.objective)}, {best.tokens_per_gpu_second:,.0f} tokens/s a GPU, "
        f"{size(best.memory.peak)} of memory."
    )


def dominating(memory: Memory) -> str:
    """The largest term of a memory, "activations (34.1 GB)"."""
    name, _, most = max(memory.terms(), key=lambda term: term[2])
    return f"{name} ({size(most)})"


def best_table(search: Search) -> Table:
    """The best plan and those within NEAR of it, the best modes of each."""
    chosen = search.within(NEAR)
    rows = [
        (
            str(index),
            factors(found.plan),
            str(found.plan.sharding.stage),
            modes(found.plan),
            f"{found.train.micro_batch} x {found.train.micro_batches}",
            duration(found.objective),
            percent(search.slower(found), signed=True),
            f"{found.tokens_per_gpu_second:,.0f}",
            percent(mfu(search, found)),
            size(found.memory.peak),
            size(search.problem.capacity - found.memory.peak),
        )
        for index, found in enumerate(chosen, 1)
    ]
    what = "T_comm" if search.problem.objective is Objective.COMM_TIME else "step"
    columns = (
        "#",
        "P | G | OS",
        "stage",
        "reduce, publish",
        "batch x M",
        what,
        "to best",
        "tok/s/GPU",
        "MFU",
        "memory",
        "free",
    )
    return Table(
        f"The best plan, and all within {percent(NEAR)} of it",
        columns,
        tuple(rows),
        right=frozenset({5, 6, 7, 8, 9, 10}),
    )


def memory_table(search: Search) -> Table:
    """What the best plan's fullest moment consists of; of the least demanding plan where nothing fits."""
    entry = search.best or search.rejected[0]
    need, capacity = entry.memory, search.problem.capacity
    rows = [(name, size(count), percent(count / need.peak), formula) for name, formula, count in need.terms()]
    rows.append(("in all", size(need.peak), "100.0 %", f"on the fullest rank, in its fullest phase: {need.phase}"))
    left = capacity - need.peak
    rows.append(("free" if left >= 0 else "missing", size(abs(left)), "", f"of {size(capacity)} that a plan may take"))
    notes = ["not counted: the allocator's own, the runtime's, and communicators"]
    if need.estimated:
        notes.append(need.estimated)
    title = f"Memory of P | G | OS = {factors(entry.plan)}"
    return Table(title, ("term", "bytes", "part", "how"), tuple(rows), tuple(notes), frozenset({1, 2}))


def time_table(search: Search) -> Table:
    """Where the best plan's step goes, and what its communication would take if nothing of it were hidden."""
    best = search.best
    if best is None:
        return Table("Step time", ("term", "time", "part", "what"), ())
    step, total = best.step, best.step.seconds
    rows = [
        ("compute", duration(step.compute), percent(step.compute / total), "forward and backward of M micro-batches")
    ]
    rows += [
        (f"exposed {kind}", duration(seconds), percent(seconds / total), EXPOSED[kind])
        for kind, seconds in step.exposed.items()
    ]
    rows.append(
        ("update", duration(step.update), percent(step.update / total), "of the optimizer on the busiest owner")
    )
    rows.append(("step", duration(total), "100.0 %", "in all"))
    rows += [
        (name, duration(seconds), "", f"not hidden: {TERMS[name]}")
        for name, seconds in best.cost.terms.items()
        if seconds
    ]
    notes = tuple(f"extrapolated: {why}" for why in extrapolations(best))
    columns = ("term", "time", "part", "what")
    return Table("Step time of the best plan", columns, tuple(rows), notes, frozenset({1, 2}))


def reason(search: Search, entry: Evaluated | Rejected) -> str:
    """Why a legal plan is not the chosen one."""
    if isinstance(entry, Rejected):
        return entry.reason
    slower = search.slower(entry)
    if entry is search.best:
        return "chosen"
    if slower <= 0 or percent(slower) == "0.0 %":
        return f"as fast, needs {size(entry.memory.peak)} of memory"
    return f"slower by {percent(slower)}"


def rejections(search: Search) -> Iterator[tuple[str, int, str]]:
    """(P | G | OS, micro-batch, reason) of every legal sharding that was not chosen, nearest first."""
    for found in search.ranked[1:]:
        yield factors(found.plan), found.train.micro_batch, reason(search, found)
    for entry in search.rejected:
        yield factors(entry.plan), entry.train.micro_batch, reason(search, entry)


def illegal(data_parallel: ShardFactor) -> Iterator[tuple[str, str]]:
    """(P | G | OS, rule) of every triple of divisors that breaks a rule."""
    every = [ShardFactor(*pair) for pair in product(divisors(data_parallel.s0), divisors(data_parallel.s1))]
    for p, g, os in product(every, repeat=3):
        broken = violation(Candidate(p, g, os, data_parallel))
        if broken is not None:
            rule, component = broken
            yield f"{p} | {g} | {os}", f"{rule.name} ({rule.equation}), at {component}: {rule.text}"


def rejected_table(search: Search, limit: int | None = 12) -> Table:
    """Plans that were not chosen with their reasons, and how many fell by each rule before anything was computed."""
    rows = [
        (where, str(micro_batch), why)
        for index, (where, micro_batch, why) in enumerate(rejections(search))
        if limit is None or index < limit
    ]
    more = len(search.ranked) + len(search.rejected) - bool(search.ranked) - len(rows)
    counted = search.space
    fallen = ", ".join(f"{count:,} by {name}" for name, count in fell(search).items())
    notes = [
        f"{counted.raw:,} triples of divisors, {counted.legal:,} of legal factors, {counted.ordered:,} in order, "
        f"{counted.searched:,} searched; fallen: {fallen or 'none'}"
    ]
    if more > 0:
        notes.insert(0, f"{more} more legal ones; --all lists everything")
    return Table("Not chosen", ("P | G | OS", "batch", "reason"), tuple(rows), tuple(notes), frozenset({1}))


def illegal_table(search: Search) -> Table:
    """Every triple that breaks a rule."""
    return Table("Not legal", ("P | G | OS", "rule"), tuple(illegal(search.problem.data_parallel)))


def extrapolations(found: Evaluated) -> tuple[str, ...]:
    """Where a plan's time rests on messages or meshes that its profile did not measure."""
    profile, largest = found.problem.profile, dict[tuple[Op, ShardFactor], float]()
    for line in found.cost.lines:
        op, size, mesh = line.message[:3]
        largest[op, mesh] = max(size, largest.get((op, mesh), 0.0))
    whys = (profile.extrapolated(op, size, mesh) for (op, mesh), size in largest.items())
    return tuple(why for why in whys if why)


def beside(search: Search, sharding: Sharding) -> str:
    """What becomes of a sharding that somebody asked for."""
    every: list[Evaluated | Rejected] = [*search.ranked, *search.rejected]
    for entry in every:
        if entry.plan.sharding == sharding:
            return f"P | G | OS = {factors(entry.plan)}: {reason(search, entry)}"
    if sharding.s_p > 1 and all(train.optimizer.whole_tensors for train in search.problem.trainings):
        return (
            f"{sharding}: refused by the engine, since {search.problem.trainings[0].optimizer.name} needs tensors whole"
        )
    return f"{sharding}: legal, but not searched (s_g is neither s_p nor s_os)"


# --- values ---------------------------------------------------------------------------------------------------


def _plan(search: Search, plan: Plan, train: TrainSpec, need: Memory) -> dict[str, Any]:
    return {
        "sharding": plan.sharding.as_dict(),
        "data_parallel": plan.sharding.data_parallel.as_list(),
        "stage": plan.sharding.stage,
        "reduce": plan.reduce.value,
        "publish": plan.publish.value,
        "hierarchical": plan.hierarchical,
        "micro_batch": train.micro_batch,
        "micro_batches": train.micro_batches,
        "memory": {
            "peak_bytes": need.peak,
            "free_bytes": search.problem.capacity - need.peak,
            "phase": need.phase,
            "terms": [{"name": name, "formula": formula, "bytes": count} for name, formula, count in need.terms()],
        },
    }


def evaluated(search: Search, found: Evaluated) -> dict[str, Any]:
    """A plan that fits as JSON values: seconds, bytes, parts."""
    return {
        **_plan(search, found.plan, found.train, found.memory),
        "objective_seconds": found.objective,
        "slower_by": search.slower(found),
        "step": {
            "seconds": found.step.seconds,
            "compute": found.step.compute,
            "update": found.step.update,
            "exposed": dict(found.step.exposed),
        },
        "communication": found.cost.terms,
        "extrapolated": list(extrapolations(found)),
        "tokens_per_gpu_second": found.tokens_per_gpu_second,
        "mfu": mfu(search, found),
    }


def as_dict(search: Search) -> dict[str, Any]:
    """Everything as JSON values; keys do not change within a version."""
    p, best = search.problem, search.best
    need = smallest_need(search)
    return {
        "version": 1,
        "fits": best is not None,
        "verdict": verdict(search),
        "model": {"name": p.model.name, "parameters": p.model.numel, "layers": p.model.layers},
        "cluster": dict(vars(p.cluster)),
        "capacity_bytes": p.capacity,
        "margin": p.margin,
        "objective": p.objective.value,
        "profile": {"name": p.profile.name, "kind": p.profile.kind, "notes": p.profile.notes},
        "trainings": [{**vars(train), "optimizer": train.optimizer.name} for train in p.trainings],
        "space": {**vars(search.space), "fell": fell(search)},
        "smallest_need_bytes": need,
        "best": evaluated(search, best) if best else None,
        "ds_config": ds_config(best.plan, best.train) if best else None,
        "within_2_percent": [evaluated(search, found) for found in search.within(NEAR)],
        "pareto": [
            {"factors": factors(f.plan), "peak_bytes": f.memory.peak, "seconds": f.objective} for f in pareto(search)
        ],
        "not_chosen": [
            {"factors": where, "micro_batch": micro_batch, "reason": why}
            for where, micro_batch, why in rejections(search)
        ],
        "nearest_miss": None if best else _plan(search, *_nearest(search.rejected[0])),
    }


def _nearest(entry: Rejected) -> tuple[Plan, TrainSpec, Memory]:
    return entry.plan, entry.train, entry.memory


def pareto(search: Search) -> list[Evaluated]:
    """Plans that no other beats in both memory and time, from the fastest to the smallest."""
    front: list[Evaluated] = []
    for found in sorted(search.ranked, key=lambda f: (f.objective, f.memory.peak)):
        if not front or found.memory.peak < front[-1].memory.peak:
            front.append(found)
    return front
