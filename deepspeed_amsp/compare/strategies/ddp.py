"""torch's DistributedDataParallel: gradients are reduced in buckets under the backward pass."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch.nn.parallel import DistributedDataParallel

from deepspeed_amsp.compare.strategies.base import Held, Masters, Work

MIB = 1024 * 1024


class DDP:
    """bf16 parameters and gradients, fp32 masters; every rank updates everything. The reference of losses."""

    def __init__(self, work: Work) -> None:
        self._work = work
        model = work.model().module.to(work.device, torch.bfloat16)
        parameters = list(model.parameters())
        self._masters = Masters(parameters, parameters, work.config.training.lr)
        self._model = DistributedDataParallel(
            model, bucket_cap_mb=work.config.bucket_bytes / MIB, gradient_as_bucket_view=True
        )

    def forward(self, batch: torch.Tensor, last: bool) -> torch.Tensor:
        with nullcontext() if last else self._model.no_sync():
            return self._model(batch)

    def backward(self, loss: torch.Tensor, last: bool) -> None:
        with nullcontext() if last else self._model.no_sync():
            (loss / self._work.micro_batches).backward()

    def step(self, last: bool) -> None:
        if last:
            self._masters.step(self._work.config.training.clipping)

    def settle(self) -> None:
        return

    def held(self) -> Held:
        return self._masters.held()

    def close(self) -> None:
        del self._model, self._masters
