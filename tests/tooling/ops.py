"""Collectives and messages in one form for the tests of the adversarial group: what goes in, what must come out."""

from __future__ import annotations

from typing import Any

WORLD = 4
COLLECTIVES = (
    "all_reduce",
    "broadcast",
    "reduce",
    "all_gather_single",
    "reduce_scatter_single",
    "all_to_all_single",
    "all_gather",
)
ALL_OPS = (*COLLECTIVES, "message")


def new_group(**settings: Any) -> Any:
    """An adversarial group of all ranks."""
    import torch.distributed as dist

    from tests.support import adversarial

    adversarial.configure(**settings)
    return dist.new_group(list(range(dist.get_world_size())), backend="adversarial")


def issue(op: str, group: Any, dtype: Any = None) -> tuple[Any, list[Any], list[Any], list[Any]]:
    """Issues ``op``; returns (ticket, inputs, outputs, what the outputs must become on this rank).

    Buffers that are input and output at once are in both lists.
    """
    import torch
    import torch.distributed as dist

    rank, size = group.rank(), group.size()
    dtype = dtype or torch.float32
    mine = (torch.arange(size * 2) + 10 * rank).to(dtype)
    everyone = [(torch.arange(size * 2) + 10 * other).to(dtype) for other in range(size)]
    total = torch.stack(everyone).sum(0).to(dtype)
    if op == "all_reduce":
        return dist.all_reduce(mine, group=group, async_op=True), [mine], [mine], [total]
    if op == "broadcast":
        source = size - 1
        ticket = dist.broadcast(mine, group_src=source, group=group, async_op=True)
        return (ticket, [mine], [], []) if rank == source else (ticket, [], [mine], [everyone[source]])
    if op == "message":
        if rank % 2 == 0:
            return dist.isend(mine, group_dst=rank + 1, group=group), [mine], [], []
        return dist.irecv(mine, group_src=rank - 1, group=group), [], [mine], [everyone[rank - 1]]
    if op == "reduce":
        ticket = dist.reduce(mine, group_dst=0, group=group, async_op=True)
        return ticket, [mine], [mine], [total if rank == 0 else poison_like(mine)]
    if op == "all_gather":
        outputs = [torch.zeros_like(mine) for _ in range(size)]
        return dist.all_gather(outputs, mine, group=group, async_op=True), [mine], outputs, everyone
    if op == "all_gather_single":
        output = torch.zeros(size * size * 2, dtype=dtype)
        gather = getattr(dist, op, None) or dist.all_gather_into_tensor
        return gather(output, mine, group=group, async_op=True), [mine], [output], [torch.cat(everyone)]
    output = torch.zeros(2 if op == "reduce_scatter_single" else size * 2, dtype=dtype)
    part = slice(2 * rank, 2 * rank + 2)
    if op == "reduce_scatter_single":
        scatter = getattr(dist, op, None) or dist.reduce_scatter_tensor
        return scatter(output, mine, group=group, async_op=True), [mine], [output], [total[part]]
    ticket = dist.all_to_all_single(output, mine, group=group, async_op=True)
    return ticket, [mine], [output], [torch.cat([other[part] for other in everyone])]


def poison_like(tensor: Any) -> Any:
    """What a poisoned ``tensor`` holds."""
    import torch

    if tensor.dtype.is_floating_point:
        return torch.full_like(tensor, float("nan"))
    return torch.full_like(tensor, torch.iinfo(tensor.dtype).max)


def is_poisoned(tensor: Any) -> bool:
    """True if every element is poison."""
    import torch

    return torch.equal(tensor.nan_to_num(1e9), poison_like(tensor).nan_to_num(1e9))


def same(left: Any, right: Any) -> bool:
    """Equal, and NaN equals NaN."""
    import torch

    return torch.allclose(left, right, rtol=0, atol=0, equal_nan=True)
