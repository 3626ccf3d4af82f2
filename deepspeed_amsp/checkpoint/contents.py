"""What of a running engine goes into a checkpoint, and which rank writes it: every byte once.

Trainable parameters are stored as their fp32 masters and optimizer states; their working copies follow from the
masters. What has no master is stored as the module has it: frozen and non-float parameters, persistent buffers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import nn

from deepspeed_amsp.checkpoint.flat import FlatTensor, Part, share
from deepspeed_amsp.checkpoint.manifest import TensorInfo, master_key, module_key, prefixed, state_key
from deepspeed_amsp.checkpoint.together import CheckpointError
from deepspeed_amsp.mesh import Mesh
from deepspeed_amsp.optimizer import AMSPOptimizer
from deepspeed_amsp.partition.params import ShardedUnit, Unit
from deepspeed_amsp.plan.layout import Piece, shard_pieces

T = TypeVar("T")


@dataclass
class Contents:
    """What this rank holds. ``tensors``: key -> its pieces; ``infos``: key -> the whole tensor.

    scalars: parameter -> optimizer states that are no tensors of elements ("step"), of the masters owned here.
    objects: entries of the module's state_dict that are no dense tensors.
    aliases: further names of tied parameters -> the first.
    left_out: parameters that are not saved.
    buffers: names of the module's buffers.
    """

    tensors: dict[str, FlatTensor] = field(default_factory=dict)
    infos: dict[str, TensorInfo] = field(default_factory=dict)
    scalars: dict[str, dict[str, Any]] = field(default_factory=dict)
    objects: dict[str, Any] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()

    def add(self, key: str, shape: tuple[int, ...], start: int, values: torch.Tensor) -> None:
        """Note that elements from ``start`` on of the tensor ``key`` are ``values``."""
        info = TensorInfo.of(shape, values.dtype)
        self.infos[key] = info
        if values.numel():
            before = self.tensors[key].parts if key in self.tensors else ()
            part = Part(start, values.detach().reshape(-1))
            self.tensors[key] = FlatTensor(info.numel, values.dtype, (*before, part))

    def told(self, prefix: str) -> Contents:
        """The same without the tensors, under the names that a part of a model has in a checkpoint."""

        def named(values: Mapping[str, T]) -> dict[str, T]:
            return {prefix + name: value for name, value in values.items()}

        return Contents(
            infos={prefixed(key, prefix): info for key, info in self.infos.items()},
            scalars=named(self.scalars),
            objects=named(self.objects),
            aliases={alias: prefix + name for alias, name in named(self.aliases).items()},
            left_out=tuple(prefix + name for name in self.left_out),
            buffers=tuple(prefix + name for name in self.buffers),
        )


def to_write(
    optimizer: AMSPOptimizer, mesh: Mesh, module: nn.Module, left_out: Sequence[str]
) -> tuple[Contents, dict[str, FlatTensor]]:
    """What this rank holds, and the blocks of it that it writes, so that all ranks together write each block once.
    Both have the names that the module has.

    Args:
        left_out: parameters that are not saved.

    Raises:
        CheckpointError: an optimizer state that belongs to no element has been cut.
    """
    owned, frozen, rest, buffers = Contents(), Contents(), Contents(), Contents()
    _add_owned(owned, optimizer)
    for unit in optimizer.units:
        for piece in pieces_without_master(unit, optimizer, mesh):
            if piece.param.name not in left_out:
                frozen.add(module_key(piece.param.name), piece.param.shape, piece.start, unit.piece_view(piece))
    parameters = dict(module.named_parameters(remove_duplicate=False))
    for name, value in module_rest(optimizer, module).items():
        if name in left_out:
            continue
        if not torch.is_tensor(value) or value.layout is not torch.strided:
            rest.objects[name] = value
        else:
            (rest if name in parameters else buffers).add(module_key(name), tuple(value.shape), 0, value)
    mine = {
        **share(owned.tensors, mesh.replicate.flat.index, mesh.replicate.size),
        **share(frozen.tensors, mesh.data.flat.index, mesh.data.size),
        **share(rest.tensors, mesh.data_parallel.index, mesh.data_parallel.size),
        # Buffers may differ from rank to rank (running statistics); those of the first rank count.
        **(buffers.tensors if mesh.starts else {}),
    }
    infos = {**owned.infos, **frozen.infos, **rest.infos, **buffers.infos}
    names = tuple(name for name, _ in module.named_buffers())
    return Contents({}, infos, owned.scalars, rest.objects, aliases(module), tuple(left_out), names), mine


def _add_owned(contents: Contents, optimizer: AMSPOptimizer) -> None:
    for master in optimizer.states.all_masters():
        piece = master.slot.piece
        name, shape = piece.param.name, piece.param.shape
        contents.add(master_key(name), shape, piece.start, master.value.data)
        for state, value in optimizer.state.get(master.value, {}).items():
            if not torch.is_tensor(value) or (not value.dim() and master.value.dim()):
                scalar = value.detach().cpu().clone() if torch.is_tensor(value) else value
                contents.scalars.setdefault(name, {})[state] = scalar
            elif value.shape == master.value.shape:
                contents.add(state_key(name, state), shape, piece.start, value)
            elif piece.whole:
                contents.add(state_key(name, state), tuple(value.shape), 0, value)
            else:
                raise CheckpointError(
                    f"the optimizer state {state!r} of {name} has shape {tuple(value.shape)}, and this rank owns a "
                    f"part of shape {tuple(master.value.shape)} of it: which elements it belongs to is not known"
                )


def pieces_without_master(unit: Unit, optimizer: AMSPOptimizer, mesh: Mesh) -> Iterator[Piece]:
    """This rank's pieces of the parameters of ``unit`` that are not optimized."""
    coordinate = mesh.coordinates.param if isinstance(unit, ShardedUnit) else 0
    masters = set(optimizer.trainable_names)
    yield from (p for p in shard_pieces(unit.layout, unit.index, coordinate) if p.param.name not in masters)


def module_rest(optimizer: AMSPOptimizer, module: nn.Module) -> Mapping[str, Any]:
    """Entries of the module's state_dict that are parameters of no unit: buffers, non-float parameters, and others."""
    held = {id(param) for unit in optimizer.units for param in unit.parameters}
    names = {name for name, param in module.named_parameters(remove_duplicate=False) if id(param) in held}
    return {name: value for name, value in module.state_dict().items() if name not in names}


def aliases(module: nn.Module) -> dict[str, str]:
    """Further names of parameters that the module has under several -> the first."""
    first: dict[int, str] = {}
    found = {}
    for name, param in module.named_parameters(remove_duplicate=False):
        if id(param) in first:
            found[name] = first[id(param)]
        first.setdefault(id(param), name)
    return found
