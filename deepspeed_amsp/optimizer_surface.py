"""Attributes that DeepSpeed's engine and utilities duck-type on a ZeRO optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from deepspeed.runtime.base_optimizer import ZeROOptimizer


class OptimizerSurface(ZeROOptimizer):  # type: ignore[misc]
    """The base of AMSPOptimizer: loss scale, parameter groups and state, all of the user's own optimizer."""

    optimizer: torch.optim.Optimizer

    def expose(self, loss_scaler: Any, states_group: Any) -> None:
        """Set what is read; ``states_group`` holds one replica of the optimizer states, which its ranks save."""
        self.overflow = False
        self._global_grad_norm: Any = None
        self.custom_loss_scaler = False
        self.external_loss_scale: float | None = None
        self.torch_autocast_gradscaler = None
        self.loss_scaler = loss_scaler
        self.dynamic_loss_scale = bool(loss_scaler.dynamic)
        self.dp_process_group = states_group

    @property
    def loss_scale(self) -> float:
        """By how much the gradients are too large; a user's own scaler goes before ours."""
        if self.custom_loss_scaler and self.external_loss_scale is not None:
            return self.external_loss_scale
        return float(self.loss_scaler.cur_scale)

    @property
    def cur_scale(self) -> float:
        return self.loss_scale

    def override_loss_scale(self, loss_scale: float) -> None:
        """Scale the loss by the caller's value from now on."""
        self.custom_loss_scaler = True
        self.external_loss_scale = loss_scale

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = value

    @property
    def state(self) -> Mapping[Any, Any]:
        return self.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:
        return self.optimizer.defaults
