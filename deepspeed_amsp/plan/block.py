"""A plan as part of a ds_config: the keys that make the engine do it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from deepspeed_amsp.plan.resolve import Plan
from deepspeed_amsp.plan.specs import GRADIENT_BYTES, TrainSpec

REUSE = ("max_reuse_distance", "stage3_max_reuse_distance")


def amsp_block(plan: Plan) -> dict[str, Any]:
    """The "amsp" object; switches of overlap only where one is off, keep_after_forward only where something is."""
    block: dict[str, Any] = {
        "sharding": plan.sharding.as_dict(),
        "reduce": plan.reduce.value,
        "publish": plan.publish.value,
        "hierarchical": plan.hierarchical,
        "prefetch_bytes": plan.prefetch_bytes,
    }
    if plan.bucket_bytes is not None:
        block["bucket_bytes"] = plan.bucket_bytes
    if plan.keep_after_forward != "none":
        block["keep_after_forward"] = plan.keep_after_forward
    switches = asdict(plan.overlap)
    if not all(switches.values()):
        block["overlap"] = switches
    block["topology"] = {"gpus_per_node": plan.sharding.data_parallel.s0}
    return block


def ds_config(plan: Plan, train: TrainSpec) -> dict[str, Any]:
    """Block, stage and batch: what belongs to a plan in a ds_config."""
    return {
        "train_micro_batch_size_per_gpu": train.micro_batch,
        "gradient_accumulation_steps": train.micro_batches,
        "zero_optimization": {"stage": plan.sharding.stage},
        "amsp": amsp_block(plan),
    }


def new_config(plan: Plan, train: TrainSpec) -> dict[str, Any]:
    """A ds_config to start from. The optimizer is the script's to give, or yours to add."""
    precision = {"bf16": {"enabled": True}}
    clipping = {"gradient_clipping": 1.0 if train.gradient_clipping else 0.0}
    accumulation = {"data_types": {"grad_accum_dtype": "fp32"}} if train.gradient_bytes == 4 else {}
    return {**precision, **clipping, **accumulation, **ds_config(plan, train)}


def merged(existing: Mapping[str, Any], plan: Plan, train: TrainSpec) -> dict[str, Any]:
    """An existing ds_config with this plan in it; every key that the plan says nothing about stays as it is.

    What would make the engine do something else than the plan is overwritten: switches of overlap, also those that
    overlap_comm turns off, keep_after_forward, also where max_reuse_distance sets it, the dtype in which gradients
    rest, and a block that is switched off. train_batch_size follows the other two where it is written.
    """
    result = dict(existing)
    ours = ds_config(plan, train)
    zero, block = existing.get("zero_optimization"), existing.get("amsp")
    ours["zero_optimization"] = {**(zero if isinstance(zero, Mapping) else {}), **ours["zero_optimization"]}
    kept = dict(block) if isinstance(block, Mapping) else {}
    if "overlap" in kept or ours["zero_optimization"].get("overlap_comm") is False:
        ours["amsp"]["overlap"] = asdict(plan.overlap)
    if "keep_after_forward" in kept or any(key in ours["zero_optimization"] for key in REUSE):
        ours["amsp"]["keep_after_forward"] = plan.keep_after_forward
    if "enabled" in kept:
        ours["amsp"]["enabled"] = True
    types = existing.get("data_types")
    types = types if isinstance(types, Mapping) else {}
    # Where the key is not written, gradients rest as wide as the working copies are.
    if train.gradient_bytes != GRADIENT_BYTES.get(str(types.get("grad_accum_dtype")), train.parameter_bytes):
        half = "fp16" if isinstance(existing.get("fp16"), Mapping) else "bf16"
        ours["data_types"] = {**types, "grad_accum_dtype": "fp32" if train.gradient_bytes == 4 else half}
    topology = kept.get("topology")
    ours["amsp"]["topology"] = {**(topology if isinstance(topology, Mapping) else {}), **ours["amsp"]["topology"]}
    ours["amsp"] = {**kept, **ours["amsp"]}
    result.update(ours)
    if "train_batch_size" in result:
        result["train_batch_size"] = train.micro_batch * train.micro_batches * plan.sharding.s_dp
    return result
