"""Configuration shapes that public projects ship, each with an amsp block, and what becomes of them.

Re-typed from descriptions. "filled" is what the Trainer or Accelerate makes of the "auto"s.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tests.config.trial import merged


class Shape(NamedTuple):
    """A config and what becomes of it: "accepted as <dtype>", or words that the error holds."""

    config: dict[str, Any]
    expected: str | tuple[str, ...]


def amsp(sharding: str) -> dict[str, Any]:
    return {"amsp": {"sharding": sharding, "topology": {"gpus_per_node": 1}}}


AUTO_BATCH = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
}
FILLED_BATCH = {
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
}
BATCH_WORDS = tuple(AUTO_BATCH)
AUTO_ADAMW = {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}}
FILLED_ADAMW = {
    "type": "AdamW",
    "params": {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0, "torch_adam": True},
}
AUTO_WARMUP = {
    "type": "WarmupLR",
    "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
}
FILLED_WARMUP = {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 1e-3, "warmup_num_steps": 2}}
AUTO_ZERO3 = {
    "stage": 3,
    "overlap_comm": True,
    "contiguous_gradients": True,
    "sub_group_size": 1e9,
    "reduce_bucket_size": "auto",
    "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto",
    "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9,
    "stage3_gather_16bit_weights_on_model_save": True,
}
DYNAMIC_FP16 = {
    "enabled": "auto",
    "loss_scale": 0,
    "loss_scale_window": 1000,
    "initial_scale_power": 16,
    "hysteresis": 2,
    "min_loss_scale": 1,
}
BF16 = {"bf16": {"enabled": True}, "fp16": {"enabled": False}}
ON_CPU = {"device": "cpu", "pin_memory": True}
OFF = {"device": "none", "pin_memory": True}

C1 = {
    **AUTO_BATCH,
    **amsp("zero3"),
    "fp16": DYNAMIC_FP16,
    "optimizer": AUTO_ADAMW,
    "scheduler": AUTO_WARMUP,
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": ON_CPU,
        "offload_param": ON_CPU,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e14,
        "reduce_bucket_size": 0,
        "stage3_prefetch_bucket_size": 0,
        "stage3_param_persistence_threshold": 0,
        "stage3_max_live_parameters": 0,
        "stage3_max_reuse_distance": 0,
        "stage3_gather_fp16_weights_on_model_save": True,
    },
    "steps_per_print": 2000,
    "wall_clock_breakdown": False,
}
C1_FILLED = merged(
    C1, {**FILLED_BATCH, "optimizer": FILLED_ADAMW, "scheduler": FILLED_WARMUP, "fp16": {"enabled": True}}
)
C1_NO_OFFLOAD = merged(C1_FILLED, {"zero_optimization": {"offload_optimizer": None, "offload_param": None}})
C2 = {
    **AUTO_BATCH,
    **amsp("zero3"),
    "gradient_accumulation_steps": 1,
    "fp16": {**DYNAMIC_FP16, "enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": True,
                                              "adam_w_mode": True}},
    "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto",
                                                      "warmup_num_steps": "auto", "total_num_steps": "auto"}},
    "zero_optimization": {**AUTO_ZERO3, "stage3_gather_16bit_weights_on_model_save": "auto"},
    "steps_per_print": float("inf"),
    "wall_clock_breakdown": False,
}  # fmt: skip
C2_FILLED = merged(
    C2,
    {
        "train_batch_size": 4,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 1.0,
        "optimizer": {"params": {"lr": 1e-3, "weight_decay": 0.0}},
        "scheduler": {"params": {"warmup_min_lr": 0, "warmup_max_lr": 1e-3, "warmup_num_steps": 2,
                                 "total_num_steps": 9}},
        "zero_optimization": {"stage3_gather_16bit_weights_on_model_save": True},
    },
)  # fmt: skip
C2_STAGE_1 = merged(C2_FILLED, {**amsp("zero1"), "zero_optimization": None})
C2_STAGE_1["zero_optimization"] = {
    "stage": 1,
    "allgather_partitions": True,
    "allgather_bucket_size": 2e8,
    "overlap_comm": True,
    "reduce_scatter": True,
    "reduce_bucket_size": 2e8,
    "contiguous_gradients": True,
}
C3 = {
    **AUTO_BATCH,
    **amsp("zero3"),
    "zero_allow_untested_optimizer": True,
    "fp16": DYNAMIC_FP16,
    "bf16": {"enabled": "auto"},
    "zero_optimization": AUTO_ZERO3,
    "comms_config": {"verbose": False},
    "monitor_config": {"enabled": False},
}
C4 = {
    **AUTO_BATCH,
    **amsp("zero3"),
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 0,
        "reduce_bucket_size": "auto",
        "prefetch_bucket_size": "auto",
        "param_persistence_threshold": "auto",
        "max_live_parameters": 0,
        "max_reuse_distance": 0,
        "gather_16bit_weights_on_model_save": True,
    },
    "bf16": {"enabled": True},
    "wall_clock_breakdown": False,
}
C5 = {
    **FILLED_BATCH,
    **amsp("zero1"),
    "zero_optimization": {"stage": 1, "overlap_comm": True},
    "bf16": {"enabled": True},
    "fp16": {**DYNAMIC_FP16, "enabled": False, "auto_cast": False},
    "compile": {"disable": False, "backend": "inductor"},
}
C6 = {
    **amsp("zero3"),
    "train_micro_batch_size_per_gpu": 2,
    "train_batch_size": 8,
    "steps_per_print": 100,
    "zero_optimization": {
        "stage": 3,
        "offload_param": {"device": "none"},
        "offload_optimizer": OFF,
        "sub_group_size": "auto",
        "stage3_max_live_parameters": "auto",
        "stage3_max_reuse_distance": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "reduce_bucket_size": "auto",
        "zero_hpz_partition_size": 8,
        "zero_quantized_weights": False,
        "zero_quantized_gradients": False,
    },
    "bf16": {"enabled": True},
    "gradient_clipping": 1.0,
    "prescale_gradients": False,
    "wall_clock_breakdown": False,
    "data_types": {"grad_accum_dtype": None},
    "checkpoint": {"load_universal": False},
    "compile": {"deepcompile": False},
    "tensor_parallel": {"autotp_size": 1},
}
C7 = {
    **amsp("zero3"),
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 2,
    "steps_per_print": 10,
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": True,
        "offload_param": {"device": "none"},
        "offload_optimizer": {"device": "none"},
        "stage3_param_persistence_threshold": 1e4,
        "stage3_max_live_parameters": 3e7,
        "stage3_prefetch_bucket_size": 3e7,
        "memory_efficient_linear": False,
    },
    "bfloat16": {"enabled": True},
    "gradient_clipping": 1.0,
    "prescale_gradients": False,
    "wall_clock_breakdown": False,
    "hybrid_engine": {"enabled": False, "max_out_tokens": 512, "inference_tp_size": 1, "pin_parameters": True,
                      "release_inference_cache": False, "tp_gather_partition_size": 8},
    "tensorboard": {"enabled": False, "output_path": "runs/ds", "job_name": "step1"},
}  # fmt: skip
C7_NODES = {"zero_hpz_partition_size": 8, "zero_quantized_nontrainable_weights": True}
C8 = {
    **amsp("zero1"),
    "train_batch_size": 256,
    "train_micro_batch_size_per_gpu": 32,
    "steps_per_print": 1,
    "zero_optimization": {"stage": 1},
    "gradient_clipping": 1.0,
    "prescale_gradients": False,
    "fp16": {**DYNAMIC_FP16, "enabled": True, "loss_scale_window": 500, "initial_scale_power": 11},
    "wall_clock_breakdown": False,
}
C9 = {
    **FILLED_BATCH,
    **amsp("zero3"),
    "zero_optimization": {"stage": 3, "cpu_offload": True, "cpu_offload_params": True, "sub_group_size": 4e8},
    "fp16": {**DYNAMIC_FP16, "enabled": True},
}
C10 = {
    **FILLED_BATCH,
    **amsp("ddp"),
    "zero_optimization": {"stage": 0},
    "bf16": {**DYNAMIC_FP16, "enabled": True, "bf16_master_weights_and_grads": False},
    "wall_clock_breakdown": False,
}
C11 = {
    **AUTO_BATCH,
    **amsp("zero3"),
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
    "low_cpu_mem_usage": True,
    "zero_optimization": {
        "stage": 3,
        "contiguous_gradients": False,
        "allgather_bucket_size": 3e8,
        "reduce_bucket_size": 3e8,
        "overlap_comm": True,
        "reduce_scatter": True,
    },
    "fp16": {"enabled": "auto", "initial_scale_power": 16},
    "bf16": {"enabled": "auto"},
}
C12 = {
    **AUTO_BATCH,
    **amsp("zero3"),
    "optimizer": AUTO_ADAMW,
    "fp16": {"enabled": "auto", "auto_cast": True, "initial_scale_power": 32},
    "bf16": {"enabled": "auto"},
    "zero_optimization": {
        "stage": 3,
        "reduce_bucket_size": 1e9,
        "stage3_prefetch_bucket_size": 1e9,
        "stage3_param_persistence_threshold": 1e7,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
}
C13 = {
    **amsp("zero1"),
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 32,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "Adam", "params": {"lr": 0.97e-4, "betas": [0.9, 0.95], "eps": 1e-8}},
    "zero_optimization": {
        "stage": 1,
        "allgather_partitions": True,
        "allgather_bucket_size": 1260000000,
        "overlap_comm": True,
        "reduce_scatter": True,
        "reduce_bucket_size": 1260000000,
        "contiguous_gradients": True,
    },
    "fp16": {"fp16": True, "enabled": True, "loss_scale": 0, "loss_scale_window": 1000, "hysteresis": 2},
}
C14 = {
    **AUTO_BATCH,
    **amsp("zero3"),
    "fp16": DYNAMIC_FP16,
    "bf16": {"enabled": "auto"},
    "zero_optimization": {
        **AUTO_ZERO3,
        "offload_optimizer": OFF,
        "offload_param": OFF,
        "zero_quantized_weights": False,
        "zero_quantized_gradients": False,
    },
    "steps_per_print": 2000,
    "wall_clock_breakdown": False,
}
C15 = {
    **AUTO_BATCH,
    **amsp("zero3"),
    "fp16": {"enabled": "auto"},
    "bf16": {"enabled": "auto"},
    "zero_optimization": {
        **AUTO_ZERO3,
        "sub_group_size": 1e12,
        "offload_optimizer": {"device": "cpu"},
        "offload_param": {"device": "cpu"},
    },
}
C16 = {
    **amsp("zero3"),
    "train_batch_size": 32,
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "zero_optimization": {**AUTO_ZERO3, "stage3_prefetch_bucket_size": 1e6, "reduce_bucket_size": 1e6},
}
C17 = {
    **AUTO_BATCH,
    **amsp("zero3"),
    "bf16": {"enabled": "auto"},
    "zero_optimization": AUTO_ZERO3,
    "steps_per_print": 1e5,
    "wall_clock_breakdown": False,
}
C18 = {
    **amsp("zero2"),
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.0,
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {
        "stage": 2,
        "contiguous_gradients": True,
        "overlap_comm": True,
        "allgather_partitions": True,
        "reduce_scatter": True,
        "allgather_bucket_size": 200000000,
        "reduce_bucket_size": 200000000,
        "sub_group_size": 1000000000000,
    },
    "activation_checkpointing": {"partition_activations": False, "cpu_checkpointing": False,
                                 "contiguous_memory_optimization": False, "synchronize_checkpoint_boundary": False},
    "aio": {"block_size": 1048576, "queue_depth": 8, "single_submit": False, "overlap_events": True,
            "thread_count": 1},
    "bf16": {"enabled": True},
}  # fmt: skip
FP32 = {"bf16": {"enabled": False}, "fp16": {"enabled": False}}
PRECISIONS = ("bf16.enabled", "fp16.enabled")

SHAPES: dict[str, Shape] = {
    "C1 raw": Shape(C1, ("offload_optimizer.device", "offload_param.device", *BATCH_WORDS, "fp16.enabled")),
    "C1 filled": Shape(C1_FILLED, ("offload_optimizer.device", "offload_param.device", '"none"')),
    "C1 filled, no offload": Shape(C1_NO_OFFLOAD, ("reduce_bucket_size", "greater than 0")),
    "C2 raw": Shape(C2, ("train_batch_size", "optimizer.params.lr", "scheduler.params.total_num_steps")),
    "C2 filled": Shape(C2_FILLED, "accepted as float16"),
    "C2 stage 1 filled": Shape(C2_STAGE_1, "accepted as float16"),
    "C3 raw": Shape(C3, (*BATCH_WORDS, *PRECISIONS)),
    "C3 batch filled": Shape(merged(C3, FILLED_BATCH), PRECISIONS),
    "C3 filled": Shape(merged(C3, {**FILLED_BATCH, **BF16}), "accepted as bfloat16"),
    "C4 raw": Shape(C4, BATCH_WORDS),
    "C4 filled": Shape(merged(C4, FILLED_BATCH), "accepted as bfloat16"),
    "C5": Shape(C5, ("disable", "backend")),
    "C5 without compile": Shape(merged(C5, {"compile": None}), "accepted as bfloat16"),
    "C6": Shape(C6, ("zero_hpz_partition_size", "8", "set it to 1", "amsp.sharding.parameters")),
    "C6 without hpZ": Shape(merged(C6, {"zero_optimization": {"zero_hpz_partition_size": 1}}), "accepted as bfloat16"),
    "C6 everything on": Shape(
        merged(
            C6,
            {
                "checkpoint": {"load_universal": True},
                "compile": {"deepcompile": True},
                "tensor_parallel": {"autotp_size": 2},
            },
        ),
        ("zero_hpz_partition_size", "load_universal", "deepcompile", "autotp_size"),
    ),
    "C7": Shape(C7, "accepted as bfloat16"),
    "C7 on several nodes": Shape(
        merged(C7, {"zero_optimization": C7_NODES, "hybrid_engine": {"enabled": True}}),
        ("zero_hpz_partition_size", "zero_quantized_nontrainable_weights", "hybrid_engine.enabled"),
    ),
    "C8": Shape(C8, "accepted as float16"),
    "C9": Shape(C9, ("cpu_offload", "cpu_offload_params", "remove it")),
    "C10": Shape(C10, ("DeepSpeedBF16Config", "loss_scale", "hysteresis")),
    "C11 raw": Shape(C11, (*BATCH_WORDS, *PRECISIONS)),
    "C11 filled": Shape(merged(C11, {**FILLED_BATCH, **BF16}), "accepted as bfloat16"),
    "C12 raw": Shape(C12, (*BATCH_WORDS, *PRECISIONS, "optimizer.params.lr")),
    "C12 batch filled": Shape(merged(C12, {**FILLED_BATCH, "optimizer": FILLED_ADAMW}), PRECISIONS),
    "C12 filled": Shape(merged(C12, {**FILLED_BATCH, "optimizer": FILLED_ADAMW, **FP32}), "accepted as float32"),
    "C13": Shape(C13, ("DeepSpeedFP16Config", "fp16")),
    "C14 raw": Shape(C14, (*BATCH_WORDS, *PRECISIONS)),
    "C14 filled": Shape(merged(C14, {**FILLED_BATCH, **BF16}), "accepted as bfloat16"),
    "C15 raw": Shape(C15, (*BATCH_WORDS, *PRECISIONS, "offload_optimizer.device", "offload_param.device")),
    "C15 filled": Shape(merged(C15, {**FILLED_BATCH, **BF16}), ("offload_optimizer.device", "offload_param.device")),
    "C16 raw": Shape(C16, ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")),
    "C16 does not fit": Shape(
        merged(C16, {"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 2}),
        ("train_batch_size", "32", "3 a GPU", "2 accumulation steps", "2 GPUs", "12"),
    ),
    "C16 filled": Shape(
        merged(C16, {"train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 2}), "accepted as bfloat16"
    ),
    "C17 raw": Shape(C17, (*BATCH_WORDS, "bf16.enabled")),
    "C17 filled": Shape(merged(C17, {**FILLED_BATCH, "bf16": {"enabled": True}}), "accepted as bfloat16"),
    "C18": Shape(C18, "accepted as bfloat16"),
}
