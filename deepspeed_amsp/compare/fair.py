"""What is changed about gloo and DeepSpeed so that every scheme gets the same communication. Called before DeepSpeed
is imported, in every rank, whatever it trains."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from deepspeed_amsp.comm import exchange, sum_in_order


class _Summing:
    """A reduce-scatter on its way; `wait` sums what has arrived."""

    def __init__(self, works: Sequence[Any], finish: Callable[[], None]) -> None:
        self._works: Sequence[Any] = works
        self._finish: Callable[[], None] | None = finish

    def wait(self, timeout: Any = None) -> bool:
        # Once: gloo forgets a message that was waited for, and would wait for another one.
        works, self._works = self._works, ()
        for work in works:
            work.wait()
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()
        return True


def reduce_scatter(
    output: torch.Tensor,
    input: torch.Tensor,
    op: Any = dist.ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
) -> _Summing | None:
    """Every rank's part of the sum (or average) over the group; the sum is formed in fp32 and in rank order.

    output: [n]; input: [n * ranks], any shape that is contiguous. As torch's function of this name otherwise.
    """
    group = group or dist.group.WORLD
    sections = input.detach().reshape(group.size(), output.numel()).unbind()
    works, parts = exchange(sections, group.rank(), group)

    def total() -> None:
        flat = output.view(-1)
        if op != dist.ReduceOp.AVG:
            sum_in_order(parts, flat)
            return
        summed = torch.empty_like(flat, dtype=torch.promote_types(flat.dtype, torch.float32))
        sum_in_order(parts, summed)
        flat.copy_(summed / group.size())

    pending = _Summing(works, total)
    if async_op:
        return pending
    pending.wait()
    return None


def fair_reduce_scatter() -> None:
    """Put `reduce_scatter` in place of torch's for the whole process."""
    for name in ("reduce_scatter_single", "reduce_scatter_tensor", "_reduce_scatter_base"):
        for module in (dist, dist.distributed_c10d):
            if hasattr(module, name):
                setattr(module, name, reduce_scatter)


def without_shared_memory_build() -> None:
    """DeepSpeed's shared-memory collectives take a minute to build, cannot cross nodes, and a killed build hangs all
    later ones: say that they cannot be had."""
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__ = {"deepspeed_shm_comm": False}


def without_coalescing() -> None:
    """DeepSpeed's coalesced all-gather (MiCS uses it) as single ones; a coalescing manager that fails on gloo poisons
    its group, and later collectives are silently not run."""
    from deepspeed.comm.torch import TorchBackend

    class Gathers:
        def __init__(self, works: list[Any]) -> None:
            self._works: Sequence[Any] = works

        def wait(self) -> None:
            for work in self._works:
                work.wait()

    def one_by_one(
        self: Any, output_tensors: list[torch.Tensor], input_tensors: list[torch.Tensor], group: Any = None,
        async_op: bool = False,
    ) -> Gathers | None:  # fmt: skip
        pairs = zip(output_tensors, input_tensors, strict=True)
        works = [self.all_gather_function(out, mine, group=group, async_op=True) for out, mine in pairs]
        pending = Gathers(works)
        if async_op:
            return pending
        pending.wait()
        return None

    TorchBackend.all_gather_coalesced = one_by_one
