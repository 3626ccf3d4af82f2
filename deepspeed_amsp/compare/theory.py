"""How many bytes a strategy must send out of a node in a step: what byte counters are held against. Pure.

Collectives are those of gloo: AllReduce and AllGather in rings, Broadcast along a binomial tree that knows no nodes;
reduce-scatters are messages from rank to rank (`fair`). Counted are payloads of parameters and gradients; scalars and
headers of packets, about 1-2 %, are not.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from deepspeed_amsp.compare import results
from deepspeed_amsp.compare.catalog import Family, Strategy
from deepspeed_amsp.plan.curves import Op
from deepspeed_amsp.plan.factors import ShardFactor
from deepspeed_amsp.plan.resolve import Plan
from deepspeed_amsp.plan.routes import Message, Routes, buckets
from deepspeed_amsp.plan.specs import ModelSpec, TrainSpec

WIRE_BYTES = 2
"""Of an element on its way: bf16."""


@dataclass(frozen=True)
class Case:
    """What is trained where. ``cluster`` is (ranks of a node, nodes); fair: see `fair`.

    prefetch: elements that stage 3 looks ahead (stage3_prefetch_bucket_size).
    """

    model: ModelSpec
    cluster: ShardFactor
    micro_batches: int
    bucket_bytes: int
    fair: bool = True
    prefetch: int = 0

    @property
    def phi(self) -> float:
        """Bytes of all parameters in bf16."""
        return float(WIRE_BYTES * self.model.numel)

    @property
    def train(self) -> TrainSpec:
        return TrainSpec(sequence=64, micro_batches=self.micro_batches, padding_limit=1.0)


def sent_per_node(strategy: Strategy, case: Case) -> float:
    """Bytes that leave the busiest node in a step."""
    fair = case.fair or strategy.family is Family.AMSP  # our engine never uses gloo's own reduce-scatter
    return busiest(case.cluster, messages(strategy, case), fair)


def messages(strategy: Strategy, case: Case) -> list[Message]:
    """What is sent in a step, by size, group and how often."""
    if strategy.family is Family.AMSP:
        assert strategy.plan is not None
        return _of_plan(strategy.plan, case)
    return _of_baseline(strategy.name, case)


def _of_baseline(name: str, case: Case) -> list[Message]:
    """The table in docs/compare.md."""
    phi, count = case.phi, case.micro_batches
    world, node = case.cluster, ShardFactor(case.cluster.s0, 1)
    cross = Message(Op.ALL_REDUCE, phi / node.size, ShardFactor(1, case.cluster.s1))
    gather, scatter = Message(Op.ALL_GATHER, phi, world), Message(Op.REDUCE_SCATTER, phi, world)
    reduce = Message(Op.ALL_REDUCE, phi, world)
    in_node = [Message(Op.ALL_GATHER, phi, node, 2 * count), Message(Op.REDUCE_SCATTER, phi, node, count)]
    known: dict[str, list[Message]] = {
        results.LIMIT: [],
        results.DDP: [reduce],
        results.FSDP2: [*[gather] * count, *[_blocks_again(case)] * count, *[scatter] * count],
        results.HSDP: [*in_node, cross],
        results.ZERO1: [reduce, gather],
        results.ZERO2: [*[reduce] * count, gather],
        results.ZERO3: [*[gather] * count, *[_stage3_again(case)] * count, *[scatter] * count],
        # Whatever a step gathers again is in the node: the second copies last until the update.
        results.HPZ: [gather, *[scatter] * count],
        results.MICS: [*in_node, cross],
    }
    return known[name]


def _stage3_again(case: Case) -> Message:
    """The second gather of a micro-batch: when the forward ends stage 3 already looks ahead into the backward, and
    keeps what it finds there: the last units, as far as it looks."""
    kept = 0
    for unit in reversed(case.model.units):
        if kept + unit.numel > case.prefetch:
            break
        kept += unit.numel
    return Message(Op.ALL_GATHER, case.phi - WIRE_BYTES * kept, case.cluster)


def _blocks_again(case: Case) -> Message:
    """FSDP2's second gather: the root, which has what is in no block, stays."""
    inside = sum(unit.numel for unit in case.model.units if unit.layer is not None)
    return Message(Op.ALL_GATHER, float(WIRE_BYTES * inside), case.cluster)


def _of_plan(plan: Plan, case: Case) -> list[Message]:
    """Our own executor, with true bucket sizes and padding."""
    if plan.bucket_bytes is None:
        plan = replace(plan, bucket_bytes=case.bucket_bytes)
    routes, count = Routes(plan), case.micro_batches
    sent: list[Message] = []
    for unit in case.model.units:
        size = float(WIRE_BYTES * unit.numel)
        sent += routes.gather(size) * (2 * count) + routes.param_reduce(size) * count
    for bucket in buckets(case.model, plan, case.train):
        sent += routes.partial(bucket.reduced) * (count - 1) + routes.final(bucket.reduced)
        sent += routes.publish(bucket.published, bucket.gathered)
    return sent


# ---- what a collective sends -------------------------------------------------------------------------------


def busiest(cluster: ShardFactor, sent: Iterable[Message], fair: bool = True) -> float:
    """Bytes out of the node that sends most, all messages together; every group of a mesh sends alike."""
    totals = [0.0] * cluster.s1
    for message in sent:
        by_place = crossing(message, fair)
        siblings = cluster.s0 // message.mesh.s0
        for node in range(cluster.s1):
            totals[node] += siblings * by_place[node % message.mesh.s1]
    return max(totals)


def crossing(message: Message, fair: bool = True) -> list[float]:
    """Bytes that one group sends out of each of its nodes, all copies together."""
    size, (s0, s1), p = message.size, (message.mesh.s0, message.mesh.s1), message.mesh.size
    if s1 == 1:
        return [0.0]
    if message.op is Op.BROADCAST:
        return [message.copies / p * edges * size for edges in _tree_edges(s0, s1)]
    ring = (p - 1) / p * size  # each hop of the ring from node to node
    if message.op is Op.ALL_REDUCE or (message.op is Op.REDUCE_SCATTER and not fair):
        each = 2 * ring
    elif message.op is Op.ALL_GATHER:
        each = ring
    else:
        each = s0 * (p - s0) / p * size  # every rank sends its piece to each rank of the other nodes
    return [message.copies * each] * s1


def _tree_edges(s0: int, s1: int) -> list[int]:
    """How often gloo's broadcast trees leave each node, one tree from every rank of the group.

    Ranks count from the root; in turn i, rank v with v < 2^i sends to v + 2^i (gloo/broadcast.cc).
    """
    p = s0 * s1
    leaves = [0] * s1
    for root in range(p):
        for receiver in range(1, p):
            sender = receiver - (1 << (receiver.bit_length() - 1))
            here, there = (sender + root) % p // s0, (receiver + root) % p // s0
            leaves[here] += here != there
    return leaves
