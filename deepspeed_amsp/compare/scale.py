"""Sizes of the model that settings follow."""

from __future__ import annotations

import os
import sys
from functools import lru_cache
from typing import Any

import torch

from deepspeed_amsp.compare.config import CompareConfigError, ModelBlock
from deepspeed_amsp.compare.models import build
from deepspeed_amsp.module_spec import model_spec
from deepspeed_amsp.plan.specs import ModelSpec


@lru_cache(maxsize=4)
def spec_of(block: ModelBlock) -> ModelSpec:
    """The model's tensors, from the meta device: nothing is allocated."""
    with torch.device("meta"):
        return model_spec(build(block, 0).module, "compared")


def check_model(block: ModelBlock) -> None:
    """Build what is not ours once: else every strategy would find out for itself that it cannot be.

    Raises:
        CompareConfigError: it cannot be built.
    """
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # where ranks look for a factory, too
    try:
        spec_of(block)
    except Exception as error:  # a factory is anybody's code
        what = block.factory or f"hf {block.hf}"
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise CompareConfigError(f"model: {what} cannot be built on the meta device: {reason}") from error


def block_numel(block: ModelBlock) -> int:
    """Elements of the largest block; of the whole model where it has none."""
    spec = spec_of(block)
    sizes = [sum(spec.units[index].numel for index in members) for members in spec.ranges.values()]
    return max(sizes, default=spec.numel)


def stage3_thresholds(block: ModelBlock) -> dict[str, Any]:
    """Of DeepSpeed's stage 3, in elements: about one block ahead and none behind."""
    numel = block_numel(block)
    return {
        "stage3_max_live_parameters": int(1.3 * numel),
        "stage3_max_reuse_distance": 0,
        "stage3_prefetch_bucket_size": int(1.1 * numel),
        "stage3_param_persistence_threshold": 1000,
    }
