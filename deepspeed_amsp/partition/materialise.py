"""Giving modules whole parameters with values, one module at a time: what was built on the meta device has no values,
and what was built under deepspeed.zero.Init has been cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from deepspeed_amsp.partition.stream import SOURCE, Weights

_SET_BY_ZERO_INIT = (
    "aligned_size", "all_gather", "all_gather_coalesced", "convert_to_zero_parameters", "is_external_param", "item",
    "nvme_swapper", "padding_size", "partition", "partition_gradients", "partition_numel", "reduce_gradients_at_owner",
)  # fmt: skip
"""Attributes of a cut parameter besides those that begin with ds_ (DeepSpeed 0.19.5 to 0.19.8)."""


def whole_shape(param: torch.Tensor) -> torch.Size:
    """The shape of a parameter, also of one that is cut."""
    shape: torch.Size = getattr(param, "ds_shape", param.shape)
    return shape


def is_cut(param: Any) -> bool:
    """Whether deepspeed.zero.Init has cut the parameter, and nobody has taken it over since."""
    return hasattr(param, "ds_id") and hasattr(param, "nvme_swapper")


def uncut(module: nn.Module) -> None:
    """Gather those of the module's own parameters that deepspeed.zero.Init has cut, and forget that it did. Collective.

    The Parameter objects stay the same. The cut parts are released, so that a model is never whole on any rank when
    its modules are taken one by one. Ranks of different groups of zero.Init may get different values: whoever calls
    this makes them equal.
    """
    cut = [param for param in module._parameters.values() if param is not None and is_cut(param)]
    if not cut:
        return
    gather: Any = vars(cut[0])["all_gather"]
    gather(param_list=cut)
    for param in cut:
        for name in [name for name in vars(param) if name.startswith("ds_") or name in _SET_BY_ZERO_INIT]:
            delattr(param, name)


class Materialiser:
    """Makes modules of ``model`` whole (`uncut`), and allocates and fills their tensors on the meta device.

    The Parameter objects stay the same, so ties and optimizers made over them stay valid. Values come from the files
    that `stream.Init` was given, or are random as after construction; the engine then makes all ranks' equal to rank
    0's.

    Args:
        reads: whether this rank reads files; the others leave what is in them undefined.
    """

    def __init__(self, model: nn.Module, device: torch.device, reads: bool) -> None:
        self._device = device
        self._reads = reads
        self._names: dict[nn.Parameter, list[str]] = {}
        for name, param in model.named_parameters(remove_duplicate=False):
            self._names.setdefault(param, []).append(name)

    def __call__(self, module: nn.Module, name: str) -> None:
        """Give the module's own tensors values.

        Raises:
            TypeError: there are meta tensors whose values nobody has: no file, and no ``reset_parameters``.
            WeightsError: a file has a parameter in another shape.
        """
        uncut(module)
        params = [param for param in module._parameters.values() if param is not None and param.is_meta]
        buffers = {key: buffer for key, buffer in module._buffers.items() if buffer is not None and buffer.is_meta}
        if not params and not buffers:
            return
        source: Weights | None = vars(module).get(SOURCE)
        found = [None if source is None else source.find(self._names[param], param.shape) for param in params]
        reset = self._reset(module, name) if buffers or None in found else None
        dtypes = [param.dtype for param in params]
        for param in params:
            wide = param.dtype if reset is None else _wide(param.dtype)
            real = nn.Parameter(torch.empty_like(param, device=self._device, dtype=wide), param.requires_grad)
            # swap_tensors() refuses a tensor that anybody watches weakly, as torch itself does with meta tensors.
            torch._C._swap_tensor_impl(param, real)
        for key, buffer in buffers.items():
            module._buffers[key] = torch.empty_like(buffer, device=self._device)
        with torch.no_grad():
            if reset is not None:
                reset()
            for param, dtype, stored in zip(params, dtypes, found, strict=True):
                if stored is not None and source is not None and self._reads:
                    param.copy_(source.read(stored))
                param.data = param.data.to(dtype)

    @staticmethod
    def _reset(module: nn.Module, name: str) -> Callable[[], None]:
        reset: Callable[[], None] | None = getattr(module, "reset_parameters", None)
        if reset is None:
            raise TypeError(
                f"module {name or type(module).__name__} ({type(module).__name__}) was built on the meta device and "
                f"has no reset_parameters(), so its values cannot be made; add that method, build it with real values, "
                f"or give deepspeed_amsp.Init files that hold all of its parameters"
            )
        return reset


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Initialisers draw in fp32: in 16 bits they would draw from a coarser distribution."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
