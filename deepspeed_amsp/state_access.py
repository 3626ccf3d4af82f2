"""Reading and writing whole parameters, gradients and optimizer states: what deepspeed.utils.safe_* and
deepspeed.zero.GatheredParameters call on a parameter.

Everything here is collective (all ranks call it, in the same order) and slow: it is for debugging, surgery
and export. Values are assembled from their owners by summing buffers that are zero elsewhere, which is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from deepspeed import comm as ds_comm
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import nn

from deepspeed_amsp.comm import Communicator
from deepspeed_amsp.mesh import Mesh
from deepspeed_amsp.partition.optim_states import Master
from deepspeed_amsp.partition.params import ShardedUnit, Unit, UnitState
from deepspeed_amsp.plan.layout import Piece, shard_pieces

if TYPE_CHECKING:
    from deepspeed_amsp.optimizer import AMSPOptimizer


class StateAccess:
    """Attached to every parameter as ``_z3_optimizer``, under the method names that DeepSpeed calls.

    Args:
        sharing: the ranks that hold the same parameters, as DeepSpeed has them; within it GatheredParameters counts
            its modifier_rank, unless it is all ranks.
    """

    def __init__(self, optimizer: AMSPOptimizer, mesh: Mesh, comm: Communicator, sharing: Any) -> None:
        self._optimizer = optimizer
        self._mesh = mesh
        self._comm = comm
        self._sharing = sharing if mesh.data_parallel.size < mesh.world.size else ds_comm.get_world_group()
        self._unit_of: dict[nn.Parameter, tuple[Unit, int]] = {}
        self._marks: set[str] = set()
        self._masters: dict[str, list[tuple[int, Master]]] = {}
        for bucket, masters in enumerate(optimizer.states.masters):
            for master in masters:
                self._masters.setdefault(master.slot.piece.param.name, []).append((bucket, master))
        for unit in optimizer.units:
            if isinstance(unit, ShardedUnit):
                unit.on_readable = _status_marker(unit)
            for index, param in enumerate(unit.parameters):
                self._attach(param, unit, index)
                self._unit_of[param] = (unit, index)

    def detach(self) -> None:
        """Take the marks off the parameters."""
        for unit, _ in self._unit_of.values():
            if isinstance(unit, ShardedUnit):
                unit.on_readable = None
        for param in self._unit_of:
            for name in self._marks:
                if name in vars(param):
                    delattr(param, name)
        self._unit_of.clear()

    # ---- whole values -------------------------------------------------------------------------------------

    def get_full_hp_param(self, param: nn.Parameter, optim_state_key: str | None = None) -> torch.Tensor | None:
        """The fp32 master, or the optimizer state ``optim_state_key``, whole, on every rank.

        None when there is no such state (yet). A frozen parameter has no master: its working copy is
        returned in fp32.
        """
        if param not in self._optimizer.trainable:
            return None if optim_state_key else self._whole_working_copy(param)

        def part(bucket: int, master: Master) -> torch.Tensor | None:
            return master.value.data if optim_state_key is None else self._state_of(master, optim_state_key)

        return self._assemble(param, part)

    def set_full_hp_param(self, value: torch.Tensor, param: nn.Parameter, optim_state_key: str | None = None) -> None:
        """Set the master (and all working copies) or an optimizer state from ``value``, equal on all ranks.

        Raises:
            KeyError: there is no such state yet.
        """
        name, shape = self._name_and_shape(param)
        _check_shape(name, value, shape)
        flat = value.detach().reshape(-1)
        for _, master in self._masters.get(name, ()):
            piece = master.slot.piece
            target = master.value.data if optim_state_key is None else self._state_of(master, optim_state_key)
            if target is None:
                raise KeyError(f"{name} has no optimizer state {optim_state_key!r} yet; make a step first")
            target.view(-1).copy_(flat[piece.start : piece.stop])
        if optim_state_key is None:
            self._write_working_copy(param, flat)

    def get_fp32_grad_for_param(self, param: nn.Parameter) -> torch.Tensor | None:
        """The reduced mean gradient, before clipping, between the boundary's backward and the step; else None."""
        if param not in self._optimizer.trainable:
            return None
        self._optimizer.drain()
        return self._assemble(param, self._gradient_of)

    def set_fp32_grad_for_param(self, value: torch.Tensor, param: nn.Parameter) -> None:
        """Replace the reduced mean gradient.

        Raises:
            RuntimeError: there is no reduced gradient now.
        """
        name, shape = self._name_and_shape(param)
        _check_shape(name, value, shape)
        self._optimizer.drain()
        flat = value.detach().reshape(-1)
        for bucket, master in self._masters.get(name, ()):
            piece = master.slot.piece
            self._write_gradient(bucket, master, flat[piece.start : piece.stop])

    def update_fp32_grad_for_param_vectorized(
        self, update: Callable[[torch.Tensor, nn.Parameter], torch.Tensor], params: Iterable[nn.Parameter]
    ) -> None:
        """Replace the gradients of ``params`` by ``update(gradient, param)``."""
        for param in params:
            gradient = self.get_fp32_grad_for_param(param)
            if gradient is not None:
                self.set_fp32_grad_for_param(update(gradient, param), param)

    # ---- the part that this rank owns ----------------------------------------------------------------------

    def get_local_fp32_param(self, param: nn.Parameter, optim_state_key: str | None = None) -> torch.Tensor | None:
        """What this rank owns of the master or of a state, flat; empty if nothing, None if there is no state."""
        parts = [
            master.value.data if optim_state_key is None else self._state_of(master, optim_state_key)
            for _, master in self._masters.get(self._name_and_shape(param)[0], ())
        ]
        return self._join(parts)

    def set_local_hp_param(self, value: torch.Tensor, param: nn.Parameter, optim_state_key: str | None = None) -> None:
        """Set what this rank owns; with the master all working copies follow (collective then)."""
        name, _ = self._name_and_shape(param)
        offset = 0
        for _, master in self._masters.get(name, ()):
            target = master.value.data if optim_state_key is None else self._state_of(master, optim_state_key)
            if target is None:
                raise KeyError(f"{name} has no optimizer state {optim_state_key!r} yet; make a step first")
            target.view(-1).copy_(value.reshape(-1)[offset : offset + target.numel()])
            offset += target.numel()
        if optim_state_key is None:
            whole = self.get_full_hp_param(param)
            assert whole is not None
            self._write_working_copy(param, whole.reshape(-1))

    def get_local_fp32_grad_for_param(self, param: nn.Parameter) -> torch.Tensor | None:
        """What this rank owns of the reduced mean gradient, flat; None if there is none now."""
        self._optimizer.drain()
        return self._join(
            [self._gradient_of(bucket, m) for bucket, m in self._masters.get(self._name_and_shape(param)[0], ())]
        )

    def set_local_grad_for_param(self, value: torch.Tensor, param: nn.Parameter) -> None:
        """Replace what this rank owns of the reduced mean gradient."""
        self._optimizer.drain()
        offset = 0
        for bucket, master in self._masters.get(self._name_and_shape(param)[0], ()):
            numel = master.slot.piece.numel
            self._write_gradient(bucket, master, value.reshape(-1)[offset : offset + numel])
            offset += numel

    # ---- GatheredParameters --------------------------------------------------------------------------------

    def _attach(self, param: nn.Parameter, unit: Unit, index: int) -> None:
        """The attributes by which DeepSpeed's utilities recognise a partitioned parameter."""
        spec = unit.layout.params[index]
        status = ZeroParamStatus.NOT_AVAILABLE if isinstance(unit, ShardedUnit) else ZeroParamStatus.AVAILABLE
        marks: dict[str, Any] = {
            "_z3_optimizer": self,
            # Parameters are attached in order, so those before this one are the ones that are known.
            "ds_id": len(self._unit_of),
            "ds_shape": torch.Size(spec.shape),
            "ds_numel": spec.numel,
            "ds_status": status,
            "ds_process_group": self._sharing,
            "ds_tensor": self._own_part(unit, spec.name),
            "all_gather": lambda param_list=None, **_: self._gather(param_list or [param]),
            "partition": lambda param_list=None, has_been_updated=False, **_: self._partition(
                param_list or [param], has_been_updated
            ),
        }
        for name, value in marks.items():
            setattr(param, name, value)
            self._marks.add(name)

    def _own_part(self, unit: Unit, name: str) -> torch.Tensor:
        """This rank's part of the working copy, a view; empty if its shard has nothing of the parameter."""
        piece = self._own_piece(unit, name)
        return torch.empty(0, dtype=unit.dtype) if piece is None else unit.piece_view(piece)

    def _own_piece(self, unit: Unit, name: str) -> Piece | None:
        """The piece of a parameter that falls into this rank's shard of its unit."""
        pieces = shard_pieces(unit.layout, unit.index, self._mesh.coordinates.param)
        return next((piece for piece in pieces if piece.param.name == name), None)

    def _gather(self, params: Sequence[nn.Parameter]) -> None:
        self._optimizer.wait_for_parameters()
        for param in params:
            unit, _ = self._unit_of[param]
            if isinstance(unit, ShardedUnit):
                self._optimizer.gather_unit(unit)
                unit.pinned += 1

    @torch.no_grad()
    def _partition(self, params: Sequence[nn.Parameter], updated: bool) -> None:
        if updated:
            for param in params:
                # The context has made all ranks' equal to the modifier's; masters follow the new values.
                self.set_full_hp_param(param.data.detach().clone(), param)
        for param in params:
            unit, _ = self._unit_of[param]
            if isinstance(unit, ShardedUnit) and unit.pinned:
                unit.pinned -= 1
                if not unit.pinned:
                    self._optimizer.free_unit(unit)

    # ---- parts ---------------------------------------------------------------------------------------------

    def _name_and_shape(self, param: nn.Parameter) -> tuple[str, tuple[int, ...]]:
        unit, index = self._unit_of[param]
        spec = unit.layout.params[index]
        return spec.name, spec.shape

    def _state_of(self, master: Master, key: str) -> torch.Tensor | None:
        value = self._optimizer.state.get(master.value, {}).get(key)
        return value if torch.is_tensor(value) and value.numel() == master.value.numel() else None

    def _gradient_of(self, bucket: int, master: Master) -> torch.Tensor | None:
        part = self._optimizer.gradients[bucket].owned_part(master.slot)
        return None if part is None else part.float() * self._optimizer.to_mean

    def _write_gradient(self, bucket: int, master: Master, value: torch.Tensor) -> None:
        part = self._optimizer.gradients[bucket].owned_part(master.slot)
        if part is None:
            raise RuntimeError(
                f"{master.slot.piece.param.name} has no reduced gradient now: it exists between the backward of the "
                f"last micro-batch and the step"
            )
        part.copy_(value / self._optimizer.to_mean)

    def _assemble(self, param: nn.Parameter, part: Callable[[int, Master], torch.Tensor | None]) -> torch.Tensor | None:
        """Sum of everybody's owned parts, each at its place; None unless every element has an owner's value."""
        name, shape = self._name_and_shape(param)
        numel = torch.Size(shape).numel()
        device = self._optimizer.device
        dtype = torch.float64 if self._unit_of[param][0].dtype is torch.float64 else torch.float32
        buffer = torch.zeros(numel, dtype=dtype, device=device)
        filled = 0
        for bucket, master in self._masters.get(name, ()):
            value = part(bucket, master)
            if value is not None:
                piece = master.slot.piece
                buffer[piece.start : piece.stop] = value.detach().reshape(-1).to(dtype)
                filled += piece.numel
        shares = torch.tensor([filled], dtype=torch.int64, device=device)
        if self._mesh.scalars.size > 1:
            self._comm.all_reduce(self._mesh.scalars, buffer, f"read of {name}").wait()
            self._comm.all_reduce(self._mesh.scalars, shares, f"read of {name}").wait()
        return buffer.view(shape) if int(shares) == numel else None

    def _whole_working_copy(self, param: nn.Parameter) -> torch.Tensor:
        self._gather([param])
        value = param.data.detach().float().clone()
        self._partition([param], updated=False)
        return value

    @torch.no_grad()
    def _write_working_copy(self, param: nn.Parameter, flat: torch.Tensor) -> None:
        """Write the whole flat value into this rank's working copy (and into the full copy while it is there)."""
        self._optimizer.wait_for_parameters()
        unit, index = self._unit_of[param]
        if isinstance(unit, ShardedUnit) and unit.state is UnitState.GATHERING:
            self._optimizer.gather_unit(unit)  # or it would arrive with the values from before
        piece = self._own_piece(unit, unit.layout.params[index].name)
        if piece is not None:
            unit.piece_view(piece).copy_(flat[piece.start : piece.stop])
        if isinstance(unit, ShardedUnit) and unit.readable:
            param.data.view(-1).copy_(flat)

    def _join(self, parts: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
        if any(part is None for part in parts):
            return None
        flat: list[Any] = [part.detach().reshape(-1) for part in parts if part is not None]
        return torch.cat(flat) if flat else torch.empty(0, device=self._optimizer.device)


def _check_shape(name: str, value: torch.Tensor, shape: tuple[int, ...]) -> None:
    if value.numel() != torch.Size(shape).numel():
        raise ValueError(f"a value of shape {tuple(value.shape)} cannot be set for {name} of shape {shape}")


def _status_marker(unit: ShardedUnit) -> Callable[[bool], None]:
    """Keeps ``ds_status`` true: DeepSpeed's own linear function gathers what does not say that it is there."""

    def mark(readable: bool) -> None:
        status = ZeroParamStatus.AVAILABLE if readable else ZeroParamStatus.NOT_AVAILABLE
        for param in unit.parameters:
            vars(param)["ds_status"] = status

    return mark
