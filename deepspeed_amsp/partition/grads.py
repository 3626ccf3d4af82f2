"""Where gradients live: staged in bucket order, kept between micro-batches, owned once fully reduced."""

from __future__ import annotations

import torch

from deepspeed_amsp.plan.layout import BucketLayout, Slot


class BucketGradients:
    """The gradient of one bucket on one rank.

    * ``staged`` [bucket.numel]: this rank's own, unreduced. With s_g = s_p it is where gradients rest
      between micro-batches; with s_g > s_p it lives from the first gradient of a micro-batch until the
      reduction over the inner ``optim`` axis is issued.
    * ``kept`` [bucket.held_range]: sums over the inner axis, where gradients rest when s_g > s_p.
    * ``owned`` [the owner's section]: sums over all replicas, from the final reduction until the step.

    Args:
        layout: geometry of the bucket.
        owner: this rank's number on the ``optim`` axis.
        dtype: accumulation dtype.
        param_dtype: dtype of the parameters, which is what travels unless the config says otherwise.
    """

    def __init__(
        self,
        layout: BucketLayout,
        owner: int,
        dtype: torch.dtype,
        param_dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.param_dtype = param_dtype
        self.layout = layout
        self.owner = owner
        self.dtype = dtype
        self.device = device
        self.staged: torch.Tensor | None = None
        self.kept: torch.Tensor | None = None
        self.owned: torch.Tensor | None = None
        self._written: set[int] = set()
        """Offsets of the slots that ``staged`` holds a gradient for."""

    @property
    def held_bytes(self) -> int:
        buffers = (self.staged, self.kept, self.owned)
        return sum(b.numel() * b.element_size() for b in buffers if b is not None)

    @property
    def own_range(self) -> tuple[int, int]:
        """(offset, length) of this rank's section in the bucket."""
        return self.layout.sections[self.owner]

    def stage(self, slot: Slot, gradient: torch.Tensor) -> None:
        """Add a piece's flat ``gradient`` [slot.piece.numel] to the staged buffer."""
        if self.staged is None:
            self.staged = torch.empty(self.layout.numel, dtype=self.dtype, device=self.device)
        target = self.staged[slot.offset : slot.offset + slot.piece.numel]
        if slot.offset in self._written:
            target.add_(gradient)
        else:
            target.copy_(gradient)
            self._written.add(slot.offset)

    def staged_names(self) -> set[str]:
        """Parameters that ``staged`` holds a gradient for."""
        if not self._written:
            return set()
        return {slot.piece.param.name for slot in self.layout.slots if slot.offset in self._written}

    def take_staged(self) -> torch.Tensor:
        """Hand over the staged buffer, zero where no gradient was staged. The bucket forgets it."""
        staged = self.staged
        if staged is None:
            staged = torch.zeros(self.layout.numel, dtype=self.dtype, device=self.device)
        else:
            for start, stop in self.layout.gaps:
                staged[start:stop].zero_()
            for slot in self.layout.slots:
                if slot.offset not in self._written:
                    staged[slot.offset : slot.offset + slot.piece.numel].zero_()
        self.staged = None
        self._written.clear()
        return staged

    def keep(self, reduced: torch.Tensor) -> None:
        """Add a micro-batch's sum over the inner axis to the resting gradient."""
        self.kept = _accumulate(self.kept, reduced, self.dtype)

    def take_kept(self) -> torch.Tensor | None:
        kept, self.kept = self.kept, None
        return kept

    def own(self, reduced: torch.Tensor) -> None:
        """Add a fully reduced section; several arrive when a window has several backwards at its boundary."""
        self.owned = _accumulate(self.owned, reduced, self.dtype)

    def owned_part(self, slot: Slot) -> torch.Tensor | None:
        """The reduced gradient of one of the owner's pieces, a flat view; None while there is none."""
        return None if self.owned is None else self.part(self.owned, slot)

    def part(self, section: torch.Tensor, slot: Slot) -> torch.Tensor:
        """What belongs to one of the owner's pieces in a ``section`` of the length of `own_range`, a flat view."""
        at = slot.offset - self.own_range[0]
        return section[at : at + slot.piece.numel]

    def clear(self) -> None:
        self.staged = self.kept = self.owned = None
        self._written.clear()


def _accumulate(total: torch.Tensor | None, part: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if total is None:
        return part.to(dtype)
    return total.add_(part)
