"""From the amsp block and the shape of the cluster to a `Plan`: what the executor is to do.

Pure: imports neither torch nor deepspeed.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

from deepspeed_amsp.plan.factors import (
    COMPONENTS,
    FactorError,
    ShardFactor,
    Sharding,
    divisors,
    legal_factors,
    preset,
)

if TYPE_CHECKING:
    from deepspeed_amsp.config import AmspBlock, FactorsBlock, FactorValue
    from deepspeed_amsp.config_zero import ZeroSettings
    from deepspeed_amsp.plan.layout import BucketLayout

MIB = 1024 * 1024


class ReduceMode(str, Enum):
    """How gradients reach their owner."""

    ALL_REDUCE = "all_reduce"  # over optim x replicate, then drop what is not owned (the paper's)
    TWO_LEVEL = "two_level"  # to the owner over optim, then AllReduce of the owned part over replicate


class PublishMode(str, Enum):
    """How updated parameters travel from their owner."""

    BROADCAST = "broadcast"  # one Broadcast per owner and bucket (the paper's)
    ALL_GATHER = "all_gather"  # one AllGather of an owner-aligned padded bucket

    def gathers(self, bucket: BucketLayout) -> bool:
        """Whether a bucket goes in one AllGather: not if its sections have other lengths, since padding them further
        would cost more than it saves."""
        return self is PublishMode.ALL_GATHER and bucket.uniform


@dataclass(frozen=True)
class Overlap:
    """Which collectives hide under computation. Results are bit-equal whatever the switches say."""

    gather: bool = True
    reduce_scatter: bool = True
    all_reduce: bool = True
    publish: bool = True

    def __str__(self) -> str:
        """The switches that are on, "gather+publish"."""
        on = [field.name for field in fields(self) if getattr(self, field.name)]
        return "+".join(on) or "none"


@dataclass(frozen=True)
class Plan:
    """Sharding factors, reduce and publish modes, overlap switches and buffer sizes of one run.

    bucket_bytes: None follows zero_optimization.reduce_bucket_size (which counts elements).
    prefetch_bytes: gathers are issued ahead of use until this many bytes are in flight, so one unit is
        always ahead, however large; 0 gathers on demand.
    keep_after_forward: "none", "all", or how many bytes of gathered parameters may stay for the backward.
    node_order: nodes in the order in which the rank grid takes them; empty for that of the ranks.
    """

    sharding: Sharding
    reduce: ReduceMode = ReduceMode.TWO_LEVEL
    publish: PublishMode = PublishMode.BROADCAST
    overlap: Overlap = Overlap()
    hierarchical: bool = False
    merge_communicators: bool = False
    bucket_bytes: int | None = None
    prefetch_bytes: int = 64 * MIB
    keep_after_forward: str | int = "none"
    node_order: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Check types and ranges; the sharding has checked itself."""
        if not isinstance(self.reduce, ReduceMode) or not isinstance(self.publish, PublishMode):
            raise TypeError("reduce must be a ReduceMode and publish a PublishMode.")
        if self.bucket_bytes is not None and self.bucket_bytes < 1:
            raise ValueError(f"bucket_bytes must be at least 1, not {self.bucket_bytes}.")
        if self.prefetch_bytes < 0:
            raise ValueError(f"prefetch_bytes must not be negative, not {self.prefetch_bytes}.")
        kept = self.keep_after_forward
        legal = kept in ("none", "all") if isinstance(kept, str) else kept >= 0
        if not legal:
            raise ValueError(f'keep_after_forward must be "none", "all" or a number of bytes, not {kept!r}.')
        if self.node_order and sorted(self.node_order) != list(range(self.sharding.data_parallel.s1)):
            raise ValueError(f"node_order must name each node once, not {list(self.node_order)}.")

    @property
    def nodes(self) -> tuple[int, ...]:
        """All nodes, in the order in which the rank grid takes them."""
        return self.node_order or tuple(range(self.sharding.data_parallel.s1))

    @property
    def kept_bytes(self) -> float:
        """keep_after_forward as a limit in bytes: 0 for "none", infinity for "all"."""
        if isinstance(self.keep_after_forward, str):
            return math.inf if self.keep_after_forward == "all" else 0
        return self.keep_after_forward

    def fingerprint(self) -> dict[str, Any]:
        """The plan as JSON values, for a checkpoint to say which plan wrote it."""
        return {
            "version": 1,
            "world_size": self.sharding.s_dp,
            "data_parallel": self.sharding.data_parallel.as_list(),
            "sharding": self.sharding.as_dict(),
            "reduce": self.reduce.value,
            "publish": self.publish.value,
            "overlap": asdict(self.overlap),
            "hierarchical": self.hierarchical,
            "merge_communicators": self.merge_communicators,
            "bucket_bytes": self.bucket_bytes,
            "prefetch_bytes": self.prefetch_bytes,
            "keep_after_forward": self.keep_after_forward,
            "node_order": list(self.nodes),
        }

    def describe(self) -> str:
        """The plan in one line, for the log."""
        extras = [name for name in ("hierarchical", "merge_communicators") if getattr(self, name)]
        words = [
            str(self.sharding),
            f"stage {self.sharding.stage}",
            f"reduce {self.reduce.value}",
            f"publish {self.publish.value}",
            f"overlap {self.overlap}",
            *extras,
        ]
        if list(self.nodes) != sorted(self.nodes):
            words.append(f"nodes in order {'-'.join(map(str, self.nodes))}")
        return ", ".join(words)


