"""The planner's bytes of model states are those of the real engine on gloo ranks (case J2)."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn

from deepspeed_amsp.plan.factors import ShardFactor, Sharding
from deepspeed_amsp.plan.memory import memory
from deepspeed_amsp.plan.resolve import Plan, PublishMode, ReduceMode
from deepspeed_amsp.plan.specs import TrainSpec
from tests.engine.test_training import SPREAD
from tests.support.pool import pool

BUCKET_BYTES = 300_000


def _model() -> nn.Module:
    """Matrices of several sizes, one of them above an even share of everything, and vectors."""
    widths = (96, 160, 96, 700, 64)
    layers = [nn.Linear(a, b) for a, b in itertools.pairwise(widths)]
    return nn.Sequential(*layers[:2], nn.LayerNorm(96), *layers[2:])


def _held(sharding: Sharding, modes: dict[str, str], micro_batches: int) -> dict[str, int]:
    """Bytes on this rank, after a step."""
    import deepspeed

    import deepspeed_amsp  # noqa: F401

    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": micro_batches,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
        "zero_optimization": {"stage": sharding.stage},
        "amsp": {
            "sharding": sharding.as_dict(),
            "bucket_bytes": BUCKET_BYTES,
            "topology": {"gpus_per_node": sharding.data_parallel.s0},
            **modes,
        },
    }
    engine, *_ = deepspeed.initialize(model=_model(), config=config)
    for _ in range(micro_batches):
        engine.backward(engine(torch.ones(2, 96, dtype=torch.bfloat16)).float().square().mean())
        engine.step()
    report: dict[str, Any] = engine.amsp.memory_report()
    engine.destroy()
    return {name: report[name]["held"] for name in ("P", "G", "master", "moments")}


@pytest.mark.parametrize("sharding", SPREAD, ids=str)
@pytest.mark.parametrize(
    ("reduce", "publish", "micro_batches"), [("two_level", "broadcast", 2), ("all_reduce", "all_gather", 1)]
)
def test_states_on_the_fullest_rank(sharding: Sharding, reduce: str, publish: str, micro_batches: int) -> None:
    from deepspeed_amsp.module_spec import model_spec

    ranks = pool(4).run(_held, sharding, {"reduce": reduce, "publish": publish}, micro_batches)
    plan = Plan(sharding, ReduceMode(reduce), PublishMode(publish), bucket_bytes=BUCKET_BYTES)
    train = TrainSpec(sequence=8, micro_batches=micro_batches, padding_limit=1.0)
    planned = memory(model_spec(_model(), "sequential"), plan, train).at_rest
    gradients = planned["G resting"] if micro_batches > 1 else planned["G owned"]
    for name, bytes_planned in (
        ("P", planned["P"]),
        ("G", gradients),
        ("master", planned["masters"]),
        ("moments", planned["moments"]),
    ):
        assert bytes_planned == pytest.approx(max(rank[name] for rank in ranks), rel=0.02), name


def test_the_model_has_what_makes_it_hard() -> None:
    largest = max(param.numel() for param in _model().parameters())
    assert largest > sum(param.numel() for param in _model().parameters()) / ShardFactor(2, 2).size
