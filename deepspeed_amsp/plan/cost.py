"""Time of a step's communication, term by term: the paper's closed forms, and what the executor sends.

Symbols as in the paper (arXiv 2311.00257, section IV-C): Phi parameters, M micro-batches, U bucket bytes, AG
AllGather, RS ReduceScatter, AR AllReduce, BC Broadcast. Both sum over all units, the embedding and the head
included, which the paper's sum over layers leaves out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from deepspeed_amsp.plan.profile import Op, Profile
from deepspeed_amsp.plan.resolve import Plan
from deepspeed_amsp.plan.routes import Message, Routes, buckets, over
from deepspeed_amsp.plan.specs import ModelSpec, TrainSpec

MIB = 2**20
BUCKET_BYTES = 128 * MIB
"""U where a plan does not say it: the upper end of the 64-128 MB that are usual."""

TERMS: dict[str, str] = {
    "T_p": "gather and reduce parameters (Eq. of T_p)",
    "T_g": "reduce gradients in all micro-batches but the last (T_g)",
    "T_os^0": "reduce gradients to their owners in the last micro-batch (T_os^0)",
    "T_os^1": "publish updated parameters (T_os^1)",
}


@dataclass(frozen=True)
class Line:
    """Messages of one kind within a term: ``calls`` collectives of ``size`` bytes, which take ``seconds`` in all.

    calls is a real number in the paper's forms, where buckets are full by assumption.
    """

    term: str
    message: Message
    calls: float
    seconds: float


@dataclass(frozen=True)
class Cost:
    """What a step's communication takes, were nothing of it hidden and nothing done at once."""

    lines: tuple[Line, ...]

    def term(self, name: str) -> float:
        """Seconds of "T_p", "T_g", "T_os^0" or "T_os^1"."""
        return sum(line.seconds for line in self.lines if line.term == name)

    @property
    def terms(self) -> dict[str, float]:
        """All four."""
        return {name: self.term(name) for name in TERMS}

    @property
    def total(self) -> float:
        """T_comm, in seconds."""
        return sum(line.seconds for line in self.lines)


def paper_cost(model: ModelSpec, plan: Plan, train: TrainSpec, profile: Profile) -> Cost:
    """T_p + T_g + T_os^0 + T_os^1 as the paper has them; the plan's modes do not matter, its bucket_bytes is U.

    Corrected where the paper's text is not what it means: T_os^1 = 0 at s_os = s_p, where nothing is published.
    """
    s = plan.sharding
    m, wire = train.micro_batches, train.parameter_bytes
    lines: list[Line] = []

    def add(term: str, op: Op, size: float, mesh: object, calls: float) -> None:
        message = Message(op, size, mesh)  # type: ignore[arg-type]
        if message.mesh.size > 1 and calls:
            lines.append(Line(term, message, calls, calls * profile.time(op, size, message.mesh)))

    for elements, units in sorted(Counter(unit.numel for unit in model.units).items()):
        add("T_p", Op.ALL_GATHER, wire * elements, s.parameters, 2 * m * units)
        add("T_p", Op.REDUCE_SCATTER, wire * elements, s.parameters, m * units)
    bucket = float(plan.bucket_bytes or BUCKET_BYTES)
    calls = wire * model.trainable_numel / (bucket * s.s_p)
    add("T_g", Op.ALL_REDUCE, bucket, over(s.gradients, s.parameters), (m - 1) * calls)
    add("T_os^0", Op.ALL_REDUCE, bucket, over(s.data_parallel, s.parameters), calls)
    published = wire * model.trainable_numel / s.s_os
    add("T_os^1", Op.BROADCAST, published, over(s.optimizer_states, s.parameters), s.optim)
    return Cost(tuple(lines))


def executor_cost(model: ModelSpec, plan: Plan, train: TrainSpec, profile: Profile) -> Cost:
    """What the engine sends for this plan: real buckets, its reduce and publish modes, in one stage or two."""
    routes = Routes(plan)
    m, wire = train.micro_batches, train.parameter_bytes
    messages: Counter[tuple[str, Message]] = Counter()

    def add(term: str, stages: Iterable[Message], times: int) -> None:
        for message in stages:
            messages[term, message] += times

    starts = len(model.units) if plan.keep_after_forward == "all" else model.backward_starts(train.recompute)
    for at, unit in enumerate(model.units):
        add("T_p", routes.gather(wire * unit.numel), (1 if at < starts else 2) * m)
        if unit.trainable_numel:
            add("T_p", routes.param_reduce(wire * unit.numel), m)
    for bucket in buckets(model, plan, train):
        add("T_g", routes.partial(bucket.reduced), m - 1)
        add("T_os^0", routes.final(bucket.reduced), 1)
        add("T_os^1", routes.publish(bucket.published, bucket.gathered), 1)
    lines = [
        Line(term, message, times * message.copies, times * message.copies * profile.time(*message[:3]))
        for (term, message), times in messages.items()
        if times
    ]
    return Cost(tuple(lines))
