"""Bad input ends in one clear error, on every rank, before any group is made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

from tests.engine.test_seam import config
from tests.support import models
from tests.support.pool import pool


def _initialize(ds_config: Mapping[str, Any], model_name: str = "mlp", optimizer: str | None = None) -> str:
    import deepspeed

    import deepspeed_amsp  # noqa: F401

    model = models.make_model(model_name)
    client = models.make_optimizer(optimizer, model) if optimizer else None
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=client, model_parameters=model.parameters(), config=dict(ds_config)
    )
    name = type(engine).__name__
    engine.destroy()
    return name


def refused(ds_config: Mapping[str, Any], *words: str, world: int = 4, job: Any = _initialize, **kwargs: Any) -> str:
    """The error of every rank, which must be the same and hold all ``words``."""
    errors = pool(world).run(job, ds_config, return_exceptions=True, **kwargs)
    texts = {str(error) for error in errors}
    assert all(isinstance(error, Exception) for error in errors), errors
    assert len(texts) == 1, f"ranks say different things: {texts}"
    for text in texts:
        for word in words:
            assert word in text, f"{word!r} is missing in: {text}"
    return texts.pop()


def amsp(sharding: Any, gpus_per_node: int = 2, **block: Any) -> dict[str, Any]:
    return {"sharding": sharding, "topology": {"gpus_per_node": gpus_per_node}, **block}


@pytest.mark.parametrize(
    ("sharding", "words"),
    [
        ({"parameters": [1, 1], "optimizer_states": [3, 1]}, ["optimizer_states", "3", "[1, 1]", "[2, 2]"]),
        ({"parameters": [1, 2]}, ["parameters", "whole nodes", "Eq. 7"]),
        ({"parameters": [2, 1], "gradients": [1, 1]}, ["gradients", "Eq. 3"]),
        ({"optimizer_states": 3}, ["optimizer_states", "3", "1, 2, 4"]),
        ("zero7", ["zero7", "zero1"]),
    ],
)
def test_wrong_factors(sharding: Any, words: list[str]) -> None:
    text = refused(config(amsp=amsp(sharding)), *words)
    assert "amsp" in text or "W = 4" in text


def test_a_wrong_factor_names_the_cluster() -> None:
    refused(config(amsp=amsp({"optimizer_states": [3, 1]})), "W = 4", "gpus_per_node = 2", "nodes = 2")


def test_gpus_per_node_must_divide() -> None:
    refused(config(amsp=amsp("zero1", gpus_per_node=3)), "gpus_per_node", "3", "4")


@pytest.mark.parametrize(
    ("sharding", "stage", "right"),
    [("zero1", 2, 1), ("zero1", None, 1), ("zero2", 1, 2), ("mics", 1, 3), ("zero3", 0, 3)],
)
def test_a_stage_that_contradicts_the_plan(sharding: str, stage: int | None, right: int) -> None:
    zero = {} if stage is None else {"stage": stage}
    refused(
        config(amsp=amsp(sharding), zero_optimization=zero),
        "zero_optimization.stage",
        f'"zero_optimization": {{"stage": {right}}}',
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}}, ["offload_optimizer"]),
        ({"zero_optimization": {"stage": 1, "zero_hpz_partition_size": 2}}, ["zero_hpz_partition_size"]),
        ({"zero_optimization": {"stage": 1, "mics_shard_size": 2}}, ["mics_shard_size", "parameters"]),
        ({"zero_optimization": {"stage": 1, "zero_quantized_weights": True}}, ["zero_quantized_weights"]),
        ({"hybrid_engine": {"enabled": True}}, ["hybrid_engine"]),
        ({"compile": {"deepcompile": True}}, ["deepcompile"]),
        ({"tensor_parallel": {"autotp_size": 2}}, ["autotp_size"]),
        ({"gradient_clipping": "auto"}, ["gradient_clipping", "auto"]),
        ({"amsp": {"sharding": "zero1", "topolgy": {}}}, ["amsp.topolgy", "topology"]),
        ({"amsp": {"sharding": {"paramters": 1}}}, ["amsp.sharding.paramters", "parameters"]),
        ({"amsp": None, "amps": {"sharding": "zero1"}}, ["amps", "amsp"]),
        (
            {"amsp": None, "zero_optimization": {"stage": 1, "amsp": {"sharding": "zero1"}}},
            ["zero_optimization.amsp", "top-level block"],
        ),
    ],
    ids=lambda value: str(list(value)[-1]) if isinstance(value, dict) else "",
)
def test_what_cannot_stand_beside_the_block(changes: dict[str, Any], words: list[str]) -> None:
    refused(config(**({"amsp": amsp("zero1")} | changes)), *words)


def _pipeline(ds_config: Mapping[str, Any]) -> None:
    import deepspeed
    from deepspeed.pipe import PipelineModule

    import deepspeed_amsp  # noqa: F401

    layers = [nn.Linear(4, 4), nn.Linear(4, 4)]
    model = PipelineModule(layers=layers, num_stages=1, loss_fn=nn.MSELoss())
    deepspeed.initialize(model=model, model_parameters=model.parameters(), config=dict(ds_config))


def test_a_pipeline_module() -> None:
    refused(config(amsp=amsp("zero1"), train_batch_size=8), "PipelineModule", job=_pipeline)


class _Unresettable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


def _meta(ds_config: Mapping[str, Any]) -> None:
    import deepspeed

    import deepspeed_amsp  # noqa: F401

    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), _Unresettable())
    deepspeed.initialize(model=model, model_parameters=model.parameters(), config=dict(ds_config))


@pytest.mark.parametrize(("sharding", "stage"), [("zero1", 1), ("zero3", 3)])
def test_a_meta_parameter_that_nobody_can_initialise(sharding: str, stage: int) -> None:
    ds_config = config(amsp=amsp(sharding), zero_optimization={"stage": stage})
    refused(ds_config, "module 1 (_Unresettable)", "meta device", "reset_parameters", job=_meta)


def test_an_optimizer_that_needs_whole_tensors_when_they_are_cut() -> None:
    refused(
        config(amsp=amsp("mics"), zero_optimization={"stage": 3}, optimizer=None),
        "Adafactor", "whole tensors", "amsp.sharding.parameters",
        optimizer="adafactor",
    )  # fmt: skip


def test_no_optimizer() -> None:
    refused(config(amsp=amsp("zero1"), optimizer=None), "optimizer")


def _foreign_tensor(ds_config: Mapping[str, Any]) -> None:
    import deepspeed

    import deepspeed_amsp  # noqa: F401

    model = models.make_model("mlp")
    optimizer = torch.optim.AdamW([*model.parameters(), nn.Parameter(torch.ones(3))])
    deepspeed.initialize(model=model, optimizer=optimizer, config=dict(ds_config))


def test_an_optimizer_with_a_tensor_that_the_model_does_not_have() -> None:
    refused(
        config(amsp=amsp("zero1"), optimizer=None),
        "(3,)",
        "not a floating-point parameter",
        job=_foreign_tensor,
    )
