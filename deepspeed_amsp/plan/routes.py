"""Which messages a plan sends: for one unit, for one bucket, stage by stage.

The one description of traffic that costs and timelines are computed from; the tests compare it with the log of the
real engine. A mesh here is the shape of one group, (GPUs in a node, nodes); all its sibling groups are active at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from deepspeed_amsp.plan.factors import ShardFactor, Sharding
from deepspeed_amsp.plan.owners import geometry
from deepspeed_amsp.plan.profile import Op
from deepspeed_amsp.plan.resolve import Plan, PublishMode, ReduceMode
from deepspeed_amsp.plan.specs import ModelSpec, TrainSpec


class Message(NamedTuple):
    """``copies`` collectives of ``size`` bytes each over a group of shape ``mesh``.

    size counts as the engine's log does: what is gathered, what is reduced, what is broadcast, in whole.
    """

    op: Op
    size: float
    mesh: ShardFactor
    copies: int = 1


Stages = list[Message]
"""One behind the other: a stage starts when the one before it is done."""


def over(large: ShardFactor, small: ShardFactor) -> ShardFactor:
    """Shape of a group that has one rank of every ``small`` in a ``large``."""
    return ShardFactor(large.s0 // small.s0, large.s1 // small.s1)


def _parts(mesh: ShardFactor) -> tuple[ShardFactor, ShardFactor]:
    """The part in a node and the part across nodes."""
    return ShardFactor(mesh.s0, 1), ShardFactor(1, mesh.s1)


@dataclass(frozen=True)
class Routes:
    """Messages of one plan; sizes in bytes of the unit or bucket they are asked for."""

    plan: Plan

    @property
    def _sharding(self) -> Sharding:
        return self.plan.sharding

    def gather(self, size: float) -> Stages:
        """A unit's parameters over ``param``."""
        return _sent([Message(Op.ALL_GATHER, size, self._sharding.parameters)])

    def param_reduce(self, size: float) -> Stages:
        """A unit's gradient over ``param``, in every micro-batch."""
        return _sent([Message(Op.REDUCE_SCATTER, size, self._sharding.parameters)])

    def partial(self, size: float) -> Stages:
        """A bucket's gradient in a micro-batch that is not the last: only if s_g > s_p."""
        s = self._sharding
        inner = over(s.gradients, s.parameters)
        if self.plan.reduce is ReduceMode.ALL_REDUCE:
            return self._all_reduce(size, inner)
        return self._scatter(size, inner)

    def final(self, size: float) -> Stages:
        """A bucket's gradient in the last micro-batch, to its owner and summed over all replicas."""
        s = self._sharding
        if self.plan.reduce is ReduceMode.ALL_REDUCE:
            return self._all_reduce(size, over(s.data_parallel, s.parameters))
        kept = size / s.optim_inner
        return [
            *self._scatter(size, over(s.gradients, s.parameters)),
            *self._scatter(kept, over(s.optimizer_states, s.gradients)),
            *self._all_reduce(kept / s.optim_outer, over(s.data_parallel, s.optimizer_states)),
        ]

    def publish(self, size: float, gathered: bool = True) -> Stages:
        """A bucket's updated parameters over ``optim``; nothing where s_os = s_p.

        gathered: its sections are of one length, so that it can be published by AllGather if the plan says so.
        """
        s = self._sharding
        optim = over(s.optimizer_states, s.parameters)
        node, cross = _parts(optim)
        staged = self.plan.hierarchical and node.size > 1 and cross.size > 1
        if self.plan.publish is PublishMode.ALL_GATHER and gathered:
            if staged:
                stages = [Message(Op.ALL_GATHER, size / node.size, cross), Message(Op.ALL_GATHER, size, node)]
            else:
                stages = [Message(Op.ALL_GATHER, size, optim)]
        elif staged:
            stages = [
                Message(Op.BROADCAST, size / optim.size, cross, cross.size),
                Message(Op.BROADCAST, size / node.size, node, node.size),
            ]
        else:
            stages = [Message(Op.BROADCAST, size / optim.size, optim, optim.size)]
        return _sent(stages)

    def scalars(self) -> Stages:
        """The squared norm over one copy of the optimizer states, and how parameters were used over the world."""
        s = self._sharding
        return _sent(
            [Message(Op.ALL_REDUCE, 8.0, s.optimizer_states), Message(Op.ALL_REDUCE, 8.0 * 1024, s.data_parallel)]
        )

    def _scatter(self, size: float, mesh: ShardFactor) -> Stages:
        if not self.plan.hierarchical:
            return _sent([Message(Op.REDUCE_SCATTER, size, mesh)])
        node, cross = _parts(mesh)
        return _sent([Message(Op.REDUCE_SCATTER, size, node), Message(Op.REDUCE_SCATTER, size / node.size, cross)])

    def _all_reduce(self, size: float, mesh: ShardFactor) -> Stages:
        node, cross = _parts(mesh)
        if not self.plan.hierarchical or node.size == 1 or cross.size == 1:
            return _sent([Message(Op.ALL_REDUCE, size, mesh)])
        return [
            Message(Op.REDUCE_SCATTER, size, node),
            Message(Op.ALL_REDUCE, size / node.size, cross),
            Message(Op.ALL_GATHER, size, node),
        ]


def _sent(stages: Stages) -> Stages:
    """Without what stays on a GPU."""
    return [message for message in stages if message.mesh.size > 1 and message.size > 0]


class Bucket(NamedTuple):
    """Units whose gradients and updates travel together, and bytes of a rank's part of them.

    reduced counts the padding of owners' sections, which is sent; published does where it is ``gathered``.
    """

    units: tuple[int, ...]
    reduced: float
    published: float
    gathered: bool


def buckets(model: ModelSpec, plan: Plan, train: TrainSpec) -> list[Bucket]:
    """Of a plan, in forward order, as the engine makes them."""
    wire, places = train.parameter_bytes, geometry(model, plan, train)
    made = []
    for bucket, size, filled in zip(places.buckets, places.sizes, places.filled, strict=True):
        gathered = plan.publish.gathers(bucket)
        made.append(Bucket(bucket.units, wire * size, wire * (size if gathered else filled), gathered))
    return made


Traffic = tuple[tuple[Message, ...], ...]


def traffic(plan: Plan, micro_batches: int) -> Traffic:
    """What a plan sends, by the size of a unit or bucket: plans of equal traffic and factors of P take equal time."""
    routes = Routes(plan)
    stages = [routes.gather(1.0), routes.final(1.0), routes.publish(1.0), routes.publish(1.0, gathered=False)]
    if micro_batches > 1:
        stages.append(routes.partial(1.0))
    return tuple(map(tuple, stages))


def distinct(plans: Sequence[Plan]) -> list[Plan]:
    """The plans of one sharding whose traffic differs, the first of every kind."""
    seen: dict[Traffic, Plan] = {}
    for plan in plans:
        seen.setdefault(traffic(plan, micro_batches=2), plan)
    return list(seen.values())
