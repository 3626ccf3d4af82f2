"""AMSPOptimizer: what DeepSpeed's engine and utilities expect of a ZeRO optimizer, over our partition and schedule."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.utils import count_used_parameters_in_backward
from torch import nn

from deepspeed_amsp.comm import Communicator
from deepspeed_amsp.mesh import Mesh
from deepspeed_amsp.partition.accounting import Accounting
from deepspeed_amsp.partition.grads import BucketGradients
from deepspeed_amsp.partition.layout import (
    BucketLayout,
    LayoutError,
    OwnerGrid,
    Piece,
    build_buckets,
    renumber,
    shard_pieces,
)
from deepspeed_amsp.partition.optim_states import OwnedStates, cuts_allowed, make_masters
from deepspeed_amsp.partition.params import ShardedUnit, Unit
from deepspeed_amsp.plan.resolve import Plan, PublishMode
from deepspeed_amsp.schedule.gather import Gatherer
from deepspeed_amsp.schedule.hooks import Hooks
from deepspeed_amsp.schedule.publish import Publisher
from deepspeed_amsp.schedule.reduce import GradientReducer

CHECKPOINT_FORMAT = 1


@dataclass(frozen=True)
class OptimizerSettings:
    """What the ds_config says about the update; dtypes are resolved, so there is no None left.

    clip: largest global gradient norm; 0 switches clipping off.
    bucket_bytes: bytes of working-copy dtype in a bucket.
    check_overflow: read the norm on the host once a step and skip the step when it is not finite.
    average: divide by the data-parallel size (gradient_allreduce_op "mean").
    """

    clip: float
    accumulation_dtype: torch.dtype
    wire_dtype: torch.dtype
    bucket_bytes: int
    check_overflow: bool
    average: bool
    allow_untested: bool


class AMSPOptimizer(ZeROOptimizer):  # type: ignore[misc]
    """Owner-sharded optimizer with independent factors for P, G and OS.

    Args:
        engine: asked for the accumulation boundary and for no_sync, never mirrored.
        model: the user's module, its units already placed.
        units: all units in forward order.
        basic: a torch optimizer over the module's parameters; its param_groups are re-pointed to the masters.

    Raises:
        LayoutError: the optimizer cannot work with the plan, or holds tensors that the model does not have.
    """

    def __init__(
        self,
        engine: Any,
        model: nn.Module,
        units: Sequence[Unit],
        basic: torch.optim.Optimizer,
        plan: Plan,
        mesh: Mesh,
        comm: Communicator,
        settings: OptimizerSettings,
    ) -> None:
        super().__init__()
        self._engine = engine
        self._mesh = mesh
        self._comm = comm
        self.plan = plan
        self.settings = settings
        self.units = list(units)
        self._by_index = {unit.index: unit for unit in units}
        self.optimizer = basic
        self._named = {
            spec.name: param for unit in units for spec, param in zip(unit.layout.params, unit.parameters, strict=True)
        }
        self._trainable = self._find_trainable()
        self.layouts = self._build_layouts()
        by_index = self._by_index
        owner = mesh.owner_index
        self.states = OwnedStates(
            basic, self._named, [make_masters(layout, owner, by_index) for layout in self.layouts]
        )
        self._grads = [
            BucketGradients(layout, owner, settings.accumulation_dtype, engine.device) for layout in self.layouts
        ]
        self.publisher = Publisher(self.layouts, by_index, comm, mesh.publish, plan.publish, owner)
        self._gatherer = self._make_gatherer()
        self._reducer = GradientReducer(
            units=[unit for unit in units if any(p in self._trainable for p in unit.parameters)],
            buckets=self._grads,
            comm=comm,
            mesh=mesh,
            mode=plan.reduce,
            wire_dtype=settings.wire_dtype,
            eager_units=plan.overlap.reduce_scatter,
            eager_buckets=plan.overlap.all_reduce,
        )
        self.accounting = Accounting(
            self.units,
            self.layouts,
            self._grads,
            self.states,
            owner,
            mesh.coordinates.inner,
            settings.accumulation_dtype,
        )
        self.gradient_bytes: dict[str, int] = {}
        """Of the first accumulation window, for the memory report: measured once, since measuring waits."""
        self._hooks = Hooks(model, self.units, self.publisher, self._gatherer)
        self._hooks.watch_gradients(list(self._trainable), self._on_gradient)
        self._expose_what_deepspeed_reads()

    # ---- construction -------------------------------------------------------------------------------------

    def _find_trainable(self) -> dict[nn.Parameter, str]:
        """Parameters that require a gradient and are in the optimizer, with their names."""
        names = {param: name for name, param in self._named.items()}
        held = [param for group in self.optimizer.param_groups for param in group["params"]]
        for param in held:
            if param not in names:
                raise LayoutError(
                    f"the optimizer holds a tensor of shape {tuple(param.shape)} and dtype {param.dtype} that is "
                    f"not a floating-point parameter of the model; remove it from the optimizer's param_groups"
                )
        wanted = {id(param) for param in held if param.requires_grad}
        return {param: name for name, param in self._named.items() if id(param) in wanted}

    def _build_layouts(self) -> list[BucketLayout]:
        cuts = cuts_allowed(self.optimizer, self._mesh.sizes.param > 1, self.settings.allow_untested)
        trainable = set(self._trainable.values())
        by_dtype: dict[torch.dtype, list[list[Piece]]] = {}
        for unit in self.units:
            pieces = shard_pieces(unit.layout, unit.index, self._mesh.coordinates.param)
            by_dtype.setdefault(unit.dtype, []).append([p for p in pieces if p.param.name in trainable])
        layouts: list[BucketLayout] = []
        for dtype, groups in by_dtype.items():
            layouts += build_buckets(
                groups,
                OwnerGrid(self._mesh.sizes.outer, self._mesh.sizes.inner),
                max(self.settings.bucket_bytes // dtype.itemsize, 1),
                whole_tensors=not cuts,
                uniform=self.plan.publish is PublishMode.ALL_GATHER,
            )
        return renumber(layouts)

    def _make_gatherer(self) -> Gatherer | None:
        sharded = [unit for unit in self.units if isinstance(unit, ShardedUnit)]
        if not sharded:
            return None
        return Gatherer(
            sharded,
            self._comm,
            self._mesh.gather,
            before_gather=lambda unit: self.publisher.wait_unit(unit.index),
            prefetch_bytes=self.plan.prefetch_bytes,
            overlap=self.plan.overlap.gather,
        )

    def _expose_what_deepspeed_reads(self) -> None:
        """Attributes that the engine and the utilities duck-type on a ZeRO optimizer."""
        self.overflow = False
        self._global_grad_norm: Any = None
        self.custom_loss_scaler = False
        self.external_loss_scale: float | None = None
        self.torch_autocast_gradscaler = None
        self.dynamic_loss_scale = False
        self.loss_scaler = None
        self.cur_scale = 1.0
        self.loss_scale = 1.0
        # One replica of the optimizer states: the engine saves what its ranks hold.
        self.dp_process_group = self._mesh.scalars.handle

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = value

    @property
    def state(self) -> Mapping[Any, Any]:
        return self.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:
        return self.optimizer.defaults

    # ---- backward -----------------------------------------------------------------------------------------

    def _on_gradient(self, unit: Unit, index: int, gradient: torch.Tensor) -> bool:
        refresh = self.should_refresh_expected_hook_count()
        self.reenter_backward_if_needed()
        self._ask_engine()
        complete = self._reducer.add(unit, index, gradient)
        if refresh and not self._backward_hook_state.post_backward_callback_queued:
            # Only the fallback for a torch without post-backward callbacks needs the count.
            expected = count_used_parameters_in_backward(list(self._trainable))
        else:
            expected = self._max_expected_hooks_seen
        self.update_hook_state_and_maybe_run_epilogue(expected)
        return complete

    def _ask_engine(self) -> None:
        self._reducer.boundary = self._engine.is_gradient_accumulation_boundary()
        self._reducer.hold = self._engine.inside_no_sync_ctxt or not self._engine.enable_backward_allreduce

    def reduce_gradients(self, **_: Any) -> None:
        """A backward (or, in unmanaged accumulation, the window) is over: send what is left."""
        self._ask_engine()
        self._reducer.end_of_backward()
        if not self.gradient_bytes and not self._reducer.boundary:
            self._reducer.drain()
            self.gradient_bytes = self.accounting.resting_gradients()

    def overlapping_partition_gradients_reduce_epilogue(self) -> None:
        self.reduce_gradients()

    def finalize_gradient_accumulation_boundary(self) -> None:
        """Unmanaged accumulation: ``step()`` says that the window is over."""
        self._reducer.reduce_staged()

    def backward_epilogue(self, **_: Any) -> None:
        if self._engine.inside_no_sync_ctxt:
            self._reducer.close_held_round()
        self._hooks.end_backward()

    # ---- step ---------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Update the owned masters bucket by bucket in forward order and publish each bucket at once.

        Raises:
            ValueError: a closure was passed.
        """
        if closure is not None:
            raise ValueError("AMSPOptimizer.step takes no closure: gradients are already reduced when it is called")
        self._reducer.drain()
        if not self.gradient_bytes:
            self.gradient_bytes = self.accounting.owned_gradients()
        norm = self._norm()
        self.overflow = self.settings.check_overflow and not math.isfinite(norm.item())
        self._global_grad_norm = float("inf") if self.overflow else norm
        if not self.overflow:
            self._update(self._scale(norm))
        self._reducer.clear()
        self._comm.mark_step()

    def _update(self, scale: torch.Tensor) -> None:
        """Scale gradients and step; per bucket where the optimizer allows it."""
        if not self.states.stepwise:
            for index in range(len(self.layouts)):
                self._load_gradients(index, scale)
            self.states.step_all()
        for index, masters in enumerate(self.states.masters):
            if self.states.stepwise:
                self._load_gradients(index, scale)
                self.states.step_bucket(index)
            for master in masters:
                master.value.grad = None
            self.publisher.publish(index, masters)
        if not self.plan.overlap.publish:
            self.publisher.wait_all()

    def _load_gradients(self, index: int, scale: torch.Tensor) -> None:
        """Give every master of a bucket its averaged and clipped gradient, in the master's dtype."""
        section, start = self._section(index)
        for master in self.states.masters[index]:
            at = master.slot.offset - start
            part = section[at : at + master.slot.piece.numel]
            gradient = part.to(master.value.dtype, copy=True).view(master.value.shape)
            master.value.grad = gradient.mul_(scale.to(gradient.dtype))

    def _section(self, index: int) -> tuple[torch.Tensor, int]:
        """The owned section of a bucket's reduced gradient (zeros if no backward ran) and its offset."""
        grads = self._grads[index]
        start, length = grads.own_range
        if grads.owned is None:
            grads.own(torch.zeros(length, dtype=grads.dtype, device=grads.device))
        assert grads.owned is not None
        return grads.owned, start

    def _norm(self) -> torch.Tensor:
        """Global 2-norm of the averaged gradient, 0-dim fp64, before clipping.

        Each element counts once: owners have distinct tensors, shards distinct elements, and the sum is
        taken over one replica of the optimizer states.
        """
        parts = []
        for index, masters in enumerate(self.states.masters):
            section, start = self._section(index)
            for master in masters:
                at = master.slot.offset - start
                parts.append(section[at : at + master.slot.piece.numel])
        device = self._engine.device
        if parts:
            norms = torch.stack([torch.linalg.vector_norm(part, dtype=_wide(part.dtype)) for part in parts])
            squares = norms.double().square().sum()
        else:
            squares = torch.zeros((), dtype=torch.float64, device=device)
        if self._mesh.scalars.size > 1:
            self._comm.all_reduce(self._mesh.scalars, squares, "gradient norm").wait()
        return squares.sqrt() * self._average

    @property
    def _average(self) -> float:
        return 1.0 / self._mesh.sharding.s_dp if self.settings.average else 1.0

    def _scale(self, norm: torch.Tensor) -> torch.Tensor:
        """Factor for the summed gradients: the mean over replicas times the clipping coefficient, 0-dim."""
        scale = torch.full_like(norm, self._average)
        if self.settings.clip > 0:
            scale = scale * (self.settings.clip / (norm + 1e-6)).clamp(max=1.0)
        return scale

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients of the window, and the ``grad`` of parameters that are not optimized here."""
        self._reducer.clear()
        for param in self._named.values():
            param.grad = None

    # ---- state --------------------------------------------------------------------------------------------

    @property
    def trainable_names(self) -> list[str]:
        return list(self._trainable.values())

    def wait_for_parameters(self) -> None:
        """Make every working copy current."""
        self.publisher.wait_all()

    def gathered_units(self) -> Iterator[tuple[Unit, list[torch.Tensor]]]:
        """Every sharded unit with its whole parameters, one after the other. Collective: all ranks iterate."""
        if self._gatherer is None:
            return
        for unit in self._gatherer.units:
            self._gatherer.gather(unit)
            yield unit, [param.data for param in unit.parameters]
            self._gatherer.free(unit)

    def publish_all(self) -> None:
        """Rebuild all working copies from the masters (after a load)."""
        for index, masters in enumerate(self.states.masters):
            self.publisher.publish(index, masters)
        self.publisher.wait_all()

    @torch.no_grad()
    def refresh_fp32_params(self) -> None:
        """Rebuild the masters from the working copies (after only the module was loaded)."""
        self.publisher.wait_all()
        for master in self.states.all_masters():
            piece = master.slot.piece
            master.value.data.view(-1).copy_(self._by_index[piece.unit].piece_view(piece))

    def _restore_from_bit16_weights(self) -> None:
        self.refresh_fp32_params()

    def state_dict(self) -> dict[str, Any]:
        """Masters and optimizer states that this rank owns, with the plan that cut them."""
        return {"format": CHECKPOINT_FORMAT, "plan": self.plan.fingerprint(), **self.states.state_dict()}

    def load_state_dict(
        self, state_dict_list: Sequence[Mapping[str, Any]], load_optimizer_states: bool = True, **_: Any
    ) -> None:
        """Load what `state_dict` of the same rank, plan and world size made.

        Raises:
            LayoutError: the checkpoint is not ours, or its pieces have other owners.
        """
        index = self._mesh.scalars.index
        saved = state_dict_list[index] if index < len(state_dict_list) else None
        if saved is None or saved.get("format") != CHECKPOINT_FORMAT:
            raise LayoutError(
                "the checkpoint holds no amsp optimizer states of this format; load it with the engine that "
                "wrote it, or pass load_optimizer_states=False to start from its weights"
            )
        self.states.load_state_dict(saved, load_optimizer_states)
        self.publish_all()

    def destroy(self) -> None:
        """Take hooks and watchers off the model. Local: other ranks need not call it."""
        self._hooks.remove()

    def get_lr(self) -> list[float]:
        return [group["lr"] for group in self.param_groups]


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
