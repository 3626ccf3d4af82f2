"""An emulated accelerator: modules that take the time of one, in which the CPU is free.

With real matrix products on a few shared cores the noise of the processor hides every effect of communication.
Sleeping in forward and backward gives steps the shape that they have on an accelerator: the host waits, links work.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn


class _Sleep(torch.autograd.Function):
    """The identity; its forward sleeps, and its backward, which comes before the module's own."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, forward_s: float, backward_s: float) -> torch.Tensor:
        ctx.seconds = backward_s
        time.sleep(forward_s)
        # Recomputation stops early, at the last tensor that is saved: without this one, before the sleep.
        ctx.save_for_backward(value.new_empty(0))
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        _ = ctx.saved_tensors  # recomputation, which sleeps like any forward, comes before the backward pass
        time.sleep(ctx.seconds)
        return gradients[0], None, None


def emulate_compute(modules: Iterable[nn.Module], forward_ms: float, backward_ms: float | None = None) -> None:
    """Make each module's forward take ``forward_ms`` milliseconds more, its backward ``backward_ms`` (None: twice).

    Works under any strategy, before or after it has wrapped the model: the module's class is replaced by a
    subclass, as fully_shard does, so parameters, names, hooks and copies stay what they were. The output must
    be a tensor, or a tuple or list that starts with one.

    Raises:
        ValueError: a negative time, or a module that already emulates.
    """
    backward_ms = 2 * forward_ms if backward_ms is None else backward_ms
    if not (forward_ms >= 0 and backward_ms >= 0):
        raise ValueError(f"times must be 0 ms or more, not {forward_ms!r} and {backward_ms!r}")
    for module in modules:
        base = type(module)
        if hasattr(module, "_emulated_s"):
            raise ValueError(f"{base.__name__} already emulates compute; its times would add up")
        module.__class__ = type(f"Emulated{base.__name__}", (_Emulated, base), {"__module__": base.__module__})
        vars(module)["_emulated_s"] = (forward_ms / 1e3, backward_ms / 1e3)


class _Emulated(nn.Module):
    """Mixed in before a module's class."""

    _emulated_s: tuple[float, float]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)  # type: ignore[misc]
        if isinstance(output, torch.Tensor):
            return _Sleep.apply(output, *self._emulated_s)  # type: ignore[no-untyped-call]
        first, *others = output
        return type(output)([_Sleep.apply(first, *self._emulated_s), *others])  # type: ignore[no-untyped-call]
