"""Moving states off the device and back, under DeepSpeed's names for them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch

from deepspeed_amsp.partition.grads import BucketGradients
from deepspeed_amsp.partition.optim_states import OwnedStates
from deepspeed_amsp.partition.params import ShardedUnit, Unit
from deepspeed_amsp.partition.working import BucketInPlace, WorkingBucket

STATE_KINDS = ("optim_states", "hp_params", "lp_params", "lp_grads", "contiguous_grad_buffer")
"""deepspeed.runtime.zero.offload_config.OffloadStateTypeEnum; the last two are one thing here."""


def move_states(
    units: Sequence[Unit],
    working: Sequence[WorkingBucket],
    states: OwnedStates,
    gradients: Sequence[BucketGradients],
    wanted: Collection[str],
    device: torch.device,
    pin_memory: bool,
    non_blocking: bool,
) -> None:
    """Move the tensors of the ``wanted`` kinds to ``device``, keeping the tensor objects.

    Nothing may be in flight. ``pin_memory`` makes host copies page-locked.
    """
    in_place = [bucket for bucket in working if isinstance(bucket, BucketInPlace)]
    for tensor in _tensors(units, in_place, states, gradients, wanted):
        moved = tensor.data.to(device, non_blocking=non_blocking)
        tensor.data = moved.pin_memory() if pin_memory and device.type == "cpu" else moved
    for bucket in in_place:
        bucket.point()


def _tensors(
    units: Sequence[Unit],
    in_place: Sequence[BucketInPlace],
    states: OwnedStates,
    gradients: Sequence[BucketGradients],
    wanted: Collection[str],
) -> Iterator[torch.Tensor]:
    if "hp_params" in wanted:
        yield from (master.value for master in states.all_masters())
    if "optim_states" in wanted:
        for state in states.optimizer.state.values():
            # Step counters stay: optimizers want them where they made them.
            yield from (value for value in state.values() if torch.is_tensor(value) and value.dim())
    if "lp_params" in wanted:
        yield from (bucket.flat for bucket in in_place)
        views = {id(param) for bucket in in_place for param in bucket.parameters}
        for unit in units:
            own = [unit.shard] if isinstance(unit, ShardedUnit) else unit.parameters
            yield from (tensor for tensor in own if id(tensor) not in views)
    if "lp_grads" in wanted or "contiguous_grad_buffer" in wanted:
        for bucket in gradients:
            yield from (buffer for buffer in (bucket.staged, bucket.kept, bucket.owned) if buffer is not None)