def data_parallel(world_size: int, gpus_per_node: int) -> ShardFactor:
    """(R, N) of a world. Raises FactorError unless gpus_per_node divides world_size."""
    for name, value in (("world size W", world_size), ("gpus_per_node", gpus_per_node)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise FactorError(f"{name} must be a positive integer, not {value!r}.", component="data_parallel")
    if world_size % gpus_per_node != 0:
        raise FactorError(
            f"gpus_per_node = {gpus_per_node} does not divide the world size W = {world_size}: every node "
            f"needs the same number of GPUs. Legal values of gpus_per_node: {divisors(world_size)}.",
            component="data_parallel",
        )
    return ShardFactor(gpus_per_node, world_size // gpus_per_node)


def resolve_sharding(block: AmspBlock, world_size: int, gpus_per_node: int) -> Sharding:
    """The factors that the block names on world_size GPUs, gpus_per_node to a node.

    Raises FactorError when they are not legal there, or are left to the planner ("search", see `autoplan`).
    """
    dp = data_parallel(world_size, gpus_per_node)
    if block.sharding == "search":
        raise FactorError('"sharding": "search" names no factors: the planner finds them when an engine starts.')
    if isinstance(block.sharding, str):
        return preset(block.sharding, dp)
    return _from_factors(block.sharding, dp)


def with_zero_settings(plan: Plan, zero: ZeroSettings, itemsize: int = 2) -> Plan:
    """The plan with what "zero_optimization" says where the amsp block is silent; sizes there are elements."""
    kept = zero.kept_bytes(itemsize)
    overlap = replace(plan.overlap, **dict.fromkeys(zero.overlap_off, False))
    return replace(
        plan,
        reduce=ReduceMode(zero.reduce) if zero.reduce is not None else plan.reduce,
        overlap=overlap,
        prefetch_bytes=zero.prefetch_bytes(plan.prefetch_bytes, itemsize),
        keep_after_forward=plan.keep_after_forward if kept is None else kept,
    )


def make_plan(block: AmspBlock, world_size: int, gpus_per_node: int, sharding: Sharding | None = None) -> Plan:
    """The whole plan that the block asks for, with ``sharding`` if the planner has found it.

    Raises as `resolve_sharding` does.
    """
    return Plan(
        sharding=sharding or resolve_sharding(block, world_size, gpus_per_node),
        reduce=ReduceMode(block.reduce),
        publish=PublishMode(block.publish),
        overlap=Overlap(**block.overlap.model_dump()),
        hierarchical=block.hierarchical,
        merge_communicators=block.merge_communicators,
        bucket_bytes=block.bucket_bytes,
        prefetch_bytes=block.prefetch_bytes,
        keep_after_forward=block.keep_after_forward,
    )


def _from_factors(factors: FactorsBlock, dp: ShardFactor) -> Sharding:
    filled = factors.filled()
    return Sharding(**{name: _factor(name, filled[name], dp) for name in COMPONENTS}, data_parallel=dp)


def _factor(component: str, value: FactorValue, dp: ShardFactor) -> ShardFactor:
    """A pair as it is; an integer fills a node first and must be the size of a legal factor."""
    if not isinstance(value, int):
        return ShardFactor(*value)
    legal = [factor.size for factor in legal_factors(dp)]
    if value not in legal:
        listed = ", ".join(map(str, legal))
        raise FactorError(
            f"{component} = {value} GPUs is not possible with world size W = {dp.size}, "
            f"gpus_per_node = {dp.s0}, nodes = {dp.s1}: a factor divides gpus_per_node, or takes whole "
            f"nodes whose number divides nodes (Eq. 5-7). Legal values of {component}: {listed}.",
            rule="divisibility",
            component=component,
        )
    return ShardFactor.fill(value, dp.s0)
