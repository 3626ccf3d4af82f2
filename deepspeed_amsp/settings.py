"""What the ds_config says about the update, resolved: the engine fills it in, the optimizer reads it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from deepspeed_amsp.partition.params import Unit


@dataclass(frozen=True)
class OptimizerSettings:
    """What the ds_config says about the update.

    clip: largest global gradient norm; 0 switches clipping off.
    accumulation_dtype, wire_dtype: how gradients rest and travel; None for the parameter's own dtype.
    bucket_numel: elements in a bucket.
    check_overflow: read the norm on the host once a step and skip the step when it is not finite.
    divisor: of summed gradients: how many ranks took different samples, 1 for gradient_allreduce_op "sum".
    prescale: factor on gradients before they are added up (prescale_gradients, gradient_predivide_factor).
    zero_fill_unused: treat parameters without any gradient as having a zero one, as DeepSpeed does.
    """

    clip: float
    accumulation_dtype: torch.dtype | None
    wire_dtype: torch.dtype | None
    bucket_numel: int
    check_overflow: bool
    divisor: int
    prescale: float
    compute_norm: bool
    allow_untested: bool
    zero_fill_unused: bool
    verify_every: int
    persistence: Callable[[Iterable[int]], list[bool]]
    log_order_changes: bool

    def persistent(self, units: Sequence[Unit]) -> list[bool]:
        """Which units are so small that they stay gathered until their values change."""
        return self.persistence(sum(spec.numel for spec in unit.layout.params) for unit in units)
