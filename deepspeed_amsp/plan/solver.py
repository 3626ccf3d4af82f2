"""Which plan: enumerate, pre-filter, evaluate, rank; every plan that is not chosen has its reason.

Brute force, as in the paper (section IV-D): the rules leave 121 shardings of 32,768 at 8 x 128 GPUs.
"""

from __future__ import annotations

import gc
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from itertools import product
from typing import Literal

from deepspeed_amsp.plan.cost import BUCKET_BYTES, Cost, executor_cost, paper_cost
from deepspeed_amsp.plan.factors import (
    RULES,
    Candidate,
    ShardFactor,
    Sharding,
    divisors,
    enumerate_shardings,
    legal_factors,
    violation,
)
from deepspeed_amsp.plan.memory import Memory, memory
from deepspeed_amsp.plan.profile import Profile
from deepspeed_amsp.plan.report import size
from deepspeed_amsp.plan.resolve import Overlap, Plan, PublishMode, ReduceMode
from deepspeed_amsp.plan.routes import Traffic, distinct, traffic
from deepspeed_amsp.plan.specs import ClusterSpec, ModelSpec, SpecError, TrainSpec
from deepspeed_amsp.plan.timeline import Compute, StepTime, compute, step_time

TIE_SECONDS = 1e-3
"""Plans closer than this are equally fast, and the one with less memory is better."""


class Objective(str, Enum):
    """What is made small."""

    STEP_TIME = "step-time"  # seconds of a step, overlap included
    COMM_TIME = "comm-time"  # the paper's T_comm, Eq. 1


@dataclass(frozen=True)
class Space:
    """How many factor triples there are after each filter (Eq. 3-7), and by which rule the others fell."""

    raw: int
    legal: int
    ordered: int
    searched: int
    broken: dict[str, int]


def space(data_parallel: ShardFactor, gradients: Literal["any", "paper"] = "paper") -> Space:
    """Count it: raw triples of divisors, legal on their own (Eq. 5-7), in the order of Eq. 3-4, searched."""
    factors = [ShardFactor(*pair) for pair in product(divisors(data_parallel.s0), divisors(data_parallel.s1))]
    legal = legal_factors(data_parallel)
    alone = {rule.name: 0 for rule in RULES}
    illegal = len(factors) - len(legal)
    # A factor that breaks Eq. 7 makes every triple illegal that it is part of.
    alone["whole nodes"] = len(factors) ** 3 - len(legal) ** 3 if illegal else 0
    ordered = 0
    for p, g, os in product(legal, repeat=3):
        broken = violation(Candidate(p, g, os, data_parallel))
        if broken is None:
            ordered += 1
        else:
            alone[broken[0].name] += 1
    searched = len(enumerate_shardings(data_parallel, gradients))
    return Space(len(factors) ** 3, len(legal) ** 3, ordered, searched, {k: n for k, n in alone.items() if n})


@dataclass(frozen=True)
class Modes:
    """Which of the executor's modes are looked at beside the factors."""

    reduce: tuple[ReduceMode, ...] = tuple(ReduceMode)
    publish: tuple[PublishMode, ...] = tuple(PublishMode)
    hierarchical: tuple[bool, ...] = (False, True)
    overlap: Overlap = field(default_factory=Overlap)
    bucket_bytes: int = BUCKET_BYTES
    prefetch_bytes: int = 64 * 2**20
    keep_after_forward: str | int = "none"

    def plans(self, sharding: Sharding) -> list[Plan]:
        """One plan for every combination that sends something else; the simplest of equal ones."""
        combinations = product(self.hierarchical, self.reduce[::-1], self.publish)
        return distinct(
            [
                Plan(
                    sharding=sharding,
                    reduce=reduce,
                    publish=publish,
                    overlap=self.overlap,
                    hierarchical=hierarchical,
                    bucket_bytes=self.bucket_bytes,
                    prefetch_bytes=self.prefetch_bytes,
                    keep_after_forward=self.keep_after_forward,
                )
                for hierarchical, reduce, publish in combinations
            ],
        )


MemoryModel = Callable[[ModelSpec, Plan, TrainSpec], Memory]


