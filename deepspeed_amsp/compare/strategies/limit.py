"""The same work without communication: what no strategy can beat by overlapping."""

from __future__ import annotations

import os

import torch

from deepspeed_amsp.compare.strategies.base import Held, Masters, Work


class Limit:
    """Gradients stay local, and this rank updates what an owner within a node would: 1/R of the parameters.

    Weights of other owners stay as they were, so its losses mean nothing.
    """

    def __init__(self, work: Work) -> None:
        self._work = work
        self._model = work.model().module.to(work.device, torch.bfloat16)
        parameters = list(self._model.parameters())
        by_size = sorted(range(len(parameters)), key=lambda index: -parameters[index].numel())
        ranks = work.config.cluster.ranks_per_node
        owned = [parameters[index] for index in by_size[int(os.environ["LOCAL_RANK"]) % ranks :: ranks]]
        self._masters = Masters(owned, parameters, work.config.training.lr)

    def forward(self, batch: torch.Tensor, last: bool) -> torch.Tensor:
        return self._model(batch)

    def backward(self, loss: torch.Tensor, last: bool) -> None:
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
