"""Attributes that DeepSpeed's engine and utilities duck-type on a ZeRO optimizer, and access to gathered units."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from deepspeed.runtime.base_optimizer import ZeROOptimizer

from deepspeed_amsp.partition.params import ShardedUnit, Unit
from deepspeed_amsp.schedule.gather import Gatherer


class OptimizerSurface(ZeROOptimizer):  # type: ignore[misc]
    """The base of AMSPOptimizer: loss scale, parameter groups and state, all of the user's own optimizer; and
    sharded units for those who read or write them outside the passes."""

    optimizer: torch.optim.Optimizer
    _gatherer: Gatherer | None

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

    def gather_unit(self, unit: ShardedUnit) -> None:
        """Make a sharded unit readable outside a pass; whoever pins it keeps it so. Collective."""
        assert self._gatherer is not None
        self._gatherer.gather(unit)

    def free_unit(self, unit: ShardedUnit) -> None:
        """Drop the full copy of a unit that nobody has pinned any more."""
        assert self._gatherer is not None
        self._gatherer.free(unit)

    def values_change(self) -> None:
        """The working copies are about to be written: what was gathered before is stale."""
        if self._gatherer is not None:
            self._gatherer.values_change()

    def values_changed(self) -> None:
        """The working copies were written: who has gathered ones pinned sees the new values."""
        if self._gatherer is not None:
            self._gatherer.values_changed()

    @property
    def gather_hits(self) -> tuple[int, int]:
        """(gathers for passes, those that had been issued ahead of their use), since the engine was made."""
        return (0, 0) if self._gatherer is None else (self._gatherer.gathers, self._gatherer.hits)

    def gathered_units(self) -> Iterator[tuple[Unit, list[torch.Tensor]]]:
        """Every sharded unit with its whole parameters, one after the other. Collective: all ranks iterate."""
        if self._gatherer is None:
            return
        for unit in self._gatherer.units:
            self._gatherer.gather(unit)
            yield unit, [param.data for param in unit.parameters]
            self._gatherer.free(unit)
