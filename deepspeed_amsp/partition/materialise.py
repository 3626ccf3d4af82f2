"""Giving values to modules that were built on the meta device, one module at a time."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn


def materialise(module: nn.Module, name: str, device: torch.device) -> None:
    """Allocate and initialise the module's own tensors if they are on the meta device.

    The Parameter objects stay the same, so ties and optimizers made over them stay valid. The values are
    random as after construction; the engine then makes all ranks' equal to rank 0's.

    Raises:
        TypeError: the module has meta tensors and no ``reset_parameters`` that could give them values.
    """
    meta_params = [param for param in module._parameters.values() if param is not None and param.is_meta]
    meta_buffers = {key: buffer for key, buffer in module._buffers.items() if buffer is not None and buffer.is_meta}
    if not meta_params and not meta_buffers:
        return
    reset: Callable[[], None] | None = getattr(module, "reset_parameters", None)
    if reset is None:
        raise TypeError(
            f"module {name or type(module).__name__} ({type(module).__name__}) was built on the meta device and has "
            f"no reset_parameters(), so its values cannot be made; add that method or build it with real values"
        )
    dtypes = [param.dtype for param in meta_params]
    for param in meta_params:
        real = nn.Parameter(torch.empty_like(param, device=device, dtype=_wide(param.dtype)), param.requires_grad)
        # swap_tensors() refuses a tensor that anybody watches weakly, as torch itself does with meta tensors.
        torch._C._swap_tensor_impl(param, real)
    for key, buffer in meta_buffers.items():
        module._buffers[key] = torch.empty_like(buffer, device=device)
    with torch.no_grad():
        reset()
    for param, dtype in zip(meta_params, dtypes, strict=True):
        param.data = param.data.to(dtype)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Initialisers draw in fp32: in 16 bits they would draw from a coarser distribution."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
