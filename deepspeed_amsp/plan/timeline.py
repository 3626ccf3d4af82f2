"""How long a step takes: a fast model of the executor's schedule, for one rank of a plan.

One compute stream and two links, a node's own and the network between nodes. A collective occupies the slower link
that it crosses, first come first served; computation waits for it where the executor would. The profile's times
were taken with all sibling groups active, so one rank stands for all.
"""

from __future__ import annotations

from dataclasses import dataclass

from deepspeed_amsp.plan.profile import Profile
from deepspeed_amsp.plan.replay import KINDS, Compute, Replay
from deepspeed_amsp.plan.resolve import Plan
from deepspeed_amsp.plan.sends import sends_of
from deepspeed_amsp.plan.specs import ClusterSpec, ModelSpec, TrainSpec

__all__ = ["KINDS", "Compute", "StepTime", "compute", "step_time"]

SIMULATED = 3
"""Micro-batches in the middle of a step; by then what the first one left behind has worn off."""


def compute(model: ModelSpec, cluster: ClusterSpec, train: TrainSpec) -> Compute:
    """From FLOPs at the cluster's efficiency; updates are bound by memory."""
    rate = cluster.peak(train.parameter_bytes) * cluster.efficiency
    starts = model.backward_starts(train.recompute)
    forward = tuple(flops / rate for flops in model.forward_flops(train.sequence, train.micro_batch))
    backward = tuple(flops / rate for flops in model.backward_flops(train.sequence, train.micro_batch))
    again = tuple(
        seconds if train.recompute and unit.layer is not None and at >= starts else 0.0
        for at, (seconds, unit) in enumerate(zip(forward, model.units, strict=True))
    )
    return Compute(forward, backward, again, train.optimizer.traffic / cluster.memory_bandwidth)


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step. exposed: what computation waited for, by kind; update: on the busiest owner."""

    seconds: float
    compute: float
    update: float
    exposed: dict[str, float]

    @property
    def exposed_total(self) -> float:
        """Seconds in which nothing was computed."""
        return sum(self.exposed.values())


def step_time(model: ModelSpec, plan: Plan, train: TrainSpec, profile: Profile, times: Compute) -> StepTime:
    """Simulate a step in the steady state, from where nothing but publishing reaches from one step into the next.

    With clipping that is when all gradients are there and owners begin to update. Without, owners have updated as
    buckets arrived, and begin to publish. Micro-batches between the first and the last are alike:
    SIMULATED of them are simulated, and the last of these stands for all others.
    """
    run = Replay(sends_of(model, plan, train, profile), plan, times)
    m = train.micro_batches
    run.step_phase(update=train.gradient_clipping)
    run.micro_batch(first=True, last=m == 1)
    for _ in range(min(m - 2, SIMULATED - 1)):
        run.micro_batch(first=False, last=False)
    if m - 2 >= SIMULATED:
        before, waited = run.now, dict(run.exposed)
        run.micro_batch(first=False, last=False)
        more = m - 2 - SIMULATED
        for kind in KINDS:
            run.exposed[kind] += more * (run.exposed[kind] - waited[kind])
        run.skip(more * (run.now - before))
    if m > 1:
        run.micro_batch(first=False, last=True)
    run.end_of_step(update=not train.gradient_clipping)
    return StepTime(run.now + times.fixed, times.step(m), run.updating, run.exposed)
