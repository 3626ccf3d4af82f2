"""The step at the owners: norm, scaling, the optimizer bucket by bucket in forward order, publishing."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch

from deepspeed_amsp.comm import Communicator
from deepspeed_amsp.mesh import Group
from deepspeed_amsp.partition.grads import BucketGradients
from deepspeed_amsp.partition.optim_states import Master, OwnedStates
from deepspeed_amsp.schedule.publish import Publisher


class OwnerUpdate:
    """Turns fully reduced gradients into published parameters.

    Args:
        scalars: groups that together hold one whole replica of the optimizer states: of this part of the model, and
            the parts.
        counted: parameters whose gradients this rank adds to the norm, where it owns them.
    """

    def __init__(
        self,
        states: OwnedStates,
        gradients: Sequence[BucketGradients],
        publisher: Publisher,
        comm: Communicator,
        scalars: Sequence[Group],
        counted: Collection[str],
        device: torch.device,
    ) -> None:
        self._states = states
        self._gradients = gradients
        self._publisher = publisher
        self._comm = comm
        self._scalars = scalars
        weights = [float(master.slot.piece.param.name in counted) for master in states.all_masters()]
        self._weights = None if all(weights) else torch.tensor(weights, dtype=torch.float64, device=device)
        self._device = device

    def norm(self) -> torch.Tensor:
        """2-norm of the summed gradients as they are, 0-dim fp64 on the device.

        Each element counts once: owners have distinct tensors, shards distinct elements, and the sum is
        taken over one replica of the optimizer states. Padding belongs to no piece. What other parts of the model
        count has a weight of 0 here, and is not left out, so that all ranks see it if it is not finite.
        """
        parts = [
            torch.linalg.vector_norm(part, dtype=torch.promote_types(part.dtype, torch.float32))
            for index, masters in enumerate(self._states.masters)
            for part in (self.gradient_of(index, master) for master in masters)
        ]
        squares = torch.zeros((), dtype=torch.float64, device=self._device)
        if parts:
            norms = torch.stack([part.double() for part in parts])
            squares = (norms if self._weights is None else norms * self._weights).square().sum()
        for group in self._scalars:
            if group.size > 1:
                self._comm.all_reduce(group, squares, "gradient norm").wait()
        return squares.sqrt()

    def apply(
        self, scale: torch.Tensor, unused: Collection[str], wait: bool, arrival: Callable[[int], None] | None = None
    ) -> None:
        """Scale the gradients, step, and publish in forward order.

        Args:
            scale: 0-dim factor from summed to averaged, unscaled and clipped gradients.
            unused: parameters that had no gradient anywhere; their masters and moments stay as they are.
            wait: wait for the publishes here instead of letting the next reader do it.
            arrival: waits for the gradients of a bucket, where not all are here yet: buckets are then updated as
                they arrive, last in forward first, while the others still travel.
        """
        buckets = range(len(self._gradients))
        if not self._states.stepwise:
            with self._comm.updating("update"):
                for index in buckets:
                    self._load(index, scale, unused)
                self._states.step_all()
        if arrival is not None:
            for index in reversed(buckets):
                arrival(index)
                self._step(index, scale, unused)
        for index in buckets:
            if arrival is None and self._states.stepwise:
                self._step(index, scale, unused)
            masters = self._states.masters[index]
            for master in masters:
                master.value.grad = None
            self._publisher.publish(index, masters)
        if wait:
            self._publisher.wait_all()

    def _step(self, index: int, scale: torch.Tensor, unused: Collection[str]) -> None:
        with self._comm.updating(f"update {self._gradients[index].layout.label}"):
            self._load(index, scale, unused)
            self._states.step_bucket(index)

    def gradient_of(self, index: int, master: Master) -> torch.Tensor:
        """The summed gradient of an owned piece, flat, in the accumulation dtype; zeros if no backward ran."""
        return self._gradients[index].part(self._owned(index), master.slot)

    def _owned(self, index: int) -> torch.Tensor:
        gradients = self._gradients[index]
        if gradients.owned is None:
            _, length = gradients.own_range
            gradients.own(torch.zeros(length, dtype=gradients.dtype, device=self._device))
        assert gradients.owned is not None
        return gradients.owned

    def _load(self, index: int, scale: torch.Tensor, unused: Collection[str]) -> None:
        """Give masters their gradients: views of the owner's section, which is widened and scaled in one go."""
        masters, gradients = self._states.masters[index], self._gradients[index]
        if not masters:
            return
        used = gradients.layout.owned_numel(gradients.owner)  # what pads the section behind it takes no memory
        scaled = self._owned(index)[:used].to(masters[0].value.dtype, copy=True)
        scaled.mul_(scale.to(scaled.dtype))
        for master in masters:
            if master.slot.piece.param.name not in unused:
                master.value.grad = gradients.part(scaled, master.slot).view(master.value.shape)
