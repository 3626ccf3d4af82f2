"""Every key that an amsp run honours, compared with DeepSpeed itself: buffers, files, optimizers, the plan."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.config.observe import configs, ours
from tests.config.trial import base, merged, start, window
from tests.support.pool import pool

WORLD = 2


class Buffered(nn.Module):
    """Buffers of three kinds."""

    _keep_in_fp32_modules_strict = ("kept",)

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("frequencies", torch.tensor([257.0]))
        self.register_buffer("kept", torch.tensor([257.0]))
        self.register_buffer("count", torch.tensor([257]))


def _buffers(cases: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    import deepspeed

    import deepspeed_amsp  # noqa: F401

    found = {}
    for name, config in cases.items():
        model = Buffered()
        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=copy.deepcopy(dict(config))
        )
        found[name] = {key: (str(value.dtype), float(value)) for key, value in engine.module.named_buffers()}
        engine.destroy()
    return found


@pytest.mark.parametrize("types", [{}, {"buffer_dtype": "bf16"}, {"buffer_dtype": "bf16", "keep_in_fp32_modules": []}])
def test_buffer_dtypes(types: dict[str, Any]) -> None:
    changes = {"bf16": {"enabled": True}, "data_types": types}
    for found in pool(WORLD).run(_buffers, configs(changes, "plain", "zero1", "zero3")):
        assert found["zero1"] == found["zero3"] == found["plain"]
        assert found["zero1"]["count"] == ("torch.int64", 257.0)
        assert found["zero1"]["frequencies"] == (("torch.float32", 257.0) if not types else ("torch.bfloat16", 256.0))


def _saved(cases: Mapping[str, Mapping[str, Any]], directory: str) -> dict[str, Any]:
    found = {}
    for name, config in cases.items():
        engine = start(copy.deepcopy(dict(config)))
        window(engine)
        try:
            done: Any = engine.save_16bit_model(f"{directory}/{name}")
        except ValueError as error:
            done = str(error)
        dist.barrier()
        engine.destroy()
        found[name] = (done, sorted(path.name for path in Path(directory, name).glob("*")))
    return found


@pytest.mark.parametrize("key", ["gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save"])
@pytest.mark.parametrize("value", [True, False])
def test_gather_16bit_weights_on_model_save(key: str, value: bool, tmp_path: Path) -> None:
    changes = {"zero_optimization": {key: value}}
    for found in pool(WORLD).run(_saved, configs(changes, "plain 3", "zero3"), str(tmp_path)):
        if value:
            assert found["zero3"] == found["plain 3"] and found["zero3"][0] is True
        else:  # where DeepSpeed returns False, and many do not look
            said, files = found["zero3"]
            assert "stage3_gather_16bit_weights_on_model_save is false" in said and not files
            assert found["plain 3"][0] is False


def _tagged(cases: Mapping[str, Mapping[str, Any]], directory: str) -> dict[str, str]:
    found = {}
    for name, config in cases.items():
        engine = start(copy.deepcopy(dict(config)))
        window(engine)
        try:
            engine._checkpoint_tag_validation(f"rank{dist.get_rank()}")
            found[name] = "passed"
        except AssertionError as error:
            found[name] = str(error)
        engine.destroy()
    return found


@pytest.mark.parametrize("mode", ["Fail", "Warn", "Ignore"])
def test_tag_validation(mode: str, tmp_path: Path) -> None:
    changes = {"checkpoint": {"tag_validation": mode, "use_node_local_storage": True}}
    for found in pool(WORLD).run(_tagged, configs(changes), str(tmp_path)):
        assert found["zero1"] == found["plain"]
        assert (found["zero1"] != "passed") == (mode == "Fail")


class Unknown(torch.optim.SGD):
    """Elementwise, but nobody knows."""


def _untested(cases: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    found = {}
    for name, config in cases.items():
        chosen: Callable[..., Any] = Unknown if "unknown" in name else torch.optim.SGD
        try:
            engine = start(copy.deepcopy(dict(config)), optimizer=lambda params, kind=chosen: kind(params, lr=0.1))
            window(engine)
            engine.destroy()
            found[name] = "trains"
        except Exception as error:  # noqa: BLE001 - the outcome
            found[name] = f"{type(error).__name__}: {error}"
    return found


def test_zero_allow_untested_optimizer() -> None:
    """With the key, everything that DeepSpeed trains. Without it, only what might train wrongly is refused: a
    tensor that stays whole at its owner (s_p = 1) suits any optimizer, and torch's SGD is known to be elementwise."""
    labels = ("plain", "zero1", "zero3")
    cases = {
        f"{kind} {allowed} {label}": config
        for kind in ("SGD", "unknown")
        for allowed in (True, False)
        for label, config in configs({"optimizer": None, "zero_allow_untested_optimizer": allowed}, *labels).items()
    }
    for found in pool(WORLD).run(_untested, cases):
        assert all(found[f"{kind} True {label}"] == "trains" for kind in ("SGD", "unknown") for label in labels), found
        assert "untested ZeRO Optimizer" in found["SGD False plain"]
        assert found["SGD False zero1"] == found["SGD False zero3"] == found["unknown False zero1"] == "trains"
        assert '"zero_allow_untested_optimizer": true' in found["unknown False zero3"]


def _plan(cases: Mapping[str, Mapping[str, Any]], model_name: str) -> dict[str, Any]:
    """What the plan of an engine became, and its units."""
    found = {}
    for name, config in cases.items():
        engine = start(copy.deepcopy(dict(config)), model_name)
        plan = engine.amsp.plan
        found[name] = (str(plan.overlap), plan.reduce.value, plan.prefetch_bytes, [u.name for u in engine.amsp.units])
        engine.destroy()
    return found


def test_the_plan_follows_zero_optimization() -> None:
    zero: dict[str, dict[str, Any]] = {
        "nothing": {},
        "overlap": {"overlap_comm": False},
        "reduce": {"reduce_scatter": False},
        "prefetch": {"prefetch_bucket_size": 7},
        "live": {"stage3_max_live_parameters": 0},
    }
    cases = {name: ours(merged(base(), {"zero_optimization": keys}), "zero3") for name, keys in zero.items()}
    block = {"overlap": {"gather": True}, "reduce": "two_level", "prefetch_bytes": 100}
    everything = {key: value for keys in list(zero.values())[:4] for key, value in keys.items()}
    cases["block"] = merged(ours(merged(base(), {"zero_optimization": everything}), "zero3"), {"amsp": block})
    found = pool(WORLD).run(_plan, cases, "mlp")[0]
    default = found["nothing"]
    assert found["overlap"] == ("none", *default[1:])
    assert found["reduce"] == (default[0], "all_reduce", *default[2:])
    assert found["prefetch"] == (*default[:2], 7 * 4, default[3])
    assert found["live"] == (*default[:2], 0, default[3])
    assert found["block"][:3] == ("gather", "two_level", 100)


def test_a_leaf_module_is_one_unit() -> None:
    leaf = {"zero_optimization": {"leaf_module": {"names": ["block"]}}}
    cases = {"leaf": ours(merged(base(), leaf), "zero3"), "none": ours(base(), "zero3")}
    found = pool(WORLD).run(_plan, cases, "attention")[0]
    inside = {name: [unit for unit in seen[3] if unit.startswith("block.")] for name, seen in found.items()}
    assert inside["none"]
    assert not inside["leaf"]
    assert "block" in found["leaf"][3]
