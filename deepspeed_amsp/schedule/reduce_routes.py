"""How a bucket's gradient gets to its owner, stage by stage. Subclasses of `ReduceRoute` are the two reduce modes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping, Sequence
from itertools import zip_longest

import torch

from deepspeed_amsp.comm import Communicator, Ticket
from deepspeed_amsp.mesh import Group, Mesh, Span
from deepspeed_amsp.partition.grads import BucketGradients
from deepspeed_amsp.plan.resolve import ReduceMode
from deepspeed_amsp.schedule.pipeline import Stages

Route = Generator[Sequence[Ticket], None, torch.Tensor]
"""Some stages, and what the sum is in the end."""


class ReduceRoute(ABC):
    """How one bucket's gradient gets to its owner. Subclasses are the two reduce modes.

    Args:
        wire_dtype: dtype in which gradients travel; None for that of the parameters.
    """

    def __init__(self, comm: Communicator, mesh: Mesh, wire_dtype: torch.dtype | None) -> None:
        self._comm = comm
        self._mesh = mesh
        self._wire = wire_dtype

    @abstractmethod
    def partial(self, bucket: BucketGradients) -> Stages:
        """A micro-batch that is not the last, s_g > s_p: reduce over the inner stages, keep one's part."""

    @abstractmethod
    def final(self, bucket: BucketGradients) -> Stages:
        """The last micro-batch: everything that was staged and kept ends, summed over W, at its owner."""

    def last_stage(self, final: bool) -> int:
        """Number of the last stage of `final` or `partial` in which something may be sent."""
        return max((stage for stage, size in enumerate(self._sizes(final)) if size > 1), default=0)

    @property
    def sends(self) -> list[bool]:
        """By stage, whether something may be sent in it."""
        either = zip_longest(self._sizes(final=False), self._sizes(final=True), fillvalue=1)
        return [max(sizes) > 1 for sizes in either]

    @abstractmethod
    def _sizes(self, final: bool) -> list[int]:
        """By stage, how many ranks take part."""

    def _sent(self, bucket: BucketGradients, resting: torch.Tensor) -> torch.Tensor:
        return resting.to(self._wire if self._wire is not None else bucket.param_dtype)

    def _all_reduce(self, span: Span, buffer: torch.Tensor, label: str) -> Route:
        """Sum over an axis. In two stages: reduced to parts in node, the parts across nodes, gathered in node."""
        node, cross, back = span.node, span.cross, span.back
        if node is None or cross is None or back is None:
            yield [self._comm.all_reduce(span.flat, buffer, label)] if span.size > 1 and buffer.numel() else []
            return buffer
        if not buffer.numel():
            yield from [[], [], []]
            return buffer
        length = -(-buffer.numel() // node.size)
        whole = buffer.new_zeros(length * node.size)
        whole[: buffer.numel()] = buffer
        part = buffer.new_empty(length)
        yield [self._comm.reduce_scatter(node, whole, part, [length] * node.size, label)]
        yield [self._comm.all_reduce(cross, part, label)]
        yield [self._comm.all_gather(back, part, whole, label)]
        return whole[: buffer.numel()]


class AllReduceRoute(ReduceRoute):
    """The paper's: AllReduce everything over the axis, then select what is kept and drop the rest."""

    def _sizes(self, final: bool) -> list[int]:
        return (self._mesh.data if final else self._mesh.inner).stage_sizes

    def partial(self, bucket: BucketGradients) -> Stages:
        staged = self._sent(bucket, bucket.take_staged())
        staged = yield from self._all_reduce(self._mesh.inner, staged, bucket.layout.label)
        start, length = bucket.layout.held_range(self._mesh.kept_coordinates)
        bucket.keep(staged[start : start + length].clone())

    def final(self, bucket: BucketGradients) -> Stages:
        staged, kept = bucket.take_staged(), bucket.take_kept()
        if kept is not None:
            # The keeper adds what it has accumulated before the last reduction; the others only add theirs.
            start, length = bucket.layout.held_range(self._mesh.kept_coordinates)
            staged[start : start + length].add_(kept)
        staged = self._sent(bucket, staged)
        staged = yield from self._all_reduce(self._mesh.data, staged, bucket.layout.label)
        start, length = bucket.own_range
        whole = length == staged.numel()
        bucket.own(staged if whole else staged[start : start + length].clone())


class TwoLevelRoute(ReduceRoute):
    """Reduce to the owner over ``optim``, stage by stage, then AllReduce only the owned part over ``replicate``.

    A group in which nobody owns anything of the bucket has nothing to send: all its members see the same
    sizes, so all of them skip the call.
    """

    def _sizes(self, final: bool) -> list[int]:
        stages = [group.size for group in (self._mesh.stages if final else self._mesh.inner_stages)]
        return stages + (self._mesh.replicate.stage_sizes if final else [])

    def partial(self, bucket: BucketGradients) -> Stages:
        sent = self._sent(bucket, bucket.take_staged())
        bucket.keep((yield from self._reduce(bucket, sent, (), self._mesh.inner_stages)))

    def final(self, bucket: BucketGradients) -> Stages:
        if self._mesh.inner.size > 1 and (bucket.staged is not None or bucket.kept is None):
            yield from self.partial(bucket)
            kept = bucket.take_kept()
            assert kept is not None, "the partial route leaves a kept part"
            resting = kept
        else:
            # What there is is taken now: a gradient that comes later starts a route of its own.
            kept = bucket.take_kept()
            resting = kept if kept is not None else bucket.take_staged()
            yield from [[]] * len(self._mesh.inner_stages)
        section = self._sent(bucket, resting)
        section = yield from self._reduce(bucket, section, self._mesh.kept_coordinates, self._mesh.outer_stages)
        section = yield from self._all_reduce(self._mesh.replicate, section, bucket.layout.label)
        bucket.own(section)

    def _reduce(
        self, bucket: BucketGradients, buffer: torch.Tensor, prefix: tuple[int, ...], stages: Sequence[Group]
    ) -> Route:
        """Sum ``buffer``, what the ranks at ``prefix`` hold, over ``stages``; returns this rank's part of it."""
        for group in stages:
            if group.size > 1 and buffer.numel():
                splits = bucket.layout.splits(prefix)
                mine = buffer.new_empty(splits[group.index])
                yield [self._comm.reduce_scatter(group, buffer, mine, splits, bucket.layout.label)]
                buffer = mine
            else:
                yield []
            prefix = (*prefix, group.index)
        return buffer


ROUTES: Mapping[ReduceMode, type[ReduceRoute]] = {
    ReduceMode.ALL_REDUCE: AllReduceRoute,
    ReduceMode.TWO_LEVEL: TwoLevelRoute,
}
