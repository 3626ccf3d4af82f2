""" "sharding": "search": the planner's factors within what the stage permits, the same on every rank, or one error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from deepspeed_amsp.plan.factors import ShardFactor, enumerate_shardings
from tests.engine.test_bad_input import refused
from tests.engine.test_seam import config
from tests.support import models
from tests.support.pool import pool

CLUSTER = ShardFactor(2, 2)


def asked(stage: int, **block: Any) -> dict[str, Any]:
    amsp = {"sharding": "search", "topology": {"gpus_per_node": 2}, "sequence_length": 128, **block}
    return config(zero_optimization={"stage": stage}, amsp=amsp)


def found(ds_config: dict[str, Any]) -> tuple[str, int, list[float]]:
    """The factors, their stage, and losses of two steps on the same batch everywhere."""
    import deepspeed

    import deepspeed_amsp  # noqa: F401

    torch.manual_seed(3)
    model = models.make_model("mlp")
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=ds_config)
    losses = []
    for _ in range(2):
        loss = engine(torch.arange(10).view(2, 5)).float().square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    sharding = engine.amsp.plan.sharding
    engine.destroy()
    return str(sharding), sharding.stage, losses


def plain_losses() -> list[float]:
    torch.manual_seed(3)
    model = models.make_model("mlp")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(2):
        loss = model(torch.arange(10).view(2, 5)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_it_finds_factors_of_the_stage_and_trains(stage: int) -> None:
    results = pool(4).run(found, asked(stage))
    permitted = {str(s) for s in enumerate_shardings(CLUSTER) if s.stage == stage}
    assert len({result[0] for result in results}) == 1
    assert results[0][0] in permitted
    for result in results:
        assert result[2] == pytest.approx(plain_losses(), rel=1e-4)


def test_a_block_without_keys_searches() -> None:
    assert {result[1] for result in pool(2).run(found, config(amsp={}))} == {1}


def test_nothing_fits() -> None:
    text = refused(asked(3, memory_limit_gb=1e-9), "no plan that fits", "the least that any needs", "amsp plan")
    assert "Traceback" not in text


def _wide(ds_config: dict[str, Any]) -> int:
    """16 matrices of 512 x 512, so that states are what matters; returns the stage of what was found."""
    import deepspeed

    import deepspeed_amsp  # noqa: F401

    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512, bias=False) for _ in range(16)))
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=ds_config)
    stage = engine.amsp.plan.sharding.stage
    engine.destroy()
    return int(stage)


def test_what_the_stage_does_not_permit_is_offered_to_paste() -> None:
    """In fp32 on 4 GPUs stage 1 needs at least (4 + 4 + 12/4) Phi = 11 Phi bytes, ZeRO-3 (4 + 4 + 12)/4 = 5 Phi and
    small buffers: at a limit of 9 Phi only stage 3 fits."""
    phi = 16 * 512 * 512
    small = {"memory_limit_gb": 9 * phi / 1e9, "prefetch_bytes": 1, "bucket_bytes": 2**20, "sequence_length": 16}
    text = refused(asked(1, **small), "stage 1", "with stage 3", "Write", job=_wide)
    paste = json.loads(text.split("Write ")[1].rstrip(".'"))
    assert paste["zero_optimization"]["stage"] == 3
    block = {**asked(3, **small)["amsp"], **paste["amsp"]}
    assert set(pool(4).run(_wide, config(**{**paste, "amsp": block}))) == {3}
    assert set(pool(4).run(_wide, asked(3, **small))) == {3}


def test_an_unknown_profile() -> None:
    refused(asked(1, profile="fast-cluster"), "fast-cluster", "a800-hdr", "rank 0")


def _profile_by_rank(ds_config: dict[str, Any], paths: list[str]) -> str:
    ds_config["amsp"]["profile"] = paths[dist.get_rank()]
    found(ds_config)
    return "trained"


def test_a_profile_that_one_host_lacks(tmp_path: Path) -> None:
    """Rank 2 alone does not find the file: all ranks say so."""
    paths = ["a800-hdr"] * 4
    paths[2] = str(tmp_path / "missing.json")
    refused(asked(1), "rank 2", "missing.json", job=_profile_by_rank, paths=paths)
