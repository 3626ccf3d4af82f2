"""The analytic model of collectives: rings over two levels of links, each with a bandwidth and a latency."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

from deepspeed_amsp.plan.curves import Curve, Op, ProfileError
from deepspeed_amsp.plan.factors import ShardFactor


@dataclass(frozen=True)
class Links:
    """What an alpha-beta model of ring collectives needs to know of a cluster.

    intra: bytes/s that one GPU sends to the others of its node, in one direction.
    inter: bytes/s that all NICs of a node send together, in one direction.
    intra_latency, inter_latency: seconds for a hop inside a node, and from node to node.
    """

    intra: float
    inter: float
    intra_latency: float
    inter_latency: float

    def __post_init__(self) -> None:
        """Raises ProfileError, naming the field."""
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
                raise ProfileError(f"links: {field.name} must be a number above 0, not {value!r}.")

    def scaled(self, inter: float, intra: float) -> Links:
        """Other bandwidths, the same latencies."""
        return replace(self, inter=self.inter * inter, intra=self.intra * intra)

    def curve(self, op: Op, mesh: ShardFactor, gpus_per_node: int) -> Curve:
        """Latency and seconds a byte of a group of p = s0 * s1 GPUs, while all its siblings do the same.

        The ring of p GPUs goes node by node. A piece of data takes p - 1 hops, s1 - 1 of them from node to node:

            L = (s1 - 1) inter_latency + s1 (s0 - 1) intra_latency

        The slowest link of the ring carries ``w`` bytes/s. On each node gpus_per_node / s0 sibling groups share the
        NICs, so that a group has s0 / gpus_per_node of them:

            w = intra                                          inside a node
            w = min(intra, inter * s0 / gpus_per_node)         across nodes

            AllGather, ReduceScatter    L + (p - 1) / p * bytes / w
            AllReduce                   2 (L + (p - 1) / p * bytes / w)
            Broadcast                   L / p + bytes / w

        A Broadcast is one of p, one from every rank, that are issued together as publishing does: they follow each
        other through the ring, so that all p of them together wait for the latency of the whole ring once.
        """
        size = mesh.size
        latency = (mesh.s1 - 1) * self.inter_latency + mesh.s1 * (mesh.s0 - 1) * self.intra_latency
        width = self.intra if mesh.s1 == 1 else min(self.intra, self.inter * mesh.s0 / gpus_per_node)
        if op is Op.BROADCAST:
            return Curve((0.0,), (latency / size,), 1 / width)
        passes = 2 if op is Op.ALL_REDUCE else 1
        return Curve((0.0,), (passes * latency,), passes * (size - 1) / size / width)
