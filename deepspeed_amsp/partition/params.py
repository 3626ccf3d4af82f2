"""Where parameters live: units whose working copy is replicated (s_p = 1) or cut into shards (s_p > 1)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

import torch
from torch import nn

from deepspeed_amsp.partition.layout import ParamSpec, Piece, UnitLayout


class UnitState(Enum):
    """Whether a sharded unit's full parameters can be read."""

    SHARDED = auto()
    GATHERING = auto()
    FULL = auto()


_TRANSITIONS = {
    (UnitState.SHARDED, UnitState.GATHERING),
    (UnitState.GATHERING, UnitState.FULL),
    (UnitState.FULL, UnitState.SHARDED),
}


class UnitStateError(RuntimeError):
    """A unit was asked for a transition that its state does not allow: an error in the scheduler."""


@dataclass(frozen=True)
class UnitMembers:
    """The parameters of one unit, before they are placed: one module, one dtype, frozen or trainable."""

    name: str
    module: nn.Module
    parameters: tuple[nn.Parameter, ...]
    specs: tuple[ParamSpec, ...]

    def layout(self, shards: int) -> UnitLayout:
        return UnitLayout(self.name, self.specs, shards)


class Unit(Protocol):
    """What the schedulers need of a unit."""

    index: int
    name: str
    layout: UnitLayout
    parameters: tuple[nn.Parameter, ...]

    @property
    def sharded(self) -> bool: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def held_bytes(self) -> int:
        """Bytes of the working copy at rest."""
        ...

    def piece_view(self, piece: Piece) -> torch.Tensor:
        """The working copy of ``piece`` [piece.numel], writable."""
        ...


class ReplicatedUnit:
    """s_p = 1: the parameters stay the tensors that the user made; nothing is gathered or freed."""

    sharded = False

    def __init__(self, index: int, members: UnitMembers) -> None:
        self.index = index
        self.name = members.name
        self.layout = members.layout(shards=1)
        self.parameters = members.parameters
        self._by_name = dict(zip((spec.name for spec in members.specs), members.parameters, strict=True))
        for param in self.parameters:
            if not param.data.is_contiguous():
                # Pieces are ranges of the flattened parameter, which a strided tensor does not have.
                param.data = param.data.contiguous()

    @property
    def dtype(self) -> torch.dtype:
        return self.parameters[0].dtype

    @property
    def held_bytes(self) -> int:
        return sum(param.numel() * param.element_size() for param in self.parameters)

    def piece_view(self, piece: Piece) -> torch.Tensor:
        return self._by_name[piece.param.name].data.view(-1)[piece.start : piece.stop]


class ShardedUnit:
    """s_p > 1: one shard at rest; the full flat buffer keeps its storage object, emptied and refilled.

    Parameters are views of the full buffer while it is filled, so gathering copies nothing; views that
    autograd saved in forward see the refilled storage in backward. While the unit is freed its parameters
    are empty tensors, so that a read of a freed parameter is a shape error and not a read of freed memory.

    Args:
        broadcast: makes the flat buffer [layout.numel] equal to rank 0's, waiting for it; None if alone.
    """

    sharded = True

    def __init__(
        self,
        index: int,
        members: UnitMembers,
        shards: int,
        coordinate: int,
        device: torch.device,
        broadcast: Callable[[torch.Tensor], None] | None,
    ) -> None:
        self.index = index
        self.name = members.name
        self.layout = members.layout(shards)
        self.parameters = members.parameters
        self.state = UnitState.FULL
        dtype = members.parameters[0].dtype
        self._full = torch.zeros(self.layout.numel, dtype=dtype, device=device)
        self._views = [
            self._full[offset : offset + spec.numel].view(spec.shape)
            for spec, offset in zip(members.specs, self.layout.offsets, strict=True)
        ]
        for view, param in zip(self._views, self.parameters, strict=True):
            view.copy_(param.data)
        if broadcast is not None:
            broadcast(self._full)
        low = coordinate * self.layout.shard_numel
        self.shard = self._full[low : low + self.layout.shard_numel].clone()
        self._empty = torch.empty(0, dtype=dtype, device=device)
        self.free()

    @property
    def dtype(self) -> torch.dtype:
        return self.shard.dtype

    @property
    def held_bytes(self) -> int:
        return self.shard.numel() * self.shard.element_size()

    @property
    def readable(self) -> bool:
        return self.state is UnitState.FULL

    @property
    def full_bytes(self) -> int:
        return self.layout.numel * self.shard.element_size()

    def piece_view(self, piece: Piece) -> torch.Tensor:
        return self.shard[piece.shard_offset : piece.shard_offset + piece.numel]

    def begin_gather(self) -> torch.Tensor:
        """Allocate the full buffer and return it [layout.numel] for an AllGather to fill."""
        self._move(UnitState.GATHERING)
        self._full.untyped_storage().resize_(self.full_bytes)
        return self._full

    def end_gather(self) -> None:
        """The gather has arrived: parameters become views of the full buffer."""
        self._move(UnitState.FULL)
        for param, view in zip(self.parameters, self._views, strict=True):
            param.data = view

    def free(self) -> None:
        """Drop the full copy."""
        self._move(UnitState.SHARDED)
        for param in self.parameters:
            param.data = self._empty
        self._full.untyped_storage().resize_(0)

    def fill_shard(self, coordinate: int, param_index: int, value: torch.Tensor) -> None:
        """Copy the part of the full parameter ``value`` that falls into this rank's shard into it."""
        low = coordinate * self.layout.shard_numel
        offset = self.layout.offsets[param_index]
        start, stop = max(low, offset), min(low + self.layout.shard_numel, offset + value.numel())
        if start < stop:
            self.shard[start - low : stop - low].copy_(value.reshape(-1)[start - offset : stop - offset])

    def _move(self, target: UnitState) -> None:
        if (self.state, target) not in _TRANSITIONS:
            raise UnitStateError(f"unit {self.name}: {self.state.name} -> {target.name} is not a legal transition")
        self.state = target


def find_units(model: nn.Module) -> Iterator[UnitMembers]:
    """Units of ``model`` in registration order, which for most models is the forward order.

    A parameter that several modules share belongs to the first of them. Parameters of one module that
    differ in dtype or in ``requires_grad`` form separate units, since they travel separately.

    Raises:
        TypeError: a parameter is on the meta device.
    """
    seen: set[int] = set()
    for module_name, module in model.named_modules():
        kinds: dict[tuple[torch.dtype, bool], list[tuple[str, nn.Parameter]]] = {}
        for name, param in dict.items(module._parameters):
            if param is None or id(param) in seen:
                continue
            seen.add(id(param))
            full_name = f"{module_name}.{name}" if module_name else name
            if param.is_meta:
                raise TypeError(
                    f"parameter {full_name} is on the meta device; give the engine a model with real values "
                    f"(meta-device construction is not supported yet)"
                )
            if param.dtype.is_floating_point:
                kinds.setdefault((param.dtype, param.requires_grad), []).append((full_name, param))
        for members in kinds.values():
            yield _members(module_name or type(model).__name__, module, members)


def _members(name: str, module: nn.Module, members: Sequence[tuple[str, nn.Parameter]]) -> UnitMembers:
    params = tuple(param for _, param in members)
    specs = tuple(ParamSpec(full_name, tuple(param.shape)) for full_name, param in members)
    return UnitMembers(name, module, params, specs)
