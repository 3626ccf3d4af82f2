"""Beside tensor and sequence parallelism: the engine is the data-parallel part, and the whole equals one process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from deepspeed_amsp.plan.factors import ShardFactor, Sharding
from tests.engine.test_seam import config
from tests.support import hybrid
from tests.support.models import SAMPLES, Outcome, batch, make_optimizer
from tests.support.pool import pool

ONE, TWO, PAIR = ShardFactor(1, 1), ShardFactor(2, 1), ShardFactor(1, 2)


@dataclass(frozen=True)
class Run:
    """A few steps on ``parts``-way tensor parallelism; ``per_node`` counts all ranks of a node."""

    sharding: Sharding
    parts: int = 2
    per_node: int = 4
    micro_batches: int = 2
    clip: float = 0.4
    steps: int = 3
    adversarial: bool = False
    block: Mapping[str, Any] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def world(self) -> int:
        return self.sharding.s_dp * self.parts

    def ds_config(self) -> dict[str, Any]:
        return {
            "train_batch_size": SAMPLES * self.micro_batches * self.sharding.s_dp,
            "train_micro_batch_size_per_gpu": SAMPLES,
            "gradient_clipping": self.clip,
            "zero_optimization": {"stage": self.sharding.stage},
            "steps_per_print": 10**9,
            "amsp": {
                "sharding": self.sharding.as_dict(),
                "topology": {"gpus_per_node": self.per_node},
                "bucket_bytes": 1200,
                **self.block,
            },
            **self.extra,
        }


@dataclass
class Seen:
    """What a rank saw, and its part of the model: masters, and working copies, whole."""

    losses: list[float]
    norms: list[float]
    masters: dict[str, torch.Tensor]
    working: dict[str, torch.Tensor]
    groups: dict[str, tuple[int, ...]]
    notes: list[Any] = field(default_factory=list)


def engine_for(run: Run, model: nn.Module, **kwargs: Any) -> Any:
    import deepspeed

    import deepspeed_amsp  # noqa: F401
    from deepspeed_amsp import mesh

    mesh.GROUP_BACKEND = "adversarial" if run.adversarial else None
    if run.adversarial:
        from tests.support import adversarial

        adversarial.configure(seed=1234, max_delay_ms=1.0, enabled=True)
    optimizer = make_optimizer("adamw", model)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=run.ds_config(), **kwargs)[0]


def part_of_block(run: Run) -> tuple[Any, Any]:
    """(engine, mpu). Only the first data-parallel rank has the right values to begin with."""
    mpu = hybrid.Mpu(run.parts)
    model = hybrid.PartOfBlock(hybrid.seeded(hybrid.Block), mpu)
    if mpu.get_data_parallel_rank() > 0:
        for param in model.parameters():
            param.data.normal_()
    return engine_for(run, model, mpu=mpu), mpu


def my_rows(run: Run, mpu: Any, step: int, micro: int) -> torch.Tensor:
    first = mpu.get_data_parallel_rank() * SAMPLES
    return batch(step, micro, run.sharding.s_dp)[first : first + SAMPLES]


def train_step(engine: Any, run: Run, mpu: Any, step: int) -> float:
    total = torch.zeros(())
    for micro in range(run.micro_batches):
        loss = hybrid.block_loss(engine, my_rows(run, mpu, step, micro))
        engine.backward(loss)
        engine.step()
        total += loss.detach() / run.micro_batches
    dist.all_reduce(total, group=mpu.get_data_parallel_group())
    return float(total) / run.sharding.s_dp


def seen_by(engine: Any, losses: list[float], norms: list[float]) -> Seen:
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param

    named = list(engine.module.named_parameters())
    masters = {name: safe_get_full_fp32_param(param).clone() for name, param in named}
    with deepspeed.zero.GatheredParameters([param for _, param in named]):
        working = {name: param.detach().clone() for name, param in named}
    mesh = engine.amsp.mesh
    groups = {name: getattr(mesh, name).ranks for name in ("world", "data_parallel", "model", "gather", "scalars")}
    return Seen(losses, norms, masters, working, groups)


def _train_parts(run: Run) -> Seen:
    engine, mpu = part_of_block(run)
    losses, norms = [], []
    for step in range(run.steps):
        losses.append(train_step(engine, run, mpu, step))
        norms.append(float(engine.get_global_grad_norm()))
    seen = seen_by(engine, losses, norms)
    seen.notes = [engine.train_batch_size(), engine.amsp.describe()]
    engine.destroy()
    if run.adversarial:
        from tests.support import adversarial

        adversarial.assert_all_waited()
    return seen


def assert_equals(seen: list[Seen], want: Outcome, parts: int) -> None:
    """Losses, norms and every parameter, put together from its parts; replicas are bit-equal."""
    for rank, mine in enumerate(seen):
        assert mine.norms == seen[0].norms, "all ranks have one norm"
        torch.testing.assert_close(mine.norms, want.norms, rtol=1e-5, atol=0)
        torch.testing.assert_close(mine.losses, want.losses, rtol=1e-5, atol=0)
        for kind in ("masters", "working"):
            first = getattr(seen[rank % parts], kind)
            for name, value in getattr(mine, kind).items():
                assert torch.equal(value, first[name]), f"rank {rank}: {name} differs from its replica"
                if name in want.parameters and name not in hybrid.CUT:
                    torch.testing.assert_close(value, want.parameters[name], rtol=1e-5, atol=1e-6)
    for name, axis in hybrid.CUT.items() if parts > 1 else ():
        for kind in ("masters", "working"):
            whole = torch.cat([getattr(mine, kind)[name] for mine in seen[:parts]], axis)
            torch.testing.assert_close(whole, want.parameters[name], rtol=1e-5, atol=1e-6)


# ---- tensor parallelism ------------------------------------------------------------------------------------

TWO_NODES = ShardFactor(2, 2)
RUNS = {
    # On two ranks of data parallelism, in one node and in two.
    "zero1": Run(Sharding(ONE, ONE, TWO, TWO)),
    "zero3 over nodes": Run(Sharding(PAIR, PAIR, PAIR, PAIR), per_node=2, adversarial=True),
    "ddp": Run(Sharding(ONE, ONE, ONE, TWO), clip=0.0, micro_batches=1),
    # On four, two of each node.
    "s_p 2, s_os 4": Run(Sharding(TWO, TWO, TWO_NODES, TWO_NODES), adversarial=True),
    "s_g 2, two stages": Run(
        Sharding(ONE, TWO, TWO_NODES, TWO_NODES), block={"hierarchical": True, "reduce": "all_reduce"}, clip=0.0
    ),
    "four parts": Run(Sharding(TWO, TWO, TWO, TWO), parts=4, per_node=8),
}


@pytest.mark.parametrize("name", RUNS)
def test_tensor_parallel_equals_one_process(name: str) -> None:
    run = RUNS[name]
    seen = pool(run.world).run(_train_parts, run)
    whole = hybrid.seeded(hybrid.Block)
    want = hybrid.alone(whole, hybrid.block_loss, run.sharding.s_dp, run.micro_batches, run.steps, run.clip)
    assert_equals(seen, want, run.parts)
    data = [tuple(range(part, run.world, run.parts)) for part in range(run.parts)]
    for rank, mine in enumerate(seen):
        assert mine.groups["data_parallel"] == data[rank % run.parts]
        assert mine.groups["model"] == tuple(range(rank - rank % run.parts, rank - rank % run.parts + run.parts))
        assert len(mine.groups["gather"]) == run.sharding.s_p and set(mine.groups["gather"]) <= {*data[rank % run.parts]}
        assert sorted(mine.groups["world"]) == list(range(run.world))
        total, lines = mine.notes
        assert total == SAMPLES * run.micro_batches * run.sharding.s_dp
        assert any(f"{run.parts} data-parallel groups of {run.sharding.s_dp} ranks" in line for line in lines)
