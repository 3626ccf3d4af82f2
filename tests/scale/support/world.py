"""One rank of a large world in this process: the groups stand, nobody else is there.

What stands in the way of running an engine on fake tensors is dealt with here, so that the package need not know.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from tests.scale.support import recording


@contextmanager
def one_rank(rank: int, world: int, gpus_per_node: int) -> Iterator[None]:
    """This process is ``rank`` of ``world``; groups of the package record, those of DeepSpeed do nothing."""
    import deepspeed
    import deepspeed.comm
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from deepspeed_amsp import comm, engine, mesh
    from deepspeed_amsp.schedule import agreement, chain

    environment = {
        "RANK": rank,
        "LOCAL_RANK": rank % gpus_per_node,
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": gpus_per_node,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": 1,
    }
    hosts = [f"node{number // gpus_per_node}" for number in range(world)]
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, {key: str(value) for key, value in environment.items()}))
        # To ask DeepSpeed which of its ops could be built runs compilers; nothing here would call one.
        stack.enter_context(mock.patch.dict(vars(deepspeed.ops), {"__compatible_ops__": {}}))
        # Objects cannot be gathered from ranks that are not there.
        stack.enter_context(mock.patch.object(engine, "host_names", return_value=hosts))
        stack.enter_context(mock.patch.object(engine, "from_every_rank", lambda value: [value] * world))
        stack.enter_context(mock.patch.object(mesh, "GROUP_BACKEND", recording.NAME))
        stack.enter_context(mock.patch.object(comm, "HOST_DEVICES", frozenset()))
        stack.enter_context(mock.patch.object(agreement, "LateRead", _LateRead))
        stack.enter_context(mock.patch.object(chain, "get_accelerator", return_value=_Streams()))
        stack.enter_context(mock.patch.object(nn.Module, "_apply", _apply))
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
        try:
            deepspeed.comm.init_distributed("fake", verbose=False)
            yield
        finally:
            dist.destroy_process_group()


class _Streams:
    """What the package asks of an accelerator that has streams: here all work is in one."""

    def Stream(self) -> _Streams:
        return self

    def wait_stream(self, stream: object) -> None:
        """Nothing is beside the stream of this process."""

    def current_stream(self) -> None:
        return None

    def stream(self, stream: object) -> AbstractContextManager[None]:
        return nullcontext()


class _LateRead:
    """A copy to the host that runs beside the program: ranks that agree find zeros."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._copy = tensor.clone()

    def values(self) -> list[float]:
        return [0.0] * self._copy.numel()


def _apply(module: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
    """What `Module.to` and `Module.bfloat16` do. torch swaps fake parameters instead of setting their data, and
    refuses that when somebody watches them weakly."""
    for child in module.children() if recurse else ():
        child._apply(fn)
    for param in module.parameters(recurse=False):
        param.data = fn(param.data)
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = fn(buffer)
    return module
