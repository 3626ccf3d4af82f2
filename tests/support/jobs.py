"""What a rank does in a multi-rank test: train a small model with an amsp block and report what it holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from tests.support import models, worker


def _plain_groups() -> None:
    from deepspeed_amsp import mesh

    mesh.GROUP_BACKEND = None


worker.after_job.append(_plain_groups)


@dataclass(frozen=True)
class Case:
    """One training run. ``amsp`` is the block; ``zero`` adds to zero_optimization, ``extra`` to the top level."""

    amsp: Mapping[str, Any] | None
    stage: int
    model: str = "mlp"
    optimizer: str = "adamw"
    micro_batches: int = 1
    steps: int = 4
    clip: float = 0.0
    bf16: bool = False
    adversarial: bool = False
    zero: Mapping[str, Any] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)

    def ds_config(self) -> dict[str, Any]:
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": models.SAMPLES,
            "gradient_accumulation_steps": self.micro_batches,
            "gradient_clipping": self.clip,
            "zero_optimization": {"stage": self.stage, **self.zero},
            "zero_allow_untested_optimizer": True,
            "steps_per_print": 10**9,
            **self.extra,
        }
        if self.bf16:
            config["bf16"] = {"enabled": True}
        if self.amsp is not None:
            config["amsp"] = dict(self.amsp)
        return config


@dataclass
class Report:
    """What one rank saw and holds after training.

    shards: unit name -> this rank's flat working shard, with its ``param`` coordinate (s_p > 1).
    parameters: name -> working copy (s_p = 1).
    masters: (name, start, stop) -> flat fp32 master of an owned piece.
    """

    losses: list[float]
    norms: list[float]
    parameters: dict[str, torch.Tensor]
    shards: dict[str, torch.Tensor]
    coordinates: tuple[int, ...]
    masters: dict[tuple[str, int, int], torch.Tensor]
    memory: dict[str, dict[str, int]]
    log: list[tuple[str, str, str, int, int]]


def make_engine(case: Case) -> Any:
    """An engine for ``case``; groups are adversarial from here on when the case says so."""
    import deepspeed

    import deepspeed_amsp  # noqa: F401  (installs the engine)
    from deepspeed_amsp import mesh

    mesh.GROUP_BACKEND = "adversarial" if case.adversarial else None
    if case.adversarial:
        from tests.support import adversarial

        adversarial.configure(seed=1234, max_delay_ms=1.0, enabled=True)
    model = models.make_model(case.model)
    optimizer = models.make_optimizer(case.optimizer, model)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=case.ds_config())
    return engine


def train_step(engine: Any, case: Case, step: int) -> float:
    """One accumulation window; returns the loss averaged over micro-batches and ranks."""
    rank, world = dist.get_rank(), dist.get_world_size()
    total = torch.zeros((), dtype=torch.float64)
    for micro in range(case.micro_batches):
        tokens = models.batch(step, micro, world)[rank * models.SAMPLES : (rank + 1) * models.SAMPLES]
        loss = models.loss_of(engine(tokens[:, :-1]), tokens)
        engine.backward(loss)
        engine.step()
        total += loss.detach().double() / case.micro_batches
    dist.all_reduce(total)
    return float(total) / world


def trained(engine: Any, case: Case) -> Report:
    """Train ``engine`` for ``case.steps`` steps, report, and destroy it."""
    losses, norms = [], []
    for step in range(case.steps):
        losses.append(train_step(engine, case, step))
        norms.append(float(engine.get_global_grad_norm()))
    report = report_of(engine, losses, norms)
    engine.destroy()
    return report


def train(case: Case) -> Report:
    """Train ``case.steps`` steps and report. The engine is destroyed afterwards."""
    report = trained(make_engine(case), case)
    if case.adversarial:
        from tests.support import adversarial

        adversarial.assert_all_waited()
        assert adversarial.issued() > 0, "nothing went through the adversarial groups"
    return report


def report_of(engine: Any, losses: list[float], norms: list[float]) -> Report:
    optimizer, runtime = engine.optimizer, engine.amsp
    optimizer.wait_for_parameters()
    sharded = runtime.plan.sharding.s_p > 1
    return Report(
        losses=losses,
        norms=norms,
        parameters={} if sharded else {n: p.detach().clone() for n, p in engine.module.named_parameters()},
        shards={f"{u.index}:{u.name}": u.shard.clone() for u in runtime.units} if sharded else {},
        coordinates=tuple(runtime.mesh.coordinates),
        masters={
            (m.slot.piece.param.name, m.slot.piece.start, m.slot.piece.stop): m.value.detach().flatten().clone()
            for m in optimizer.states.all_masters()
        },
        memory=runtime.memory_report(),
        log=[(e.op, e.purpose.value, e.axis, len(e.ranks), e.bytes) for e in runtime.comm.last_step],
    )


def train_plain(case: Case) -> tuple[list[float], list[float]]:
    """The same script and data under plain DeepSpeed: losses and norms by step."""
    engine = make_engine(case)
    losses, norms = [], []
    for step in range(case.steps):
        losses.append(train_step(engine, case, step))
        norms.append(float(engine.get_global_grad_norm()))
    engine.destroy()
    return losses, norms
