"""What may not stand next to the amsp block, and blocks that are misspelled or misplaced."""

from __future__ import annotations

import copy
import json
import math
from typing import Any

import pytest

from deepspeed_amsp.config import ConfigError, preflight, read_block

PLAIN = {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 1.0, "bf16": {"enabled": True}}


def problems_beside(ds_config: dict[str, Any], enabled: bool = True) -> dict[str, str]:
    """Path -> reason of everything that preflight refuses; {} when it accepts."""
    whole = {**PLAIN, **({"amsp": {}} if enabled else {}), **ds_config}
    before = copy.deepcopy(whole)
    try:
        preflight(whole)
    except ConfigError as error:
        return {problem.path: problem.reason for problem in error.problems}
    finally:
        assert whole == before, "preflight changed the config"
    return {}


def nested(path: str, value: Any) -> dict[str, Any]:
    """{"a": {"b": value}} for "a.b"."""
    for key in reversed(path.split(".")):
        value = {key: value}
    return value  # type: ignore[no-any-return]


class TestAutoLeftovers:
    """What the Trainer or Accelerate would have filled in."""

    def test_left_over_elsewhere_in_one_message(self) -> None:
        # The shape of the all-auto files that LLaMA-Factory, FastChat and ms-swift ship.
        found = problems_beside(
            {
                "train_batch_size": "auto",
                "train_micro_batch_size_per_gpu": "auto",
                "gradient_accumulation_steps": "auto",
                "gradient_clipping": "auto",
                "zero_allow_untested_optimizer": True,
                "fp16": {"enabled": "auto", "loss_scale": 0},
                "bf16": {"enabled": "auto"},
                "zero_optimization": {"stage": "auto", "reduce_bucket_size": "auto"},
                "optimizer": {
                    "type": "AdamW",
                    "params": {"lr": "auto", "betas": ["auto", 0.95], "eps": 1e-8},
                },
                "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}},
            }
        )
        assert len(found) == 1
        (path,), (reason,) = found.keys(), found.values()
        assert set(path.split(", ")) == {
            "train_batch_size",
            "train_micro_batch_size_per_gpu",
            "gradient_accumulation_steps",
            "gradient_clipping",
            "bf16.enabled",
            "fp16.enabled",
            "zero_optimization.stage",
            "optimizer.params.lr",
            "optimizer.params.betas.0",
            "scheduler.params.warmup_num_steps",
        }
        assert "Accelerate" in reason

    def test_zero_keys_that_deepspeed_drops_may_stay(self) -> None:
        # OpenRLHF passes six of them to deepspeed.initialize.
        zero = {
            "stage": 1,
            "reduce_bucket_size": "auto",
            "overlap_comm": "auto",
            "offload_param": {"device": "auto"},
        }
        assert problems_beside({"zero_optimization": zero}) == {}

    def test_without_a_block_nobody_minds(self) -> None:
        assert problems_beside({"train_batch_size": "auto"}, enabled=False) == {}


class TestPrecision:
    """At most one 16-bit type, and one spelling of it."""

    @pytest.mark.parametrize("bf16", ["bf16", "bfloat16"])
    def test_both_precisions(self, bf16: str) -> None:
        config = {**PLAIN, "amsp": {}, "fp16": {"enabled": "true"}}
        del config["bf16"]
        preflight(config)
        with pytest.raises(ConfigError, match=f"fp16.enabled: {bf16}.enabled is true as well"):
            preflight({**config, bf16: {"enabled": True}})

    def test_both_spellings_of_bf16(self) -> None:
        # DeepSpeed reads bf16 alone and would train fp32 here in silence.
        found = problems_beside({"bf16": {"enabled": False}, "bfloat16": {"enabled": True}})
        assert list(found) == ["bfloat16"]


