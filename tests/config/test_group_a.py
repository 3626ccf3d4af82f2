"""Group A of the collected cases: what people write into a config, and what must become of it."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed_amsp.config import ConfigError, read_block
from deepspeed_amsp.config_preflight import beside_block, preflight_warnings
from tests.config.trial import BLOCK, agreed, base, merged, start, verdict, verdicts, window
from tests.support import models
from tests.support.jobs import Case, train
from tests.support.pool import pool


def amsp(**changes: Any) -> dict[str, Any]:
    return base(**{"amsp": BLOCK, **changes})


def block(**keys: Any) -> dict[str, Any]:
    return amsp(amsp={**BLOCK, **keys})


def zero(sharding: str = "zero1", stage: int = 1, **keys: Any) -> dict[str, Any]:
    return amsp(amsp={**BLOCK, "sharding": sharding}, zero_optimization={"stage": stage, **keys})


REFUSED: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "A1 unknown key": (block(paramters=1), ("amsp.paramters", "unknown key", "did you mean")),
    "A1 unknown factor": (
        block(sharding={"paramters": [1, 1]}),
        ("amsp.sharding.paramters", 'did you mean "parameters"?'),
    ),
    "A1 amps": (amsp(amsp=None, amps=BLOCK), ("amps", 'did you mean "amsp"?')),
    "A1 inside zero": (
        amsp(amsp=None, zero_optimization={"stage": 1, "amsp": BLOCK}),
        ("zero_optimization.amsp", "top-level block"),
    ),
    "A2 batch": (amsp(train_micro_batch_size_per_gpu="auto"), ("train_micro_batch_size_per_gpu", "auto")),
    "A2 several": (
        amsp(gradient_clipping="auto", bf16={"enabled": "auto"}, zero_optimization={"stage": "auto"}),
        ("gradient_clipping", "bf16.enabled", "zero_optimization.stage", "auto"),
    ),
    "A2 inside the block": (block(sharding="auto"), ("amsp.sharding", '"sharding": "search"')),
    "A2 first step": (amsp(steps_per_print="auto"), ("steps_per_print", "auto")),
    "A4 both": (amsp(bf16={"enabled": "true"}, fp16={"enabled": True}), ("fp16.enabled", "bf16.enabled is true")),
    "A7 MiCS": (
        zero("mics", 3, mics_shard_size=2, mics_hierarchical_params_gather=True),
        ("mics_shard_size", '"parameters": 2', '"hierarchical": true'),
    ),
    "A7 hpZ": (zero("zero3", 3, zero_hpz_partition_size=2), ("zero_hpz_partition_size", "two owners", "set it to 1")),
    "A8 aio inside zero": (zero(aio={"block_size": 1}), ("zero_optimization.aio", "top-level key", "move it out")),
    "A8 clipping inside zero": (zero(gradient_clipping=1.0), ("zero_optimization.gradient_clipping", "move it out")),
    "A8 stage inside the block": (block(stage=1), ("amsp.stage", "unknown key")),
    "A10 auto": (amsp(gradient_clipping="auto"), ("gradient_clipping", "auto")),
    "A10 minus one": (amsp(gradient_clipping=-1), ("gradient_clipping", "must be a number", "-1")),
    "A10 string": (amsp(gradient_clipping="1.0"), ("gradient_clipping", "must be a number", '"1.0"')),
    "A10 true": (amsp(gradient_clipping=True), ("gradient_clipping", "must be a number", "true")),
    "A10 null": (amsp() | {"gradient_clipping": None}, ("gradient_clipping", "must be a number", "null")),
    "A12 cpu": (zero(offload_optimizer={"device": "cpu"}), ("offload_optimizer.device", "cpu", '"none"')),
    "A12 parameters on cpu": (
        zero("zero3", 3, offload_param={"device": "cpu"}),
        ("offload_param.device", "cpu", '"none"'),
    ),
    "A12 nvme": (
        zero(offload_optimizer={"device": "nvme", "nvme_path": "swap"}),
        ("offload_optimizer.device", "nvme"),
    ),
}
ACCEPTED: dict[str, dict[str, Any]] = {
    "A2 zero keys": zero("zero3", 3, reduce_bucket_size="auto", stage3_prefetch_bucket_size="auto"),
    "A4 strings": amsp(bf16={"enabled": "false"}, fp16={"enabled": "False"}),
    "A7 hpZ off": zero("zero3", 3, zero_hpz_partition_size=1),
    "A10 zero": amsp(gradient_clipping=0.0),
    "A10 absent": amsp(gradient_clipping=None),
    "A12 none": zero("zero3", 3, offload_optimizer={"device": "none", "pin_memory": True}, offload_param={}),
    "A12 huge bucket": zero(reduce_bucket_size=5e8),
    "A12 tiny bucket": zero(reduce_bucket_size=1),
}


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    configs = {**{name: config for name, (config, _) in REFUSED.items()}, **ACCEPTED}
    return agreed(pool(2).run(verdicts, configs, timeout=120))  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, outcomes: dict[str, str]) -> None:
    outcome = outcomes[name]
    assert outcome.startswith("ConfigError: "), outcome
    for word in REFUSED[name][1]:
        assert word in outcome, f"{word!r} is missing in: {outcome}"


@pytest.mark.parametrize("name", ACCEPTED)
def test_accepted(name: str, outcomes: dict[str, str]) -> None:
    assert outcomes[name] == "accepted as float32"


# ---- A1, A8: what is legal, but not meant ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"gradient_cliping": 0.5}, ['"gradient_cliping"', 'did you mean "gradient_clipping"?']),
        ({"zero_optimisation": {"stage": 3}}, ['did you mean "zero_optimization"?']),
        ({"train_batchsize": 8}, ['did you mean "train_batch_size"?']),
        ({"reduce_bucket_size": 5e8}, ['"reduce_bucket_size"', 'belongs in "zero_optimization"']),
        ({"stage3_max_live_parameters": 1}, ['belongs in "zero_optimization"']),
        (
            {"low_cpu_mem_usage": True, "comms_config": {}, "monitor_config": {}},
            ['"low_cpu_mem_usage", "comms_config", "monitor_config"'],
        ),
    ],
)
def test_a_warning(keys: dict[str, Any], words: list[str]) -> None:
    (line,) = preflight_warnings(amsp(**keys))
    for word in words:
        assert word in line


def test_no_warning_for_a_clean_config() -> None:
    assert preflight_warnings(amsp(bf16={"enabled": True}, wall_clock_breakdown=False)) == []


def test_absent_clipping_is_told() -> None:
    config = amsp(gradient_clipping=None)
    assert "gradient_clipping is absent, which means 1 " in preflight_warnings(config, 1.0)[0]
    assert preflight_warnings(config, 0.0) == [], "a DeepSpeed that does not clip by default needs no warning"


def _logged(config: Mapping[str, Any]) -> list[str]:
    """Warnings of the log while an engine starts."""
    import logging

    from deepspeed.utils import logger

    lines: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.levelno >= logging.WARNING:
                lines.append(record.getMessage())

    listener = Listener()
    before = logger.level
    logger.addHandler(listener)
    logger.setLevel("WARNING")
    try:
        engine = start(dict(config))
        window(engine)
        engine.destroy()
    finally:
        logger.removeHandler(listener)
        logger.setLevel(before)
    return lines


def test_the_engine_logs_warnings_once_on_rank_0() -> None:
    config = amsp(gradient_clipping=None, gradient_cliping=0.5, low_cpu_mem_usage=True)
    first, *others = pool(2).run(_logged, config)
    for words in ("gradient_clipping is absent", "gradient_cliping", "low_cpu_mem_usage"):
        assert sum(words in line for line in first) == 1, (words, first)
    for lines in others:
        assert not any("gradient_clip" in line for line in lines)


# ---- A2: a config that is not filled in yet ----------------------------------------------------------------------


def _under_zero_init(config: Mapping[str, Any]) -> str:
    """What transformers does in from_pretrained: zero.Init reads the config before the Trainer completes it."""
    import deepspeed
    from torch import nn

    import deepspeed_amsp  # noqa: F401

    try:
        with deepspeed.zero.Init(config_dict_or_path=dict(config)):
            nn.Linear(4, 4)
    except Exception as error:  # noqa: BLE001 - the verdict
        return f"{type(error).__name__}: {error}"
    return "read"


UNFILLED = {
    "gradient_clipping": "auto",
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}},
    "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": "auto", "total_num_steps": "auto"}},
}


def test_zero_init_may_read_a_config_that_the_trainer_will_complete() -> None:
    assert agreed(pool(2).run(_under_zero_init, merged(zero("zero3", 3), UNFILLED))) == "read"


def test_zero_init_with_an_open_batch_size_is_a_list_of_keys_and_no_type_error() -> None:
    config = merged(zero("zero3", 3), {**UNFILLED, "train_micro_batch_size_per_gpu": "auto"})
    outcome = agreed(pool(2).run(_under_zero_init, config))
    assert outcome.startswith("ConfigError: ")
    for word in ("train_micro_batch_size_per_gpu", "gradient_clipping", "optimizer.params.lr", "total_num_steps"):
        assert word in outcome


def test_the_engine_still_lists_what_is_open() -> None:
    outcome = agreed(pool(2).run(verdict, merged(zero("zero3", 3), UNFILLED)))
    for word in ("ConfigError", "gradient_clipping", "optimizer.params.lr", "scheduler.params.total_num_steps"):
        assert word in outcome


# ---- A4, A5: precision -------------------------------------------------------------------------------------------


def _both_on(spellings: list[Any]) -> list[tuple[bool, bool]]:
    """(DeepSpeed reads this spelling as true, we refuse bf16 with fp16 in this spelling)."""
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config

    results = []
    for spelling in spellings:
        config = amsp(bf16={"enabled": True}, fp16={"enabled": spelling})
        refused = any(problem.path == "fp16.enabled" for problem in beside_block(config))
        results.append((bool(DeepSpeedBF16Config(enabled=spelling).enabled), refused))
    return results


def test_booleans_are_spelled_as_in_deepspeed() -> None:
    """Documented: pydantic's spellings hold for DeepSpeed's keys; inside the block only true and false do."""
    spellings = [True, False, "true", "false", "True", "yes", "no", 1, 0, "1", "0", "on", "off", "t", "f", 1.0]
    for spelling, (on, refused) in zip(spellings, _both_on(spellings), strict=True):
        assert on == refused, spelling


@pytest.mark.parametrize("value", ["yes", 1, 0, "on"])
def test_inside_the_block_only_true_and_false(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"amsp\.hierarchical: must be true or false"):
        read_block({"amsp": {"hierarchical": value}})


def test_fp16_keys_under_bf16_end_in_deepspeeds_own_error() -> None:
    wrong = {"enabled": True, "loss_scale": 0, "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1}
    found = agreed(pool(2).run(verdicts, {"plain": base(bf16=wrong), "ours": amsp(bf16=wrong)}))
    assert found["ours"] == found["plain"]
    assert "4 validation errors for DeepSpeedBF16Config" in found["ours"]


# ---- A6: duplicates ----------------------------------------------------------------------------------------------

TWO_BLOCKS = '{"train_micro_batch_size_per_gpu": 2, "amsp": {"sharding": "zero1"}, "amsp": {"sharding": "zero2"}}'
TWO_FACTORS = '{"amsp": {"sharding": {"optimizer_states": 1, "optimizer_states": 2}}, "fp16": {}}'


@pytest.mark.parametrize("how", ["file", "base64"])
@pytest.mark.parametrize(
    ("text", "path"), [(TWO_BLOCKS, "amsp"), (TWO_FACTORS, "amsp.sharding.optimizer_states")], ids=["block", "factor"]
)
def test_duplicates(text: str, path: str, how: str, tmp_path: Path) -> None:
    file = tmp_path / "ds_config.json"
    file.write_text(text)
    config = str(file) if how == "file" else base64.urlsafe_b64encode(text.encode()).decode()
    outcome = agreed(pool(2).run(verdict, config))
    assert outcome.startswith("ConfigError: ")
    assert f"{path}: written more than once" in outcome


# ---- A7: what replaces MiCS ---------------------------------------------------------------------------------------


def test_the_printed_replacement_of_mics_runs() -> None:
    config = zero("mics", 3, mics_shard_size=2)
    reason = agreed(pool(2).run(verdict, config))
    printed = json.loads("{" + reason.split("equivalent is ")[1] + "}")
    assert agreed(pool(2).run(verdict, zero(stage=3) | printed)) == "accepted as float32"


# ---- A9: factors of the wrong type ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["parameters", "gradients", "optimizer_states"])
@pytest.mark.parametrize(
    ("value", "read"),
    [(2, 2), (2.0, 2), (1e3, 1000), ([2, 1.0], (2, 1)), (2.5, None), ("2", None), (True, None), (0, None),
     (-1, None), ([2], None), ([2, True], None), ([1, 2, 3], None), ([0, 1], None), (float("nan"), None)],
)  # fmt: skip
def test_factors(name: str, value: Any, read: Any) -> None:
    config = {"amsp": {"sharding": {name: value}}}
    if read is not None:
        found = read_block(config)
        assert found is not None
        assert getattr(found.sharding, name) == read
        assert not isinstance(getattr(found.sharding, name), bool)
        return
    with pytest.raises(ConfigError) as error:
        read_block(config)
    (problem,) = error.value.problems
    assert problem.path == f"amsp.sharding.{name}"
    assert json.dumps(value) in problem.reason


# ---- A12: buckets ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sharding", [("zero1", 1), ("zero2", 2), ("zero3", 3), ("ddp", 1)], ids=lambda s: s[0])
@pytest.mark.parametrize("numel", [1, 100, 5e8])
def test_parity_with_any_bucket(sharding: tuple[str, int], numel: float) -> None:
    """Smaller than every tensor, larger than the model."""
    name, stage = sharding
    case = Case(
        amsp={"sharding": name, "topology": {"gpus_per_node": 1}},
        stage=stage,
        model="even",
        steps=2,
        micro_batches=2,
        zero={"reduce_bucket_size": numel},
    )
    reports = pool(2).run(train, case)
    want = models.reference("even", "adamw", 2, 2, 2, 0.0)
    for report in reports:
        torch.testing.assert_close(report.norms, want.norms, rtol=1e-6, atol=0.0)
        torch.testing.assert_close(report.losses, want.losses, rtol=1e-5, atol=0.0)
        for (parameter, start_at, stop), master in report.masters.items():
            expected = want.parameters[parameter].flatten()[start_at:stop]
            torch.testing.assert_close(master, expected, rtol=1e-5, atol=1e-6)