@dataclass(frozen=True)
class Problem:
    """What is asked.

    trainings: alternatives of equal tokens a step (micro-batch and M are then chosen, too).
    margin: part of a GPU's memory that must stay free, in [0, 1).
    times: computation measured elsewhere instead of the cluster's FLOPs.
    shardings: only these; None for all.
    """

    model: ModelSpec
    cluster: ClusterSpec
    trainings: tuple[TrainSpec, ...]
    profile: Profile
    objective: Objective = Objective.STEP_TIME
    gradients: Literal["any", "paper"] = "paper"
    modes: Modes = field(default_factory=Modes)
    margin: float = 0.0
    times: Callable[[ModelSpec, ClusterSpec, TrainSpec], Compute] = compute
    memory: MemoryModel = memory
    shardings: tuple[Sharding, ...] | None = None

    @property
    def capacity(self) -> float:
        """Bytes that a plan may take."""
        return self.cluster.gpu_memory * (1 - self.margin)

    def part(self, train: TrainSpec) -> ModelSpec:
        """What a GPU has of the model."""
        return self.model.part(train.tensor_parallel, train.pipeline_parallel)

    @property
    def data_parallel(self) -> ShardFactor:
        """(R, N) of data parallelism: what tensor and pipeline parallelism leave of the cluster.

        Raises:
            SpecError: they do not divide it.
        """
        return self.trainings[0].data_parallel(self.cluster)


@dataclass(frozen=True)
class Evaluated:
    """A plan that fits, with what it costs. objective: seconds of what is made small."""

    problem: Problem
    plan: Plan
    train: TrainSpec
    memory: Memory
    step: StepTime
    objective: float

    @cached_property
    def cost(self) -> Cost:
        """Its communication term by term."""
        return communication(self.problem, self.plan, self.train)

    @property
    def tokens_per_gpu_second(self) -> float:
        """TGS, by the GPUs of data parallelism and those that share a replica otherwise."""
        t = self.train
        tokens = t.sequence * t.micro_batch * t.micro_batches
        return tokens / self.step.seconds / (t.tensor_parallel * t.pipeline_parallel)


@dataclass(frozen=True)
class Rejected:
    """A sharding that does not fit: ``missing`` bytes more than a GPU may use, with its least demanding modes."""

    plan: Plan
    train: TrainSpec
    memory: Memory
    missing: float

    @property
    def reason(self) -> str:
        """In words."""
        return f"needs {size(self.missing)} more"


@dataclass(frozen=True)
class Search:
    """The answer: plans from best to worst, and what did not fit, from least to most missing."""

    problem: Problem
    space: Space
    ranked: tuple[Evaluated, ...]
    rejected: tuple[Rejected, ...] = field(default=())

    @property
    def best(self) -> Evaluated | None:
        """None when nothing fits."""
        return self.ranked[0] if self.ranked else None

    def within(self, part: float) -> tuple[Evaluated, ...]:
        """The plans whose objective is at most ``part`` above the best one's, e.g. 0.02."""
        if self.best is None:
            return ()
        limit = self.best.objective * (1 + part)
        return tuple(plan for plan in self.ranked if plan.objective <= limit)

    def slower(self, plan: Evaluated) -> float:
        """By which part a plan's objective is above the best one's."""
        best = self.ranked[0].objective
        return plan.objective / best - 1 if best > 0 else 0.0


def search(problem: Problem) -> Search:
    """Evaluate every plan.

    Raises:
        SpecError: tensor and pipeline parallelism do not fit on the cluster.
        ProfileError: a group is outside what the profile has measured.
    """
    with _uncollected():
        return _search(problem)