class TestMisplaced:
    """DeepSpeed ignores a block that it does not know (#2721)."""

    @pytest.mark.parametrize("enabled", [True, False])
    def test_inside_zero_optimization(self, enabled: bool) -> None:
        found = problems_beside({"zero_optimization": {"stage": 1, "amsp": {"sharding": "zero1"}}}, enabled)
        assert "top-level block" in found["zero_optimization.amsp"]

    @pytest.mark.parametrize("name", ["amps", "asmp", "AMSP", "Amsp", "ampsp", "deepspeed_amsp", "amsp_config"])
    def test_near_misses(self, name: str) -> None:
        found = problems_beside({name: {"sharding": "zero1"}}, enabled=False)
        assert 'did you mean "amsp"?' in found[name]

    @pytest.mark.parametrize("value", [{}, {"enabled": True}, {"sharding": "zero1", "typo": 1}])
    def test_near_miss_by_value(self, value: Any) -> None:
        assert "amps" in problems_beside({"amps": value}, enabled=False)

    @pytest.mark.parametrize(
        "foreign",
        [
            {"amp": {"enabled": True, "opt_level": "O1"}},
            {"amp": {"enabled": False}},
            {"amps": 3},
            {"maps": {"enabled": True}},
            {"aio": {"block_size": 1}},
            {"camp": {"steps": 3}},
            {"low_cpu_mem_usage": True, "comms_config": {"verbose": True}, "monitor_config": {}},
        ],
    )
    def test_foreign_blocks_are_left_alone(self, foreign: dict[str, Any]) -> None:
        assert problems_beside(foreign, enabled=False) == {}
        assert problems_beside(foreign) == {}

    def test_near_miss_next_to_the_right_name_is_somebody_elses(self) -> None:
        assert problems_beside({"amps": {"sharding": "zero1"}}) == {}


