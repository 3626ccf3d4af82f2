"""A small job for the planner's tests: six units, two nodes of four."""

from __future__ import annotations

from dataclasses import replace

from deepspeed_amsp.plan.builtin_profiles import find_profile
from deepspeed_amsp.plan.layout import ParamSpec
from deepspeed_amsp.plan.profile import Entry, Op, Point, meshes_needed
from deepspeed_amsp.plan.solver import Modes, Objective, Problem
from deepspeed_amsp.plan.specs import ClusterSpec, ModelSpec, TrainSpec, UnitSpec

HIDDEN, VOCAB, LAYERS = 512, 8_192, 4
PEAK = 3.12e12
"""FLOP/s and links are a hundredth of an A800's, so that plans differ by more than the millisecond of a tie."""


def small_model() -> ModelSpec:
    def unit(name: str, rows: int, columns: int, layer: int | None, flops: bool = True) -> UnitSpec:
        return UnitSpec(name, (ParamSpec(f"{name}.weight", (rows, columns)),), layer, 2.0 * rows * columns * flops)

    units = [unit("embedding", VOCAB, HIDDEN, None, flops=False)]
    for layer in range(LAYERS):
        units += [unit(f"{layer}.up", 4 * HIDDEN, HIDDEN, layer), unit(f"{layer}.down", HIDDEN, 4 * HIDDEN, layer)]
    return ModelSpec("small", (*units, unit("head", VOCAB, HIDDEN, None)), HIDDEN, VOCAB)


def small_problem(memory: float = 2e9, margin: float = 0.0, nodes: int = 2, train: TrainSpec | None = None) -> Problem:
    return Problem(
        model=small_model(),
        cluster=ClusterSpec(nodes, 4, memory, peak_flops=PEAK),
        trainings=(train or TrainSpec(sequence=256, micro_batches=4),),
        profile=replace(find_profile("a800-hdr"), gpus_per_node=4, nodes=nodes).scaled(0.01, 0.01),
        objective=Objective.STEP_TIME,
        modes=Modes(bucket_bytes=8 * 2**20),
        margin=margin,
    )


def measured_problem(memory: float = 2e9) -> Problem:
    """The same with a profile that knows its own number of nodes alone."""
    problem = small_problem(memory)
    shape = problem.cluster.data_parallel
    sizes = (2**16, 2**20, 2**23)
    entries = tuple(
        Entry(op, mesh, tuple(Point(size, problem.profile.time(op, size, mesh)) for size in sizes))
        for mesh in meshes_needed(shape)
        for op in Op
    )
    return replace(problem, profile=replace(problem.profile, name="measured", links=None, entries=entries))
