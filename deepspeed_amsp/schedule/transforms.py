"""Parameters are written outside of torch.func's transforms, whoever is inside of one when they are needed."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack


def in_transform() -> bool:
    """Whether a torch.func transform (grad, vmap, jvp, ...) is running."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def outside_transforms() -> AbstractContextManager[object]:
    """Inside, tensors are what they are: a transform would refuse writes to what it did not make."""
    return temporarily_clear_interpreter_stack() if in_transform() else nullcontext()