class TestNeighbours:
    """What an enabled block cannot run next to."""

    refused: tuple[tuple[str, Any], ...] = (
        ("zero_optimization.offload_optimizer.device", "cpu"),
        ("zero_optimization.offload_optimizer.device", "nvme"),
        ("zero_optimization.offload_param.device", "cpu"),
        ("zero_optimization.offload_param.device", "nvme"),
        ("zero_optimization.offload_optimizer.super_offload", True),
        ("zero_optimization.cpu_offload", True),
        ("zero_optimization.cpu_offload_param", True),
        ("zero_optimization.cpu_offload_params", True),
        ("zero_optimization.cpu_offload_use_pin_memory", True),
        ("zero_optimization.zero_hpz_partition_size", 2),
        ("zero_optimization.zero_hpz_partition_size", "8"),
        ("zero_optimization.zero_quantized_weights", True),
        ("zero_optimization.zero_quantized_gradients", "true"),
        ("zero_optimization.zero_quantized_nontrainable_weights", 1),
        ("zero_optimization.zenflow", {"topk_ratio": 0.1}),
        ("zero_optimization.zenflow", {}),
        ("pipeline.stages", 2),
        ("tensor_parallel.autotp_size", 2),
        ("tensor_parallel.tp.tp_size", 2),
        ("tensor_parallel.tensor_parallel.tp_size", 2),
        ("expert_parallel.enabled", True),
        ("hybrid_engine.enabled", True),
        ("compile.deepcompile", True),
        ("compile.passes", ["z3", "autosp"]),
        ("weight_quantization", {"post_init_quant": {}}),
        ("autotuning.enabled", True),
    )

    @pytest.mark.parametrize(("path", "value"), refused)
    def test_refused(self, path: str, value: Any) -> None:
        found = problems_beside(nested(path, value))
        assert list(found) == [path]
        assert found[path].startswith(f"{json.dumps(value)} does not work next to an amsp block: ")

    @pytest.mark.parametrize(("path", "value"), refused)
    def test_not_our_business_without_an_enabled_block(self, path: str, value: Any) -> None:
        assert problems_beside(nested(path, value), enabled=False) == {}
        assert problems_beside({**nested(path, value), "amsp": {"enabled": "false"}}) == {}

    @pytest.mark.parametrize(
        ("path", "value"),
        [
            ("zero_optimization", True),
            ("zero_optimization.offload_optimizer", {"device": "none", "pin_memory": True}),
            ("zero_optimization.offload_param", {"device": "none"}),
            ("zero_optimization.offload_param", {}),
            ("zero_optimization.offload_param", None),
            ("zero_optimization.cpu_offload", False),
            ("zero_optimization.zero_hpz_partition_size", 1),
            ("zero_optimization.zero_hpz_partition_size", 0),
            ("zero_optimization.zero_quantized_weights", False),
            ("zero_optimization.zenflow", None),
            ("zero_optimization.reduce_bucket_size", 5e8),
            ("zero_optimization.stage3_prefetch_bucket_size", 1),
            ("zero_optimization.prefetch_bucket_size", 1),
            ("pipeline.stages", "auto"),
            ("pipeline", {}),
            ("tensor_parallel.autotp_size", 1),
            ("tensor_parallel.autotp_size", 0),
            ("sequence_parallel_size", 2),
            ("expert_parallel.enabled", False),
            ("hybrid_engine.enabled", False),
            ("compile.deepcompile", False),
            ("compile.passes", ["z1"]),
            ("weight_quantization", {"enabled": False}),
            ("autotuning", {"enabled": False}),
        ],
    )
    def test_harmless(self, path: str, value: Any) -> None:
        assert problems_beside(nested(path, value)) == {}

    def test_all_at_once(self) -> None:
        # The shape of DeepSpeed-Chat's and OpenRLHF's configs with everything on.
        found = problems_beside(
            {
                "zero_optimization": {
                    "stage": 3,
                    "zero_hpz_partition_size": 8,
                    "offload_param": {"device": "cpu"},
                },
                "hybrid_engine": {"enabled": True},
                "compile": {"deepcompile": True},
                "gradient_clipping": None,
            }
        )
        assert set(found) == {
            "zero_optimization.zero_hpz_partition_size",
            "zero_optimization.offload_param.device",
            "hybrid_engine.enabled",
            "compile.deepcompile",
            "gradient_clipping",
        }

    @pytest.mark.parametrize("zero", [True, None, [], "auto", 3])
    def test_odd_zero_blocks_do_not_crash(self, zero: Any) -> None:
        assert problems_beside({"zero_optimization": zero}) == {}


class TestMics:
    """The removed MiCS keys are translated."""

    def test_prints_an_equivalent_block_that_is_legal(self) -> None:
        found = problems_beside(
            {"zero_optimization": {"stage": 3, "mics_shard_size": 4, "mics_hierarchical_params_gather": True}}
        )
        (reason,) = found.values()
        printed = json.loads("{" + reason.split("equivalent is ")[1] + "}")
        block = read_block(printed)
        assert block is not None
        assert block.sharding.filled() == {"parameters": 4, "gradients": 4, "optimizer_states": 4}  # type: ignore[union-attr]
        assert block.hierarchical

    def test_switched_off(self) -> None:
        found = problems_beside({"zero_optimization": {"mics_shard_size": -1}})
        assert "it asks for nothing" in found["zero_optimization.mics_shard_size"]


class TestClipping:
    """A number, 0.0 for none (DeepSpeed takes anything and clips at 1.0 when it is absent)."""

    @pytest.mark.parametrize("value", [None, -1, -0.5, "1.0", True, math.nan, math.inf, [1.0]])
    def test_refused(self, value: Any) -> None:
        assert "must be a number" in problems_beside({"gradient_clipping": value})["gradient_clipping"]

    @pytest.mark.parametrize("value", [0, 0.0, 1, 0.5, 1e9])
    def test_taken(self, value: Any) -> None:
        assert problems_beside({"gradient_clipping": value}) == {}

    def test_absent(self) -> None:
        preflight({"amsp": {}})
