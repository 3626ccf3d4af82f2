"""Which DeepSpeed and torch versions work, and a self-check of the names that we rely on."""

from __future__ import annotations

import inspect
from typing import Any

from packaging.version import Version

DEEPSPEED_RANGE = (Version("0.19.5"), Version("0.20"))
TORCH_AT_LEAST = Version("2.7")

ENGINE_METHODS = (
    "_backward_epilogue",
    "_backward_prologue",
    "_broadcast_model",
    "_checkpoint_tag_validation",
    "_configure_distributed_model",
    "_configure_zero_optimizer",
    "_do_optimizer_sanity_check",
    "_forward_epilogue",
    "_forward_prologue",
    "_get_shared_params",
    "_scheduler_from_config",
    "_zero3_consolidated_16bit_state_dict",
    "allreduce_gradients",
    "bfloat16_enabled",
    "communication_data_type",
    "compile",
    "curriculum_learning_enabled",
    "destroy",
    "dynamic_loss_scale",
    "dynamic_loss_scale_args",
    "forward",
    "fp16_enabled",
    "get_data_types",
    "gradient_clipping",
    "gradient_predivide_factor",
    "is_gradient_accumulation_boundary",
    "load_checkpoint",
    "loss_scale",
    "module_state_dict",
    "no_sync",
    "postscale_gradients",
    "random_ltd_enabled",
    "save_16bit_model",
    "save_checkpoint",
    "scheduler_name",
    "step",
    "zero_allow_untested_optimizer",
    "zero_grad",
    "zero_load_from_fp32_weights",
    "zero_optimization_partition_gradients",
    "zero_optimization_partition_weights",
)

OPTIMIZER_METHODS = (
    "backward_epilogue",
    "clear_backward_seen_flag",
    "enter_backward",
    "exit_backward",
    "queue_post_backward_callback",
    "reenter_backward_if_needed",
    "register_grad_acc_post_hook",
    "scale_if_loss",
    "set_gradient_accumulation_boundary",
    "should_refresh_expected_hook_count",
    "update_hook_state_and_maybe_run_epilogue",
)


TORCH_INTERNALS = ("_current_graph_task_id", "_swap_tensor_impl")


class IncompatibleVersion(ImportError):
    """The installed DeepSpeed or torch is not one that this package was built for."""


def check() -> None:
    """Fail loudly at import instead of training wrong on a DeepSpeed whose internals have moved.

    Raises:
        IncompatibleVersion: names the version, or the names that are missing.
    """
    # Here and not above: this runs at the end of DeepSpeed's import (see install.py).
    import deepspeed
    import torch
    from deepspeed.runtime import base_optimizer, engine

    low, high = DEEPSPEED_RANGE
    found = Version(Version(deepspeed.__version__).base_version)
    if not low <= found < high:
        raise IncompatibleVersion(
            f"deepspeed_amsp works with DeepSpeed >= {low}, < {high}, but {deepspeed.__version__} is installed; "
            f"pip install 'deepspeed>={low},<{high}'"
        )
    if Version(Version(torch.__version__).base_version) < TORCH_AT_LEAST:
        raise IncompatibleVersion(f"deepspeed_amsp needs torch >= {TORCH_AT_LEAST}, not {torch.__version__}")
    missing = _missing(engine.DeepSpeedEngine, ENGINE_METHODS) + _missing(
        base_optimizer.ZeROOptimizer, OPTIMIZER_METHODS
    )
    if "config_class" not in inspect.signature(engine.DeepSpeedEngine.__init__).parameters:
        missing.append("DeepSpeedEngine.__init__(config_class)")
    if not hasattr(deepspeed, "load_ds_config"):
        missing.append("deepspeed.load_ds_config")
    missing += [f"torch._C.{name}" for name in TORCH_INTERNALS if not hasattr(torch._C, name)]
    if missing:
        raise IncompatibleVersion(
            f"DeepSpeed {deepspeed.__version__} lacks what deepspeed_amsp builds on: {', '.join(missing)}"
        )


def _missing(owner: type[Any], names: tuple[str, ...]) -> list[str]:
    return [f"{owner.__name__}.{name}" for name in names if not hasattr(owner, name)]
