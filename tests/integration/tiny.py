"""What the frameworks are given: a tiny Llama made from its config, rows of tokens, ds_configs."""

from __future__ import annotations

import copy
import os
from importlib.util import find_spec
from typing import Any, NamedTuple

import pytest
import torch

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LENGTH = 12


def needs(*packages: str) -> pytest.MarkDecorator:
    """Skips without them. They are only looked for: to import them would hold up every collection for seconds."""
    missing = [package for package in packages if find_spec(package) is None]
    return pytest.mark.skipif(bool(missing), reason=f"without {missing}: pip install deepspeed_amsp[integrations]")


class Plan(NamedTuple):
    """Factors for ``world`` ranks as nodes of two, and the stage of plain DeepSpeed that must give the same losses."""

    world: int
    stage: int
    sharding: dict[str, list[int]]


PLANS = {
    "states": Plan(2, 1, {"parameters": [1, 1], "gradients": [1, 1], "optimizer_states": [2, 1]}),
    "gradients": Plan(2, 2, {"parameters": [1, 1], "gradients": [2, 1], "optimizer_states": [2, 1]}),
    "parameters": Plan(2, 3, {"parameters": [2, 1], "gradients": [2, 1], "optimizer_states": [2, 1]}),
    "across": Plan(4, 3, {"parameters": [2, 1], "gradients": [2, 1], "optimizer_states": [2, 2]}),
}
"""s_p = 1, s_g > 1, s_p > 1; and parameters within a node of two nodes, where they form several groups."""
RUN = [name for name in PLANS if name != "across" or os.environ.get("AMSP_NIGHTLY") == "1"]


def block(plan: Plan) -> dict[str, Any]:
    return {"sharding": copy.deepcopy(plan.sharding), "topology": {"gpus_per_node": 2}}


def ds_config(plan: Plan, with_block: bool, **changes: Any) -> dict[str, Any]:
    """A file as the Trainer and Accelerate like it, "auto" where they fill it in. A change to None removes a key."""
    config: dict[str, Any] = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "zero_optimization": {
            "stage": plan.stage,
            "reduce_bucket_size": "auto",
            "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto",
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        "steps_per_print": 10**9,
        **changes,
    }
    if with_block:
        config["amsp"] = block(plan)
    return {key: value for key, value in config.items() if value is not None}


def llama_config(**changes: Any) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(**{**SIZES, **changes})


def llama(seed: int = 0, **changes: Any) -> Any:
    """Built as scripts do, so under zero.Init when a stage 3 config is known to transformers."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(llama_config(**changes))


def rows(count: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(11)
    tokens = torch.randint(3, SIZES["vocab_size"], (count, LENGTH), generator=generator)
    return [{"input_ids": row, "labels": row.clone()} for row in tokens]


def on_cpus() -> None:
    """A fresh start for both. Accelerate has no backend for DeepSpeed without GPUs, and is told gloo."""
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    unset_hf_deepspeed_config()

    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState._prepare_backend = lambda *_, **__: ("gloo", DistributedType.NO)


def engine_name(model: Any) -> str:
    """ "AMSPEngine" or "DeepSpeedEngine"."""
    return type(model).__name__
