"""What a run is, in a few lines: for the log when an engine starts, and for ``amsp report``. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from deepspeed_amsp.plan.factors import Sharding

MB = 1e6


def group_lines(sharding: Sharding, order: tuple[int, ...]) -> Iterator[str]:
    """The groups through the first rank of the grid and how many of their kind there are, a line an axis.

    Args:
        order: the rank at each position of the grid (`topology.Topology.ranks_along`).
    """
    p, os, dp = sharding.s_p, sharding.s_os, sharding.s_dp
    for what, width, stride, end in (
        ("share the parameters", p, 1, p),
        ("own different optimizer states", os // p, p, os),
        ("are copies, which only gradients cross", dp // os, os, dp),
    ):
        if width > 1:
            ranks = [order[position] for position in range(0, end, stride)]
            count = dp // width
            groups, more = ("group", "") if count == 1 else ("groups", ", ...")
            yield f"{count} {groups} of {width} ranks that {what}: {shortened(ranks)}{more}"


def shortened(ranks: list[int]) -> str:
    """At most eight ranks, the middle left out."""
    shown = ranks if len(ranks) <= 8 else [*ranks[:4], "...", *ranks[-2:]]
    return " ".join(map(str, shown))


def memory_line(rank: int, held: Mapping[str, int]) -> str:
    """Bytes by kind, with their sum."""
    parts = ", ".join(f"{kind} {size / MB:,.1f}" for kind, size in held.items())
    return f"MB at rest on rank {rank}: {parts}; together {sum(held.values()) / MB:,.1f}"
