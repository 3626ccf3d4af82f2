"""What every strategy is given, and what the measurement asks of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from deepspeed_amsp.compare.catalog import Strategy
from deepspeed_amsp.compare.config import CompareConfig
from deepspeed_amsp.compare.models import Built, build


@dataclass(frozen=True)
class Work:
    """The same for everybody but for ``strategy``. emulated_ms: of a block in forward and backward, None on GPUs."""

    strategy: Strategy
    config: CompareConfig
    micro_batches: int
    device: torch.device
    emulated_ms: tuple[float, float] | None

    def model(self) -> Built:
        """The model in fp32 on the CPU, with the same weights on every rank and for every strategy."""
        return build(self.config.model, self.config.training.seed, self.emulated_ms)


@dataclass(frozen=True)
class Held:
    """Bytes of one rank before an update; optimizer states with the fp32 masters."""

    parameters: int
    gradients: int
    optimizer_states: int


class Trainer(Protocol):
    """A strategy at work on one rank."""

    def forward(self, batch: torch.Tensor, last: bool) -> torch.Tensor:
        """The loss of a micro-batch; ``last`` of its step."""

    def backward(self, loss: torch.Tensor, last: bool) -> None:
        """Gradients of the loss over M, accumulated; reduced as the strategy does."""

    def step(self, last: bool) -> None:
        """After every backward; clips and updates after the last of a step."""

    def settle(self) -> None:
        """Wait for what is still on its way."""

    def held(self) -> Held:
        """Asked for between the last backward and the update."""

    def close(self) -> None:
        """Free everything; no collective may be in flight."""


def adamw(parameters: Iterable[torch.Tensor], lr: float) -> torch.optim.AdamW:
    """The optimizer of all strategies."""
    return torch.optim.AdamW(parameters, lr=lr, fused=True)


def storage_bytes(tensors: Iterable[Any]) -> int:
    """Bytes of the distinct storages behind tensors; None and what is no tensor counts nothing."""
    sizes = {}
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor):
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            storage = local.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def state_tensors(optimizer: torch.optim.Optimizer) -> list[Any]:
    """The masters of an optimizer and its states."""
    masters = [param for group in optimizer.param_groups for param in group["params"]]
    return [*masters, *(value for state in optimizer.state.values() for value in state.values())]


class Masters:
    """fp32 copies of bf16 parameters that AdamW updates, as ZeRO-1 keeps them.

    Args:
        owned: parameters that this rank updates.
    """

    def __init__(self, owned: list[nn.Parameter], everything: list[nn.Parameter], lr: float) -> None:
        self._owned, self._all = owned, everything
        self._masters = [param.detach().float() for param in owned]
        self.optimizer = adamw(self._masters, lr)

    @torch.no_grad()
    def step(self, clipping: float) -> None:
        """Clip the gradients by their global norm, update the owned parameters, drop the gradients."""
        torch.nn.utils.clip_grad_norm_(self._all, clipping)
        for master, param in zip(self._masters, self._owned, strict=True):
            assert param.grad is not None
            master.grad = param.grad.float()
        self.optimizer.step()
        for master, param in zip(self._masters, self._owned, strict=True):
            param.copy_(master)
            master.grad = None
        for param in self._all:
            param.grad = None

    def held(self) -> Held:
        gradients = storage_bytes(param.grad for param in self._all)
        return Held(storage_bytes(self._all), gradients, storage_bytes(state_tensors(self.optimizer)))


class OnMasters:
    """Training of a bf16 ``model`` whose updates are made by ``masters``; the part of a `Trainer` that is the same."""

    def __init__(self, work: Work, model: nn.Module, masters: Masters) -> None:
        self._work, self._model, self._masters = work, model, masters

    def forward(self, batch: torch.Tensor, last: bool) -> torch.Tensor:
        loss: torch.Tensor = self._model(batch)
        return loss

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
