"""The batch triangle, case A3: DeepSpeed's verdict at any number of ranks, and a sentence when it does not fit."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from itertools import product
from typing import Any

import pytest

from deepspeed_amsp.config import ConfigError
from deepspeed_amsp.config_preflight import beside_block
from tests.config.trial import BLOCK, agreed, base
from tests.support import models
from tests.support.pool import pool

NAMES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
TRIANGLES = [
    *product((None, 24), (None, 2), (None, 1, 2)),
    (25, None, None), (1, None, None), (23, 2, None), (48, 2, 3), (48, 4, 2), (None, 2, 0), (12, 0, None),
    (256, 2, 18), (24.0, 2, None), (24, 5, None), (24, None, 5),
]  # fmt: skip


def _triangles(world: int, sharding: str, stage: int) -> list[tuple[Any, Any, Any]]:
    """For every triangle (plain DeepSpeed's reading, ours, our error), "refused" for an error."""
    from deepspeed.runtime.config import DeepSpeedConfig

    import deepspeed_amsp  # noqa: F401

    def reading(config: dict[str, Any]) -> tuple[Any, str]:
        try:
            read = DeepSpeedConfig(config)
        except (AssertionError, ZeroDivisionError, ConfigError) as error:
            return "refused", str(error)
        return tuple(float(getattr(read, name)) for name in NAMES), ""

    results = []
    for values in TRIANGLES:
        given = {name: value for name, value in zip(NAMES, values, strict=True) if value is not None}
        plain = base(train_micro_batch_size_per_gpu=None, zero_optimization={"stage": stage}) | given
        ours, error = reading(plain | {"amsp": {"sharding": sharding, "topology": {"gpus_per_node": 1}}})
        results.append((reading(plain)[0], ours, error))
    return results


@pytest.mark.parametrize(("world", "sharding", "stage"), [(3, "zero3", 3), (4, "ddp", 1), (6, "mics", 1)])
def test_triangles_mean_what_deepspeed_says(world: int, sharding: str, stage: int) -> None:
    """All ranks are data-parallel, whatever the sharding factors are."""
    results = agreed(pool(world).run(_triangles, world, sharding, stage))
    assert {"refused"} < {str(plain) for plain, _, _ in results}, "the table should have both verdicts"
    for (total, micro, steps), (plain, ours, error) in zip(TRIANGLES, results, strict=True):
        assert ours == plain, (total, micro, steps)
        if plain == "refused" and total and micro != 0 and steps != 0:
            assert "train_batch_size" in error and f"{world} GPUs" in error and "nearest" in error, error
            assert f"{total} is not" in error
        elif plain == "refused":
            assert "train_micro_batch_size_per_gpu" in error or "gradient_accumulation_steps" in error


@pytest.mark.parametrize(
    ("values", "nearest"),
    [
        ((256, 2, 18), "252"),
        ((48, 4, 3), "84"),
        ((25, None, None), "21, 28"),
        ((3, None, None), "7"),
        ((30, 2, None), "28, 42"),
        ((30, None, 2), "28, 42"),
    ],
)
def test_the_nearest_batch_sizes_are_named(values: tuple[Any, ...], nearest: str) -> None:
    given = {name: value for name, value in zip(NAMES, values, strict=True) if value is not None}
    (problem,) = beside_block({"gradient_clipping": 0.0, **given}, world_size=7)
    assert problem.path == "train_batch_size"
    assert problem.reason.endswith(f"nearest values that fit: {nearest}")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [0, -1, 2.5, "2", True, [2]])
def test_numbers_of_the_triangle(name: str, value: Any) -> None:
    config = {"gradient_clipping": 0.0, "train_micro_batch_size_per_gpu": 2, name: value}
    (problem,) = beside_block(config, world_size=2)
    assert problem.path == name
    assert problem.reason == f"must be a whole number of at least 1, not {json.dumps(value)}"


def _read_too_early(config: Mapping[str, Any]) -> str:
    """DeepSpeed reads a config for one rank when nothing is initialised, and says nothing."""
    import deepspeed
    from deepspeed.runtime import config as config_module

    import deepspeed_amsp  # noqa: F401

    class NotYet:
        def __getattr__(self, name: str) -> Callable[..., Any]:
            raise RuntimeError("not initialised")

    live, config_module.dist = config_module.dist, NotYet()
    try:
        read = config_module.DeepSpeedConfig(dict(config))
    finally:
        config_module.dist = live
    model = models.make_model("mlp")
    try:
        engine = deepspeed.DeepSpeedEngine(
            args=None,
            model=model,
            model_parameters=list(model.parameters()),
            config=dict(config),
            config_class=read,
        )
    except Exception as error:  # noqa: BLE001 - the verdict
        return f"{type(error).__name__}: {error}"
    return f"accepted with {engine.train_batch_size()}"


def test_a_config_that_was_read_before_the_ranks_met() -> None:
    outcome = agreed(pool(2).run(_read_too_early, base(amsp=BLOCK)))
    assert outcome == "accepted with 4" or (outcome.startswith("ConfigError") and "init_distributed" in outcome)
