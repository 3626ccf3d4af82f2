"""Sees every operation of a step: uses of buffers in flight, new storages, reads on the host."""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from deepspeed_amsp.partition.grads import BucketGradients
from tests.scale.support.memory import Category, Memory
from tests.scale.support.recording import in_flight

_READ = torch.ops.aten._local_scalar_dense.default
_DEVICE = torch.ops.prim.device.default


class Watch(TorchDispatchMode):
    """Enter it inside the fake mode, and `installed` around everything.

    A fake tensor has no value to read; who asks for one gets 1.0 or 0, and who asks for a list gets zeros, which is
    what ranks that agree read in their hashes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.memory = Memory(in_flight.gone)
        self.operations = 0
        self.host_reads: Counter[str] = Counter()
        """By the function that asked."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # more than half of all calls, from autograd's C++
        kwargs = kwargs or {}
        self.operations += 1
        in_flight.check()
        if in_flight:
            _check_race(func, args, kwargs)
        if func is _READ and isinstance(args[0], FakeTensor):
            self.host_reads[_reader()] += 1
            return 1.0 if args[0].dtype.is_floating_point else 0
        result = func(*args, **kwargs)
        self.memory.see(result)
        return result

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Hear of what no operation tells: resized storages, and buffers that become or cease to be gradients."""
        memory, resize, assign = self.memory, torch.UntypedStorage.resize_, BucketGradients.__setattr__

        def resize_(storage: torch.UntypedStorage, size: int) -> None:
            resize(storage, size)
            memory.resized(storage)
            in_flight.check()

        def setattr_(bucket: BucketGradients, name: str, value: Any) -> None:
            if name in ("staged", "kept", "owned"):
                before = vars(bucket).get(name)
                if before is not None and before is not value:
                    memory.move(before, Category.REDUCE)
                if value is not None:
                    memory.move(value, Category.GRADIENTS)
            assign(bucket, name, value)

        def tolist(tensor: torch.Tensor) -> list[float]:
            # One read, where a fake tensor's own would read element by element.
            self.host_reads[_reader()] += 1
            return [0] * tensor.numel()

        with (
            mock.patch.object(FakeTensor, "tolist", tolist),
            mock.patch.object(torch.UntypedStorage, "resize_", resize_),
            mock.patch.object(BucketGradients, "__setattr__", setattr_),
        ):
            yield


def _check_race(func: Any, args: Any, kwargs: dict[str, Any]) -> None:
    harmless, written = _access(func)
    if harmless:
        return
    for name, value in (*enumerate(args), *kwargs.items()):
        for tensor in _tensors(value):
            in_flight.touch(tensor, write=name in written, what=str(func))


@functools.cache
def _access(func: Any) -> tuple[bool, frozenset[int | str]]:
    """Whether an operation looks at no value, and which of its arguments, by place and by name, it writes."""
    written: set[int | str] = set()
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written |= {place, argument.name}
    # prim asks a tensor for its device, layout and so on.
    return bool(func.is_view) or func.namespace == "prim", frozenset(written)


def _tensors(value: Any) -> Iterable[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return (value,)
    if isinstance(value, (list, tuple)):
        return [tensor for inner in value for tensor in _tensors(inner)]
    return ()


def _reader() -> str:
    """The innermost function that is not torch's own machinery of reading a value."""
    frame = sys._getframe(2)
    while frame.f_back is not None:
        path = frame.f_code.co_filename
        if "/torch/" not in path and path != __file__:
            break
        frame = frame.f_back
    return frame.f_code.co_name
