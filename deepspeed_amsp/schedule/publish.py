"""When updated parameters travel: issued bucket by bucket in the step, waited for by the next reader."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from deepspeed_amsp.comm import Communicator, Ticket
from deepspeed_amsp.mesh import Group, Span
from deepspeed_amsp.partition.optim_states import Master
from deepspeed_amsp.partition.working import WorkingBucket
from deepspeed_amsp.plan.resolve import PublishMode
from deepspeed_amsp.schedule.chain import Chain, make_chain
from deepspeed_amsp.schedule.pipeline import Stages


class Publisher:
    """Sends each owner's updated section of a bucket over the ``optim`` axis into the working copies.

    All collectives of a bucket are under way without the reader's help when `publish` returns, so a rank may
    read parameters whatever the others do.

    Args:
        buckets: in forward order.
        span: the ``optim`` axis by owner number. In two stages, a value crosses nodes first and once.
        merged: publishing shares its communicators with everything else.
    """

    def __init__(
        self,
        buckets: Sequence[WorkingBucket],
        comm: Communicator,
        span: Span,
        mode: PublishMode,
        device: torch.device,
        merged: bool,
    ) -> None:
        self._buckets = buckets
        self._comm = comm
        self._span = span
        self._mode = mode
        staged = span.node is not None
        self._sent: Callable[[WorkingBucket], Stages] = self._broadcast_in_stages if staged else self._broadcast
        self._gathered: Callable[[WorkingBucket], Stages] = self._all_gather_in_stages if staged else self._all_gather
        self._chain: Chain = make_chain(comm, device, staged, merged)
        self._in_flight: set[int] = set()
        self._buckets_of: dict[int, list[int]] = {}
        for bucket in buckets:
            for unit in bucket.layout.units:
                self._buckets_of.setdefault(unit, []).append(bucket.layout.index)

    @property
    def pending(self) -> bool:
        """Whether some working copy may still be the one from before the last step."""
        return bool(self._in_flight)

    @torch.no_grad()
    def publish(self, index: int, masters: Sequence[Master]) -> None:
        """Issue the publishing of bucket ``index`` from its updated ``masters`` (those of this rank)."""
        self._arrive(index)  # a step without a forward in between
        bucket = self._buckets[index]
        bucket.fill(masters)
        self._in_flight.add(index)
        if self._span.size > 1:
            self._chain.start(index, self._route(bucket))
        else:
            self._arrive(index)

    def _route(self, bucket: WorkingBucket) -> Stages:
        return self._gathered(bucket) if self._mode.gathers(bucket.layout) else self._sent(bucket)

    def wait_unit(self, unit: int) -> None:
        """Make the working copies of a unit current."""
        if self._in_flight:
            for index in self._buckets_of.get(unit, ()):
                self._arrive(index)

    def wait_all(self) -> None:
        for index in sorted(self._in_flight):
            self._arrive(index)

    def close(self) -> None:
        """Nothing will be published any more; everything has its last values."""
        self.wait_all()
        self._chain.close()

    @torch.no_grad()
    def _arrive(self, index: int) -> None:
        if index in self._in_flight:
            self._in_flight.discard(index)
            self._chain.finish(index)
            self._buckets[index].finish()

    def _broadcast(self, bucket: WorkingBucket) -> Stages:
        """One Broadcast per owner that has something, issued together (Section 3.4 of the paper)."""
        yield self._send(self._span.flat, bucket, [range(o, o + 1) for o in range(self._span.size)])

    def _broadcast_in_stages(self, bucket: WorkingBucket) -> Stages:
        """Owners send to the ranks at their place in the other nodes; everybody passes on what came to it."""
        node, cross = self._span.node, self._span.cross
        assert node is not None and cross is not None
        own = node.index * cross.size
        yield self._send(cross, bucket, [range(own + c, own + c + 1) for c in range(cross.size)], messages=True)
        of_nodes = [range(n * cross.size, (n + 1) * cross.size) for n in range(node.size)]
        yield self._send(node, bucket, of_nodes, messages=True)

    def _send(
        self, group: Group, bucket: WorkingBucket, owners: Sequence[range], messages: bool = False
    ) -> list[Ticket]:
        """Broadcast from every member of ``group`` what belongs to its ``owners``."""
        return [
            self._comm.broadcast(group, part, source, bucket.layout.label, messages)
            for source, theirs in enumerate(owners)
            for part in bucket.parts(theirs)
        ]

    def _all_gather(self, bucket: WorkingBucket) -> Stages:
        """One AllGather of the owners' sections, padded to one length, in place."""
        flat, whole = self._span.flat, bucket.whole()
        yield [self._comm.all_gather(flat, _nth(whole, flat), whole, bucket.layout.label)]

    def _all_gather_in_stages(self, bucket: WorkingBucket) -> Stages:
        node, cross = self._span.node, self._span.cross
        assert node is not None and cross is not None
        whole = bucket.whole()
        theirs = _nth(whole, node)
        yield [self._comm.all_gather(cross, _nth(theirs, cross), theirs, bucket.layout.label)]
        yield [self._comm.all_gather(node, theirs, whole, bucket.layout.label)]


def _nth(buffer: torch.Tensor, group: Group) -> torch.Tensor:
    """This rank's part of ``buffer``, cut evenly over ``group``."""
    length = buffer.numel() // group.size
    return buffer[group.index * length : (group.index + 1) * length]
