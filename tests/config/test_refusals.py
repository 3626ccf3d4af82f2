"""Keys that are refused by name with the fix, and keys that are harmless: section "refuse" and "harmless"."""

from __future__ import annotations

from typing import Any

import pytest

from deepspeed_amsp.config_preflight import beside_block
from tests.config.trial import BLOCK, agreed, base, merged, verdicts
from tests.support.pool import pool


def nested(path: str, value: Any) -> dict[str, Any]:
    """{"a": {"b": value}} for "a.b"."""
    for key in reversed(path.split(".")):
        value = {key: value}
    return value  # type: ignore[no-any-return]


REFUSED: dict[str, tuple[Any, str]] = {
    "zero_optimization.legacy_stage1": (True, "set it to false"),
    "zero_optimization.elastic_checkpoint": (True, "set it to false"),
    "zero_optimization.pipeline_loading_checkpoint": (True, "set it to false"),
    "zero_optimization.compute_grad_norm": (False, '"gradient_clipping": 0.0'),
    "zero_optimization.fp16": ({"enabled": True}, "move it out"),
    "zero_optimization.zenflow": ({}, "remove it"),
    "bf16.bf16_master_weights_and_grads": (True, "set it to false"),
    "bf16.bf16_optimizer_states": (True, "set it to false"),
    "fp16.fp16_master_weights_and_grads": (True, "set it to false"),
    "torch_autocast": ({"enabled": True, "dtype": "float16"}, '"dtype": "bfloat16"'),
    "checkpoint.load_universal": (True, "set it to false"),
    "data_types.grad_accum_dtype": ("int8", "write fp32 or bf16"),
    "pipeline.stages": (2, "remove it"),
    "tensor_parallel.autotp_size": (2, "set it to 1"),
    "expert_parallel.enabled": (True, "set it to false"),
    "hybrid_engine.enabled": (True, "set it to false"),
    "compile.deepcompile": (True, "set it to false"),
    "weight_quantization": ({"quantized_initialization": {}}, "remove the block"),
    "autotuning.enabled": (True, "set it to false"),
}


@pytest.mark.parametrize("path", REFUSED)
def test_refused_by_name_with_the_fix(path: str) -> None:
    value, fix = REFUSED[path]
    config = merged({"amsp": BLOCK, "gradient_clipping": 1.0}, nested(path, value))
    (problem,) = beside_block(config)
    assert problem.path == path
    assert fix in problem.reason


@pytest.mark.parametrize("dtype", [None, "fp16", "float16", "torch.float16", "half", "float32"])
def test_autocast_needs_bf16(dtype: str | None) -> None:
    """Without a dtype it is the device's default, fp16 on a GPU."""
    block = {"enabled": True} if dtype is None else {"enabled": True, "dtype": dtype}
    assert [problem.path for problem in beside_block({"torch_autocast": block})] == ["torch_autocast"]


@pytest.mark.parametrize(
    "block", [{"enabled": True, "dtype": "bfloat16"}, {"enabled": True, "dtype": "bf16"}, {"enabled": False}, {}]
)
def test_autocast_that_may_stay(block: dict[str, Any]) -> None:
    assert list(beside_block({"torch_autocast": block})) == []


@pytest.mark.parametrize(("key", "value"), [("aio", {"block_size": 1048576}), ("zero_force_ds_cpu_optimizer", True)])
def test_what_is_about_offload_is_named_with_it(key: str, value: Any) -> None:
    """Alone it says nothing: Lightning writes an aio block into every config."""
    assert list(beside_block({key: value})) == []
    config = {key: value, "zero_optimization": {"offload_optimizer": {"device": "nvme"}}}
    assert {problem.path for problem in beside_block(config)} == {key, "zero_optimization.offload_optimizer.device"}
    assert {problem.path for problem in beside_block(merged(config, {key: False}))} == {
        "zero_optimization.offload_optimizer.device"
    }


@pytest.mark.parametrize("value", [False, "false", 0])
def test_the_norm_may_go_without_clipping(value: Any) -> None:
    zero = {"stage": 1, "compute_grad_norm": value}
    assert list(beside_block({"zero_optimization": zero, "gradient_clipping": 0.0})) == []
    for clipping in ({}, {"gradient_clipping": 1.0}):
        assert len(list(beside_block({"zero_optimization": zero, **clipping}))) == 1


HARMLESS_ZERO = {
    "offload_optimizer": {"device": "none", "pin_memory": True},
    "offload_param": {"device": "none"},
    "zero_quantized_weights": False,
    "zero_quantized_gradients": False,
    "zero_quantized_nontrainable_weights": False,
    "use_multi_rank_bucket_allreduce": False,
    "allgather_partitions": False,
    "memory_efficient_linear": False,
    "legacy_stage1": False,
    "parameter_alignment": True,
    "override_module_apply": False,
    "elastic_checkpoint": False,
    "pipeline_loading_checkpoint": False,
}
HARMLESS_TOP = {
    "tensor_parallel": {"autotp_size": 1},
    "compile": {"deepcompile": False},
    "hybrid_engine": {"enabled": False},
    "low_cpu_mem_usage": True,
    "comms_config": {"verbose": False},
    "monitor_config": {"enabled": False},
    "aio": {"block_size": 1048576},
    "zero_force_ds_cpu_optimizer": True,
    "vocabulary_size": 23,
    "disable_allgather": False,
    "seq_parallel_communication_data_type": "fp32",
}
DEEPSPEED_REFUSES = (
    "nebula", "compression_training", "amp", "quantize_training", "sparse_gradients", "eigenvalue",
    "sparse_attention", "elasticity", "graph_harvesting", "curriculum_learning", "progressive_layer_drop",
)  # fmt: skip


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    ours = base(amsp=BLOCK)
    configs = {
        f"hpZ {size}": merged(ours, nested("zero_optimization.zero_hpz_partition_size", size)) for size in (0, 1)
    }
    for key, value in HARMLESS_ZERO.items():
        configs[key] = merged(ours, {"zero_optimization": {key: value}})
    configs |= {key: merged(ours, {key: value}) for key, value in HARMLESS_TOP.items()}
    everything = merged(ours, {"zero_optimization": HARMLESS_ZERO, **HARMLESS_TOP})
    configs["everything"] = merged(everything, {"zero_optimization": {"stage": 3}, "amsp": {"sharding": "zero3"}})
    configs |= {f"DeepSpeed: {key}": ours | {key: {"enabled": False}} for key in DEEPSPEED_REFUSES}
    loco = merged(ours, nested("zero_optimization.zeropp_loco_param", {"err_beta": 0.8}))
    return agreed(pool(2).run(verdicts, configs | {"DeepSpeed: zeropp_loco_param": loco}, timeout=120))  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", ["hpZ 0", "hpZ 1", *HARMLESS_ZERO, *HARMLESS_TOP, "everything"])
def test_harmless(name: str, outcomes: dict[str, str]) -> None:
    assert outcomes[name] == "accepted as float32"


@pytest.mark.parametrize("key", [*DEEPSPEED_REFUSES, "zeropp_loco_param"])
def test_what_deepspeed_removed_stays_its_own_error(key: str, outcomes: dict[str, str]) -> None:
    assert outcomes[f"DeepSpeed: {key}"].startswith("DeepSpeedConfigError: ")
    assert "removed" in outcomes[f"DeepSpeed: {key}"]
