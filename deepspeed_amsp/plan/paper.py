"""The paper's own planning problem, so that its Table IV can be asked for (arXiv 2311.00257, sections IV and VI).

The paper does not say at which scale, with which activations and temporary memory it planned. The assumptions here
are a set under which its answers come out, at the smallest scale on which they are legal and fit (8, 8 and 32 GPUs); at
1024 GPUs they are not the optimum of its objective under any assumptions that were tried.
"""

from __future__ import annotations

from deepspeed_amsp.plan.activations import PER_LAYER
from deepspeed_amsp.plan.builtin_profiles import find_profile
from deepspeed_amsp.plan.factors import ShardFactor, Sharding
from deepspeed_amsp.plan.memory import MASTERS, MOMENTS, G, Memory, P
from deepspeed_amsp.plan.models import named_model
from deepspeed_amsp.plan.resolve import Plan, PublishMode, ReduceMode
from deepspeed_amsp.plan.solver import Modes, Objective, Problem
from deepspeed_amsp.plan.specs import GB, ClusterSpec, ModelSpec, TrainSpec, micro_batches

TOKENS = 1024 * 4096
"""Of a step (facts.csv: 1024 sequences of 4096)."""

TABLE_IV: dict[str, tuple[tuple[int, int], tuple[int, int], tuple[int, int]]] = {
    "llama-7b": ((1, 1), (1, 1), (8, 1)),
    "llama-13b": ((4, 1), (4, 1), (8, 1)),
    "llama-30b": ((8, 1), (8, 1), (8, 4)),
}
"""(s0, s1) of parameters, gradients and optimizer states: the rows of AMSP."""

SMALLEST_NODES = {"llama-7b": 1, "llama-13b": 1, "llama-30b": 4}
"""The fewest nodes of 8 GPUs on which a row of Table IV is legal and fits; there it is the optimum."""

CAPACITY = 78 * GB
"""Bytes of an 80 GB GPU left to a job by its runtime. Table IV comes out from 76.2 to 79.2 GB, which is where the
13B model's answer changes: below it does not fit, above gradients over all 8 GPUs allow parameters over 2."""


def paper_memory(model: ModelSpec, plan: Plan, train: TrainSpec) -> Memory:
    """D_total of Eq. 2: 2 Phi/s_p + 2 Phi/s_g + 12 Phi/s_os, activations, and temporary memory, in bytes.

    Activations are 34*s*b*h a layer; with recomputation 2*s*b*h a layer and one layer in full. Temporary memory is
    2 GB and a byte a parameter.
    """
    s, phi = plan.sharding, model.numel
    hidden = train.sequence * train.micro_batch * model.hidden
    kept = 2 * hidden * model.layers + PER_LAYER * hidden if train.recompute else PER_LAYER * hidden * model.layers
    states = {P: 2 * phi // s.s_p, G: 2 * phi // s.s_g, MASTERS: 4 * phi // s.s_os, MOMENTS: 8 * phi // s.s_os}
    at_peak = {**states, "activations": kept, "temporary": round(2 * GB) + phi}
    formulas = {
        P: "2 Phi / s_p",
        G: "2 Phi / s_g",
        MASTERS: "4 Phi / s_os",
        MOMENTS: "8 Phi / s_os",
        "activations": "2 s b h a layer and 34 s b h once" if train.recompute else "34 s b h a layer",
        "temporary": "2 GB + 1 byte a parameter",
    }
    at_rest = {**states, "G resting": states[G], "G owned": states[G]}
    return Memory(
        owner=0,
        at_rest=at_rest,
        at_peak=at_peak,
        phase="step",
        phases={"step": sum(at_peak.values())},
        formulas=formulas,
        estimated="assumptions under which the paper's Table IV comes out",
    )


def paper_sharding(name: str, nodes: int) -> Sharding:
    """The row of Table IV on ``nodes`` nodes of 8 GPUs."""
    p, g, os = (ShardFactor(*pair) for pair in TABLE_IV[name])
    return Sharding(p, g, os, ShardFactor(8, nodes))


def paper_problem(name: str, nodes: int, capacity: float = CAPACITY) -> Problem:
    """Eq. 1-7 for one of the paper's models on ``nodes`` nodes of 8 A800.

    Args:
        capacity: bytes of a GPU.

    Raises:
        SpecError: the paper's batch is no whole number of micro-batches there (more than 1024 GPUs).
    """
    m = micro_batches(TOKENS, 4096, 1, 8 * nodes)
    profile = find_profile("a800-hdr")
    return Problem(
        model=named_model(name),
        cluster=ClusterSpec(nodes, 8, gpu_memory=capacity),
        trainings=(TrainSpec(sequence=4096, micro_batches=m, recompute=name == "llama-30b"),),
        profile=profile,
        objective=Objective.COMM_TIME,
        modes=Modes(reduce=(ReduceMode.ALL_REDUCE,), publish=(PublishMode.BROADCAST,), hierarchical=(False,)),
        memory=paper_memory,
    )
