"""torch's DistributedDataParallel: gradients are reduced in buckets under the backward pass."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.nn.parallel import DistributedDataParallel

from deepspeed_amsp.compare.strategies.base import Masters, OnMasters, Work

MIB = 1024 * 1024


class DDP(OnMasters):
    """bf16 parameters and gradients, fp32 masters; every rank updates everything. The reference of losses."""

    def __init__(self, work: Work) -> None:
        model = work.model().module.to(work.device, torch.bfloat16)
        parameters = list(model.parameters())
        masters = Masters(parameters, parameters, work.config.training.lr)
        self._replica = DistributedDataParallel(
            model, bucket_cap_mb=work.config.bucket_bytes / MIB, gradient_as_bucket_view=True
        )
        super().__init__(work, self._replica, masters)

    def forward(self, batch: torch.Tensor, last: bool) -> torch.Tensor:
        with self._reducing(last):
            return super().forward(batch, last)

    def backward(self, loss: torch.Tensor, last: bool) -> None:
        with self._reducing(last):
            super().backward(loss, last)

    def close(self) -> None:
        del self._replica
        super().close()

    def _reducing(self, last: bool) -> AbstractContextManager[None]:
        return nullcontext() if last else self._replica.no_sync()
