"""Every family really trains: losses against one process, bytes against theory, on real ranks."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist

from deepspeed_amsp.compare.config import CompareConfig, check
from tests.support.pool import pool

OURS = [
    {"name": "amsp", "amsp": {"sharding": {"optimizer_states": [2, 1]}}},
    {"name": "amsp-mics", "amsp": {"sharding": "mics"}},
]
STEPS, COUNT = 3, 2


def config(strategies: list[Any]) -> CompareConfig:
    return check(
        {
            "model": {"llama": {"dim": 32, "heads": 2, "ffn": 48, "layers": 2, "vocab": 64}, "sequence": 12},
            "compute": {"forward_ms": 0},
            "steps": STEPS,
            "bucket_bytes": 8192,
            "strategies": strategies,
        },
        "test",
    )


def reference(found: CompareConfig, world: int) -> list[float]:
    """One process with every rank's data: bf16 compute, fp32 masters, the mean gradient clipped at 1.0, AdamW."""
    from deepspeed_amsp.compare.models import batches, build

    model = build(found.model, found.training.seed).module
    working = build(found.model, found.training.seed).module.bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=found.training.lr)
    losses = []
    for step in range(STEPS):
        data = [
            batch for rank in range(world) for batch in batches(found.model, 64, found.training.seed, rank, step, COUNT)
        ]
        found_losses = [working(batch) for batch in data]
        (torch.stack(found_losses).sum() / len(data)).backward()
        for param, copy in zip(model.parameters(), working.parameters(), strict=True):
            assert copy.grad is not None
            param.grad, copy.grad = copy.grad.float(), None
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        with torch.no_grad():
            for param, copy in zip(model.parameters(), working.parameters(), strict=True):
                copy.copy_(param)
        losses.append(float(torch.stack(found_losses).detach().float().mean()))
    return losses


def trained(names: list[str], ours: list[Any]) -> dict[str, Any]:
    """In a job of the pool: {strategy: what the rank reports}."""
    from unittest import mock

    from deepspeed_amsp.compare import fair
    from deepspeed_amsp.compare.measure import measure
    from deepspeed_amsp.compare.strategies import fsdp2
    from deepspeed_amsp.compare.strategies.base import Work

    os.environ["LOCAL_RANK"] = str(dist.get_rank() % 2)
    found = config([*names, *ours])
    reports = {}
    with mock.patch.multiple(
        dist, reduce_scatter_single=fair.reduce_scatter, reduce_scatter_tensor=fair.reduce_scatter
    ):
        for strategy in found.resolved():
            work = Work(strategy, found, COUNT, torch.device("cpu"), (0.0, 0.0))
            reports[strategy.name] = measure(work, 0, STEPS, dist.get_rank(), look=True)
    fsdp2._MESHES.clear()
    return reports


def test_losses_are_those_of_one_process() -> None:
    names = ["limit", "ddp", "fsdp2", "hsdp", "zero1", "zero3"]
    reports = pool(4).run(trained, names, OURS, timeout=120)[0]
    expected = reference(config([*names, *OURS]), world=4)
    for name, report in reports.items():
        if name != "limit":  # which does not learn from others
            assert report["losses"] == pytest.approx(expected, abs=2e-3), name
        assert len(report["step_s"]) == STEPS and report["timeline"]
        assert report["memory"]["parameters"] > 0 and report["memory"]["optimizer_states"] > 0
    assert set(reports["amsp"]["exposed_s"]) == {"gather", "reduce", "publish"}
    assert reports["ddp"]["exposed_s"] is None
    assert {bar["row"] for bar in reports["amsp"]["timeline"]} >= {"forward", "backward", "update", "reduce", "publish"}


def sums(average: bool) -> list[float]:
    from deepspeed_amsp.compare import fair

    rank, size = dist.get_rank(), dist.get_world_size()
    mine = torch.arange(2.0 * size) * (rank + 1)
    out = torch.empty(2)
    op = dist.ReduceOp.AVG if average else dist.ReduceOp.SUM
    pending = fair.reduce_scatter(out, mine, op=op, async_op=not average)
    if pending is not None:
        pending.wait()
        pending.wait()  # as often as anybody likes
    return out.tolist()


def test_fair_reduce_scatter_sums_and_averages() -> None:
    total = 1 + 2 + 3 + 4
    for average, divisor in ((False, 1), (True, 4)):
        expected = [[2.0 * rank * total / divisor, (2.0 * rank + 1) * total / divisor] for rank in range(4)]
        assert pool(4).run(sums, average) == expected
