"""Bytes that this rank holds, next to what they should be with the true owner loads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from deepspeed_amsp.partition.grads import BucketGradients
from deepspeed_amsp.partition.optim_states import OwnedStates, moments_per_element
from deepspeed_amsp.partition.params import Unit
from deepspeed_amsp.plan.layout import BucketLayout

Bytes = dict[str, int]
"""{"held": what the tensors take, "formula": what the layout says}."""


@dataclass(frozen=True)
class Accounting:
    """The rooms of one rank, counted.

    Args:
        owner: this rank's number on the ``optim`` axis.
        kept: its coordinates in the stages that every micro-batch goes through.
    """

    units: Sequence[Unit]
    layouts: Sequence[BucketLayout]
    gradients: Sequence[BucketGradients]
    states: OwnedStates
    owner: int
    kept: tuple[int, ...]

    def parameters(self) -> Bytes:
        """The working copy at rest: 1/s_p of every unit, rounded up to the alignment."""
        formula = sum(unit.layout.shard_numel * unit.dtype.itemsize for unit in self.units)
        return {"held": sum(unit.held_bytes for unit in self.units), "formula": formula}

    def resting_gradients(self) -> Bytes:
        """Between micro-batches, 1/s_g; nothing may be in flight."""
        return self._gradients([layout.held_range(self.kept)[1] for layout in self.layouts])

    def owned_gradients(self) -> Bytes:
        """Before the step, 1/s_os; nothing may be in flight."""
        return self._gradients([layout.sections[self.owner][1] for layout in self.layouts])

    def masters(self) -> Bytes:
        by_index: Mapping[int, Unit] = {unit.index: unit for unit in self.units}
        formula = 0
        for layout in self.layouts:
            wide = torch.promote_types(by_index[layout.units[0]].dtype, torch.float32)
            formula += layout.owned_numel(self.owner) * wide.itemsize
        return {"held": self.states.master_bytes, "formula": formula}

    def moments(self) -> Bytes:
        """Per-element optimizer state in the masters' dtype; formula 0 where the optimizer is not known."""
        per_element = moments_per_element(self.states.optimizer) or 0
        return {"held": self.states.state_bytes, "formula": per_element * self.masters()["formula"]}

    def _gradients(self, elements: Sequence[int]) -> Bytes:
        held = sum(gradient.held_bytes for gradient in self.gradients)
        sizes = (gradient.dtype.itemsize for gradient in self.gradients)
        return {"held": held, "formula": sum(n * size for n, size in zip(elements, sizes, strict=True))}
