"""AMSPOptimizer: what DeepSpeed's engine and utilities expect of a ZeRO optimizer, over our partition and schedule."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from deepspeed.runtime.utils import count_used_parameters_in_backward, is_model_parallel_parameter
from torch import nn

from deepspeed_amsp.comm import Communicator, waits_on_host
from deepspeed_amsp.mesh import Mesh
from deepspeed_amsp.optimizer_surface import OptimizerSurface
from deepspeed_amsp.partition.accounting import Accounting
from deepspeed_amsp.partition.buckets import bucket_layouts, first_buckets
from deepspeed_amsp.partition.grads import BucketGradients
from deepspeed_amsp.partition.offload import STATE_KINDS, move_states
from deepspeed_amsp.partition.optim_states import OwnedStates, cuts_allowed, make_masters
from deepspeed_amsp.partition.params import ShardedUnit, Unit
from deepspeed_amsp.partition.working import working_buckets
from deepspeed_amsp.plan.layout import GATHERED_PADDING_LIMIT, PADDING_LIMIT, LayoutError, OwnerGrid
from deepspeed_amsp.plan.resolve import Plan, PublishMode
from deepspeed_amsp.schedule.agreement import Agreement
from deepspeed_amsp.schedule.gather import Gatherer
from deepspeed_amsp.schedule.hooks import Hooks
from deepspeed_amsp.schedule.publish import Publisher
from deepspeed_amsp.schedule.reduce import GradientReducer
from deepspeed_amsp.settings import OptimizerSettings
from deepspeed_amsp.skips import SkipReport
from deepspeed_amsp.state_access import StateAccess
from deepspeed_amsp.update import OwnerUpdate
from deepspeed_amsp.verify import verify_replicas


class AMSPOptimizer(OptimizerSurface):
    """Owner-sharded optimizer with independent factors for P, G and OS.

    Args:
        engine: asked for the accumulation boundary and for no_sync, never mirrored.
        model: the user's module, its units already placed.
        units: all units in forward order.
        basic: a torch optimizer over the module's parameters; its param_groups are re-pointed to the masters.
        loss_scaler: DeepSpeed's own, static or dynamic.

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
        loss_scaler: Any,
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
        self.layouts = bucket_layouts(
            units,
            set(self._trainable.values()),
            mesh.coordinates.param,
            OwnerGrid(tuple(group.size for group in mesh.stages)),
            settings.bucket_numel,
            whole_tensors=not cuts_allowed(basic, mesh.sizes.param > 1, settings.allow_untested),
            padding_limit=_padding_limit(plan, self.device),
        )
        owner = mesh.owner
        self.states = OwnedStates(
            basic, self._named, [make_masters(layout, owner, self._by_index) for layout in self.layouts]
        )
        self._grads = [
            BucketGradients(layout, owner, settings.accumulation_dtype or dtype, dtype, engine.device)
            for layout, dtype in ((layout, self._by_index[layout.units[0]].dtype) for layout in self.layouts)
        ]
        self.working = working_buckets(self.layouts, self._by_index, plan.publish)
        self.publisher = Publisher(self.working, comm, mesh.publish, plan.publish, engine.device, mesh.merged)
        self._agreement = Agreement(
            self._trainable_anywhere(), comm, mesh.world_scalars, mesh.param_groups, engine.device
        )
        self._gatherer = self._make_gatherer()
        self._reducer = GradientReducer(
            units=[unit for unit in units if any(p in self._trainable for p in unit.parameters)],
            buckets=self._grads,
            comm=comm,
            mesh=mesh,
            mode=plan.reduce,
            wire_dtype=settings.wire_dtype,
            agreement=self._agreement,
            prescale=settings.prescale,
            eager_units=plan.overlap.reduce_scatter,
            eager_buckets=plan.overlap.all_reduce,
            threads=waits_on_host(self.device),
        )
        self._update = OwnerUpdate(
            self.states, self._grads, self.publisher, comm, (mesh.scalars, mesh.model), self._counted(), engine.device
        )
        self.accounting = Accounting(self.units, self.layouts, self._grads, self.states, owner, mesh.kept_coordinates)
        self.gradient_bytes: dict[str, int] = {}
        """Of the first accumulation window, for the memory report: measured once, since measuring waits."""
        self._owned_names = sorted({master.slot.piece.param.name for master in self.states.all_masters()})
        self._hooks = Hooks(model, self.units, self.publisher, self._gatherer)
        self._hooks.watch_gradients(list(self._trainable), self._on_gradient)
        self._steps = 0
        self.publish_later = plan.overlap.publish
        """False waits for publishes in the step: compiled code reads parameters unseen."""
        self._skips = SkipReport(mesh.rank)
        self.expose(loss_scaler, mesh.scalars.handle)
        self.access = StateAccess(self, mesh, comm, engine.seq_data_parallel_group)

    # ---- construction -------------------------------------------------------------------------------------

    def _find_trainable(self) -> dict[nn.Parameter, str]:
        """Parameters that require a gradient and are in the optimizer, with their names."""
        names = {param: name for name, param in self._named.items()}
        groups = self.optimizer.param_groups
        held = [param for group in groups for param in group["params"] if param.numel() or param in names]
        for param in held:
            if param not in names and param.requires_grad:
                raise LayoutError(
                    f"the optimizer holds a tensor of shape {tuple(param.shape)} and dtype {param.dtype} that is "
                    f"not a floating-point parameter of the model; remove it from the optimizer's param_groups"
                )
        wanted = {id(param) for param in held if param.requires_grad}
        return {param: name for name, param in self._named.items() if id(param) in wanted}

    def _trainable_anywhere(self) -> list[str]:
        """What is trained on any rank, in one order: parts of a model may have parameters of their own."""
        mine = list(self._trainable.values())
        if self._mesh.model.size == 1:
            return mine
        everybodys = self._comm.all_gather_objects(self._mesh.world, mine)
        return list(dict.fromkeys(name for names in everybodys for name in names))

    def _counted(self) -> set[str]:
        """Parameters whose gradients this rank's part of the model adds to the norm: those that are cut, and, in the
        first part, those that all parts have alike."""
        first = self._mesh.model.index == 0
        return {name for param, name in self._trainable.items() if first or is_model_parallel_parameter(param)}

    def _make_gatherer(self) -> Gatherer | None:
        sharded = [unit for unit in self.units if isinstance(unit, ShardedUnit)]
        if not sharded:
            return None
        return Gatherer(
            sharded,
            self._comm,
            self._mesh.gather,
            before_gather=lambda unit: self.publisher.wait_unit(unit.index),
            published_with=first_buckets(self.units, set(self._trainable.values()), self.settings.bucket_numel)
            if self._mesh.publish.size > 1 and self.plan.overlap.publish
            else {},
            issued=self._agreement.issued,
            prefetch_bytes=self.plan.prefetch_bytes,
            overlap=self.plan.overlap.gather,
            kept_bytes=self.plan.kept_bytes,
            persistent=[
                unit.index for unit, stays in zip(sharded, self.settings.persistent(sharded), strict=True) if stays
            ],
            log_every_change=self.settings.log_order_changes,
        )

    # ---- backward -----------------------------------------------------------------------------------------

    def _on_gradient(self, unit: Unit, index: int, gradient: torch.Tensor) -> None:
        refresh = self.should_refresh_expected_hook_count()
        self.reenter_backward_if_needed()
        if not self._reducer.open:
            self._ask_engine()
        self._reducer.add(unit, index, gradient)
        if refresh and not self._backward_hook_state.post_backward_callback_queued:
            # Only the fallback for a torch without post-backward callbacks needs the count.
            expected = count_used_parameters_in_backward(list(self._trainable))
        else:
            expected = self._max_expected_hooks_seen
        self.update_hook_state_and_maybe_run_epilogue(expected)

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
        self._reducer.settle()
        self._hooks.end_backward()

    # ---- step ---------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Update the owned masters bucket by bucket in forward order and publish each bucket at once.

        Raises:
            ValueError: a closure was passed.
            DivergenceError: ranks ran different modules (s_p > 1).
            ReplicaMismatch: ``verify_every`` found replicas that differ.
        """
        if closure is not None:
            raise ValueError("AMSPOptimizer.step takes no closure: gradients are already reduced when it is called")
        if self._reducer.open:
            # A backward whose end nobody announced: the loss was not made by engine.forward.
            self.reduce_gradients()
        elif self._reducer.held:
            # Every backward of the window was inside no_sync.
            self._reducer.reduce_staged()
        self._verify_replicas()
        self._agreement.check_late()
        agreed, ticket = self._agreement.ask(self._reducer.late())
        early = self._updates_on_arrival and bool(self.gradient_bytes)
        if not early:
            self._reducer.drain()
        if ticket is not None:
            ticket.wait()
        if not self.gradient_bytes:
            self.gradient_bytes = self.accounting.owned_gradients()
        if not self._skip_or_update(agreed, early):
            self._steps += 1
        self._reducer.clear()
        self._agreement.start_window()
        self._comm.mark_step()

    @property
    def _updates_on_arrival(self) -> bool:
        """Whether buckets need not wait for each other: nothing about all gradients decides on any update."""
        settings = self.settings
        return settings.clip == 0 and not settings.check_overflow and self.states.stepwise

    def _skip_or_update(self, agreed: torch.Tensor, early: bool) -> bool:
        """Whether the step was skipped because of a gradient that is not finite; all ranks decide alike."""
        settings, scale = self.settings, self.to_mean
        norm = None
        if not early and (settings.compute_norm or settings.check_overflow or settings.clip > 0):
            norm = self._update.norm() * scale
        unused, late = self._read(agreed, norm)
        if late:
            self._reducer.reduce_late(late)
            norm = None if norm is None else self._update.norm() * scale
            self.overflow = settings.check_overflow and norm is not None and not math.isfinite(norm.item())
        if not self.overflow:
            factor = torch.full((), scale, dtype=torch.float64, device=self._engine.device)
            if settings.clip > 0 and norm is not None:
                factor = factor * (settings.clip / (norm + 1e-6)).clamp(max=1.0)
            self.values_change()
            arrival = self._reducer.finish_bucket if early else None
            self._update.apply(factor, unused, wait=not self.publish_later, arrival=arrival)
            self.values_changed()
        if early and settings.compute_norm:
            norm = self._update.norm() * scale
        self._global_grad_norm = float("inf") if self.overflow else norm if settings.compute_norm else None
        self._skips.report(self.overflow, self.loss_scale)
        with self._skips.one_line(self.overflow):
            self.loss_scaler.update_scale(self.overflow)
        return self.overflow

    def _read(self, agreed: torch.Tensor, norm: torch.Tensor | None) -> tuple[set[str], set[str]]:
        """The one host read of a step: sets ``overflow``, compares the ranks' orders, returns the unused parameters
        and those with late gradients.

        There is something to read if overflow is checked, or if this rank owns a parameter that it had no gradient
        for. With sharded parameters there always is, but on an accelerator that can wait for the next step.

        Raises:
            RuntimeError: gradients came late, and not every rank reads that.
        """
        check = self.settings.check_overflow and norm is not None
        skips = not self.settings.zero_fill_unused and self._agreement.must_read(self._owned_names)
        waits = self._agreement.has_order and waits_on_host(self.device)
        everybody = check or waits  # whether to skip is this rank's own affair, and nothing collective follows from it
        self.overflow = False
        late = self._reducer.late()
        unused: set[str] = set()
        if everybody or skips:
            first = norm if norm is not None else torch.zeros((), dtype=torch.float64, device=agreed.device)
            # Counts, flags and 32-bit hashes are exact in fp64, so one transfer carries everything.
            values = torch.cat([first.view(1), agreed.double()]).tolist()
            self.overflow = check and not math.isfinite(values[0])
            unused = self._agreement.unused(values[1:], self._owned_names) if skips else set()
            late = self._agreement.late(values[1:])
            if everybody:
                self._agreement.check(values[1:])
        if not everybody:
            if late:
                raise RuntimeError(
                    "gradients arrived after their bucket had been sent: a block is recomputed several times in one "
                    'backward. Set "amsp": {"overlap": {"all_reduce": false}}, checkpoint with use_reentrant=False, or '
                    'leave "bf16": {"check_grad_overflow"} on'
                )
            self._agreement.check_later(agreed)
        return unused, late

    @property
    def to_mean(self) -> float:
        """Factor from summed, loss-scaled gradients to the mean over replicas."""
        return 1.0 / self.settings.divisor / self.settings.prescale / self.loss_scale

    def _verify_replicas(self) -> None:
        every = self.settings.verify_every
        if every and self._steps and self._steps % every == 0:
            verify_replicas(self.units, self._comm, self._mesh, self._engine.device)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients of the window, and the ``grad`` of parameters that are not optimized here."""
        self._reducer.clear()
        self._agreement.start_window()
        for param in self._named.values():
            param.grad = None

    # ---- state --------------------------------------------------------------------------------------------

    @property
    def trainable_names(self) -> list[str]:
        return list(self._trainable.values())

    def drain(self) -> None:
        """Wait until every gradient that was sent is where it rests."""
        self._reducer.drain()

    def wait_for_parameters(self) -> None:
        """Make every working copy current."""
        self.publisher.wait_all()

    @property
    def trainable(self) -> Mapping[nn.Parameter, str]:
        return self._trainable

    @property
    def gradients(self) -> Sequence[BucketGradients]:
        return self._grads

    @property
    def device(self) -> torch.device:
        return torch.device(self._engine.device)

    def publish_all(self) -> None:
        """Rebuild all working copies from the masters (after a load)."""
        for index, masters in enumerate(self.states.masters):
            self.publisher.publish(index, masters)
        self.publisher.wait_all()
        self.values_changed()

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
        """The basic optimizer's, of the masters that this rank owns. Checkpoints are the engine's business."""
        return self.optimizer.state_dict()

    def load_state_dict(self, *_: Any, **__: Any) -> None:
        """Refused, since what a rank owns depends on the plan.

        Raises:
            LayoutError: always.
        """
        raise LayoutError("optimizer states are loaded by engine.load_checkpoint, which finds their owners")

    def offload_states(self, include: Collection[Any], device: Any, pin_memory: bool, non_blocking: bool) -> None:
        """Move the named states to the CPU (between steps, to make room); `reload_states` brings them back."""
        self.wait_for_parameters()
        wanted = {state.value for state in include}
        self._move(wanted, torch.device(device.value), pin_memory, non_blocking)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Bring everything back that `offload_states` moved."""
        self._move(set(STATE_KINDS), self.device, False, non_blocking)

    def _move(self, wanted: Collection[str], device: torch.device, pin_memory: bool, non_blocking: bool) -> None:
        move_states(self.units, self.working, self.states, self._grads, wanted, device, pin_memory, non_blocking)

    def destroy(self) -> None:
        """Take hooks, watchers and marks off the model, once it has its last values."""
        self.publisher.close()
        self._reducer.close()
        self._hooks.remove()
        self.access.detach()


def _padding_limit(plan: Plan, device: torch.device) -> float:
    """How much longer padding may make a bucket; gloo reduces to sections of any length in one call."""
    limit = 1.0 if waits_on_host(device) else PADDING_LIMIT
    return GATHERED_PADDING_LIMIT if plan.publish is PublishMode.ALL_GATHER else limit
