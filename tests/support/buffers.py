"""The memory under tensors, for the adversarial process group."""

from __future__ import annotations

import torch


def private_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A private copy; ValueError for a tensor that the real backends refuse, or that has no memory."""
    if not tensor.is_contiguous():
        raise ValueError(f"collectives need contiguous tensors, got strides {tensor.stride()}")
    needed = (tensor.storage_offset() + tensor.numel()) * tensor.element_size()
    if tensor.numel() and tensor.untyped_storage().nbytes() < needed:
        raise ValueError(f"the storage of this {tuple(tensor.shape)} tensor is freed: nothing to communicate")
    return tensor.detach().clone()


def poison(tensor: torch.Tensor) -> None:
    """Fills with NaN, or the largest value of an integer type."""
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        value: float = float("nan")
    else:
        value = 1 if tensor.dtype == torch.bool else torch.iinfo(tensor.dtype).max
    tensor.data.fill_(value)  # .data: like a real collective, leave autograd's version counter alone


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """A flat uint8 view of a contiguous tensor."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def storage_of(tensor: torch.Tensor) -> tuple[int, int]:
    """(address, bytes) of the memory under ``tensor``."""
    return tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes()


def overlap(left: torch.Tensor, right: torch.Tensor) -> bool:
    """True if two contiguous tensors share a byte."""
    spans = [(t.data_ptr(), t.data_ptr() + t.numel() * t.element_size()) for t in (left, right)]
    return max(start for start, _ in spans) < min(end for _, end in spans)
