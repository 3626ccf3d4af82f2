"""What all engines of DeepSpeed have in common, ours too."""

from __future__ import annotations

from typing import Any

import torch

from deepspeed_amsp.compare.strategies.base import Held, Work, state_tensors, storage_bytes


def common_config(work: Work) -> dict[str, Any]:
    """The part of a ds_config that is the same for all of them."""
    training = work.config.training
    elements = work.config.bucket_bytes // 2
    return {
        "train_micro_batch_size_per_gpu": work.config.model.micro_batch,
        "gradient_accumulation_steps": work.micro_batches,
        "gradient_clipping": training.clipping,  # absent means 1.0 in some releases, and none in others
        "steps_per_print": 1_000_000,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": training.lr, "torch_adam": True, "fused": True}},
        "zero_optimization": {"reduce_bucket_size": elements, "allgather_bucket_size": elements},
    }


class Engine:
    """A DeepSpeed engine under the surface of `Trainer`."""

    def __init__(self, work: Work, config: dict[str, Any], model: torch.nn.Module | None = None) -> None:
        import deepspeed

        module = work.model().module if model is None else model
        self.engine: Any = deepspeed.initialize(model=module, config=config)[0]

    def forward(self, batch: torch.Tensor, last: bool) -> torch.Tensor:
        return self.engine(batch)

    def backward(self, loss: torch.Tensor, last: bool) -> None:
        self.engine.backward(loss)

    def step(self, last: bool) -> None:
        self.engine.step()

    def settle(self) -> None:
        return

    def held(self) -> Held:
        optimizer = self.engine.optimizer
        return Held(
            storage_bytes(_working(self.engine.module)),
            storage_bytes(_gradients(self.engine.module, optimizer)),
            storage_bytes([*_masters(optimizer), *state_tensors(optimizer.optimizer)]),
        )

    def close(self) -> None:
        self.engine.destroy()
        del self.engine


def _working(module: torch.nn.Module) -> list[Any]:
    """bf16 parameters as they rest: shards under stage 3, with hpZ's second ones."""
    found: list[Any] = []
    for param in module.parameters():
        shard = getattr(param, "ds_tensor", None)
        found += [param.data if shard is None else shard, getattr(param, "ds_secondary_tensor", None)]
    return found


def _gradients(module: torch.nn.Module, optimizer: Any) -> list[Any]:
    """Wherever the ZeRO optimizers keep them before an update."""
    found: list[Any] = [param.grad for param in module.parameters()]
    for tensors in (getattr(optimizer, "averaged_gradients", None) or {}).values():
        found += tensors or []
    partitions = getattr(optimizer, "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition", None) or {}
    return [*found, *partitions.values()]


def _masters(optimizer: Any) -> list[Any]:
    """fp32 copies, which the optimizer below does not always list."""
    for name in ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups"):
        if hasattr(optimizer, name):
            return list(getattr(optimizer, name))
    return []