@contextmanager
def _uncollected() -> Iterator[None]:
    """Nothing here makes cycles, and looking for them among many small objects takes a quarter of the time."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _search(problem: Problem) -> Search:
    data_parallel = problem.data_parallel
    chosen = problem.shardings or tuple(enumerate_shardings(data_parallel, problem.gradients))
    fitting: list[Evaluated] = []
    rejected: list[Rejected] = []
    for train in problem.trainings:
        permitted = [s for s in chosen if s.s_p == 1 or not train.optimizer.whole_tensors]
        if not permitted:
            raise SpecError(f"training: {train.optimizer.name} needs tensors whole, so parameters cannot be sharded.")
        times = problem.times(problem.part(train), problem.cluster, train)
        known: dict[Traffic, StepTime] = {}
        for sharding in permitted:
            found = _of_a_sharding(problem, sharding, train, times, known)
            if isinstance(found, Rejected):
                rejected.append(found)
            else:
                fitting.append(found)
    rejected.sort(key=lambda entry: entry.missing)
    return Search(problem, space(data_parallel, problem.gradients), tuple(rank(fitting)), tuple(rejected))


def _of_a_sharding(
    problem: Problem, sharding: Sharding, train: TrainSpec, times: Compute, known: dict[Traffic, StepTime]
) -> Evaluated | Rejected:
    """With the modes in which it is fastest, of those in which it fits. ``known``: step times by traffic."""
    plans = problem.modes.plans(sharding)
    if problem.objective is Objective.COMM_TIME:
        plans = plans[:1]  # the paper's costs know no modes
    model = problem.part(train)
    timed = []
    for plan in plans:
        sent = traffic(plan, train.micro_batches)
        if sent not in known:
            known[sent] = step_time(model, plan, train, problem.profile, times)
        timed.append((known[sent], plan))
    timed.sort(key=lambda entry: entry[0].seconds)
    fitting: list[Evaluated] = []
    needs: list[tuple[Plan, Memory]] = []
    for step, plan in timed:
        if fitting and step.seconds > fitting[0].step.seconds + TIE_SECONDS:
            break
        need = problem.memory(problem.model, plan, train)
        needs.append((plan, need))
        if need.peak <= problem.capacity:
            objective = step.seconds
            if problem.objective is Objective.COMM_TIME:
                objective = communication(problem, plan, train).total
            fitting.append(Evaluated(problem, plan, train, need, step, objective))
    if fitting:
        return rank(fitting)[0]
    plan, need = min(needs, key=lambda entry: entry[1].peak)
    return Rejected(plan, train, need, need.peak - problem.capacity)


def communication(problem: Problem, plan: Plan, train: TrainSpec) -> Cost:
    """As the objective counts it: the paper's closed forms, or what the executor sends."""
    cost = paper_cost if problem.objective is Objective.COMM_TIME else executor_cost
    return cost(problem.part(train), plan, train, problem.profile)


def rank(plans: Iterable[Evaluated]) -> list[Evaluated]:
    """Fastest first; of all within a tie with the fastest one left, the one with the least memory."""
    left = sorted(plans, key=lambda plan: (plan.objective, plan.memory.peak))
    ranked: list[Evaluated] = []
    while left:
        limit = left[0].objective + TIE_SECONDS
        tied = [index for index, plan in enumerate(left) if plan.objective <= limit]
        ranked.append(left.pop(min(tied, key=lambda index: (left[index].memory.peak, index))))
    return ranked


def alternatives(train: TrainSpec, micro_batches: Sequence[int]) -> tuple[TrainSpec, ...]:
    """The same tokens a step in micro-batches of other sizes; sizes that do not divide them are left out."""
    sequences = train.micro_batch * train.micro_batches
    return tuple(
        replace(train, micro_batch=size, micro_batches=sequences // size)
        for size in micro_batches
        if size >= 1 and sequences % size == 0
    )


def smallest_need(result: Search) -> float:
    """Bytes of GPU memory with which something would fit; infinity where nothing was looked at."""
    needs = [plan.memory.peak for plan in result.ranked] + [entry.memory.peak for entry in result.rejected]
    return min(needs, default=math.inf) / (1 - result.problem.margin)


def fell(result: Search) -> dict[str, int]:
    """How many triples each filter took out, and how many of the searched shardings did not fit."""
    counts: Counter[str] = Counter(result.space.broken)
    counts["s_g in between"] = result.space.ordered - result.space.searched
    whole = all(train.optimizer.whole_tensors for train in result.problem.trainings)
    if whole and result.problem.shardings is None:
        every = enumerate_shardings(result.problem.data_parallel, result.problem.gradients)
        counts["whole tensors"] = sum(sharding.s_p > 1 for sharding in every)
    counts["memory"] = len({str(entry.plan.sharding) for entry in result.rejected})
    return {name: count for name, count in counts.items() if count}
