"""Where parameters live: units whose working copy is replicated (s_p = 1) or cut into shards (s_p > 1)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

import torch
from torch import nn

from deepspeed_amsp.partition.materialise import whole_shape
from deepspeed_amsp.plan.layout import ParamSpec, Piece, UnitLayout


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
    leaf: bool = False
    """The module was marked with set_z3_leaf_modules: everything below it is gathered and reduced with it."""

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
    are empty tensors, so that a read of a freed parameter is a shape error and not a read of freed memory; and
    they have another version, so that autograd refuses to use a saved view of them.

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
        self.module = members.module
        self.leaf = members.leaf
        self.trainable = members.parameters[0].requires_grad
        self.pinned = 0
        """How many readers outside the passes hold the full copy."""
        self.held = False
        """Something that nobody sees may read the full copy until the values change."""
        self.on_readable: Callable[[bool], None] | None = None
        """Told whenever the full parameters become readable or cease to be."""
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
        self._versions: tuple[int, ...] = ()
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
        _set_versions(self.parameters, self._versions)

    def refresh(self) -> torch.Tensor:
        """The full buffer [layout.numel] in its place, for an AllGather of new values."""
        assert self.readable
        return self._full

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` is a view of the full buffer."""
        if tensor.layout is not torch.strided:
            return False
        return bool(tensor.untyped_storage()._cdata == self._full.untyped_storage()._cdata)

    def free(self) -> None:
        """Drop the full copy."""
        self._move(UnitState.SHARDED)
        self._versions = tuple(param._version for param in self.parameters)
        for param in self.parameters:
            param.data = self._empty
        _set_versions(self.parameters, tuple(version + 1 for version in self._versions))
        self._full.untyped_storage().resize_(0)

    def _move(self, target: UnitState) -> None:
        if (self.state, target) not in _TRANSITIONS:
            raise UnitStateError(f"unit {self.name}: {self.state.name} -> {target.name} is not a legal transition")
        self.state = target
        if self.on_readable is not None:
            self.on_readable(target is UnitState.FULL)


def _set_versions(parameters: tuple[nn.Parameter, ...], versions: tuple[int, ...]) -> None:
    """Set what autograd compares when it uses a tensor that it has saved."""
    torch._C._autograd._unsafe_set_version_counter(parameters, versions)


def find_units(model: nn.Module, prepare: Callable[[nn.Module, str], None]) -> Iterator[UnitMembers]:
    """Units of ``model`` in registration order, which for most models is the forward order.

    A parameter that several modules share belongs to the first of them. Parameters of one module that
    differ in dtype or in ``requires_grad`` form separate units, since they travel separately. A module marked
    with ``set_z3_leaf_modules`` is one unit with everything below it. Parameters that are not floating-point
    or have no elements belong to no unit and stay as they are.

    Args:
        prepare: called with a module and its name before its parameters are looked at.
    """
    seen: set[int] = set()
    inside_leaf: set[nn.Module] = set()
    for module_name, module in model.named_modules():
        prepare(module, module_name)
        if module in inside_leaf:
            continue
        leaf = bool(getattr(module, "_z3_leaf", False))
        if leaf:
            inside_leaf.update(module.modules())
            for child_name, child in module.named_modules(prefix=module_name):
                prepare(child, child_name)
        kinds: dict[tuple[torch.dtype, bool], list[tuple[str, nn.Parameter]]] = {}
        for name, param in module.named_parameters(prefix=module_name, recurse=leaf):
            if id(param) in seen:
                continue
            seen.add(id(param))
            if param.dtype.is_floating_point and whole_shape(param).numel():
                kinds.setdefault((param.dtype, param.requires_grad), []).append((name, param))
        for members in kinds.values():
            params = tuple(param for _, param in members)
            specs = tuple(ParamSpec(name, tuple(whole_shape(param))) for name, param in members)
            yield UnitMembers(module_name or type(model).__name__, module, params, specs, leaf)
