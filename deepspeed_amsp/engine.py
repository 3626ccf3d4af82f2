"""AMSPEngine: DeepSpeed's engine with independent sharding factors. The only file that knows its internals."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime import lr_schedules
from deepspeed.runtime.config import DtypeEnum
from deepspeed.runtime.fp16.loss_scaler import CreateLossScaler
from deepspeed.runtime.zero.config import ZERO_OPTIMIZATION
from deepspeed.utils import logger
from torch import nn

from deepspeed_amsp.autoplan import Asked, searched
from deepspeed_amsp.checkpoint.engine import CheckpointingEngine
from deepspeed_amsp.comm import from_every_rank, host_names
from deepspeed_amsp.config import check_stage, read_block
from deepspeed_amsp.config_preflight import preflight_warnings
from deepspeed_amsp.config_zero import ZeroSettings, read_zero_settings
from deepspeed_amsp.leaf_table import agreed_table, read_table, table_name
from deepspeed_amsp.log import start_is_shown
from deepspeed_amsp.mesh import launch_order_warning
from deepspeed_amsp.model_checks import (
    FREED,
    ModuleTree,
    is_compiled,
    refusal,
    refuse_config,
    refuse_mixed_parts,
    refuse_model,
    refuse_scripted,
)
from deepspeed_amsp.model_parallel import find_data_parallel
from deepspeed_amsp.optimizer import AMSPOptimizer
from deepspeed_amsp.partition.materialise import Materialiser
from deepspeed_amsp.partition.params import ReplicatedUnit, ShardedUnit, find_units
from deepspeed_amsp.plan.resolve import data_parallel, make_plan, with_zero_settings
from deepspeed_amsp.runtime import Runtime, communication_logger
from deepspeed_amsp.settings import OptimizerSettings
from deepspeed_amsp.topology import detect_topology
from deepspeed_amsp.trace.breakdown import Breakdown


class AMSPEngine(CheckpointingEngine):
    """A DeepSpeedEngine whose parameters, gradients and optimizer states follow the "amsp" block.

    Raises at construction, on every rank, before any group is made:
        ConfigError: the block or what stands next to it in the ds_config.
        FactorError: factors that are not legal on this cluster.
        TopologyError: nodes of different size, ranks of a host that are not contiguous, or a table of leaf
            switches that does not fit the hosts or that ranks read differently.
    """

    dont_change_device: bool

    def __init__(self, args: Any, model: nn.Module, *rest: Any, **kwargs: Any) -> None:
        started = time.perf_counter()
        config_class = kwargs["config_class"]
        block = read_block(config_class._param_dict)
        assert block is not None, "AMSPEngine is only made for an enabled amsp block"
        refuse_model(model)
        share = find_data_parallel(kwargs.get("mpu"), kwargs.get("mesh_device"), from_every_rank)
        refuse_mixed_parts(model, share)
        refuse_config(config_class._param_dict, config_class.world_size, share)
        table = block.topology.leaf_switches
        topology = detect_topology(
            block.topology.gpus_per_node,
            os.environ,
            dist.get_world_size(),
            host_names(),
            agreed_table(from_every_rank(read_table(table)), table_name(table)),
            table_name(table),
        )
        within = share.topology(topology)
        zero = read_zero_settings(config_class._param_dict, config_class.zero_config)
        short = config_class.bfloat16_config.enabled or config_class.float16_config.enabled
        cluster = data_parallel(within.world_size, within.gpus_per_node)
        sharding, found = None, ""
        if block.sharding == "search":
            asked = _asked(config_class, kwargs.get("optimizer"), zero)
            sharding, found = searched(block, model, asked, cluster, from_every_rank)
        plan = make_plan(block, within.world_size, within.gpus_per_node, sharding)
        plan = with_zero_settings(plan, zero, itemsize=2 if short else 4)
        plan = replace(plan, node_order=share.node_order(topology, plan.sharding))
        if plan.sharding.s_p > 1:
            refuse_scripted(model)
        check_stage(config_class._param_dict, plan.sharding.stage, plan.sharding.stage_reason)
        # Set before Module.__init__ runs, which is fine for anything that is no module, parameter or tensor.
        self.amsp = Runtime(plan, topology, share)
        self._block = block
        self._zero = zero
        super().__init__(args, model, *rest, **kwargs)
        self._tree = ModuleTree(self.module)
        self.amsp.comm.forget()
        self.amsp.comm.observer = communication_logger()
        self.amsp.comm.breakdown = Breakdown(self.timers) if self.wall_clock_breakdown() else None
        if dist.get_rank() == 0:
            self._announce(found, time.perf_counter() - started)
        self.amsp.ready(self.module, lambda: is_compiled(self.module))

    def _announce(self, found: str, seconds: float) -> None:
        """The plan, its groups and memory, and what is odd about the ds_config: ten lines at most.

        Args:
            found: the planner's line; empty if it was not asked.
            seconds: that the engine took to be made.
        """
        made = f"engine made in {seconds:.1f} s"
        with start_is_shown(self.log_level()):
            for line in [*([found] if found else []), *self.amsp.describe(), made]:
                logger.info(f"amsp: {line}")
        lines = preflight_warnings(self._config._param_dict, self._config.gradient_clipping)
        order = launch_order_warning(torch.device(self.device).type, self.amsp.plan.merge_communicators, os.environ)
        for line in [*lines, *([order] if order else [])]:
            logger.warning(f"amsp: {line}")

    # ---- parameters ---------------------------------------------------------------------------------------

    def _configure_distributed_model(self, model: nn.Module) -> None:
        """Cast and place the module; with s_p > 1 the device only ever sees one whole unit at a time."""
        materialise = Materialiser(model, torch.device(self.device), reads=self.amsp.mesh.starts)
        if not self._sharded:
            for name, module in model.named_modules():
                materialise(module, name)
        stay = self.dont_change_device
        self.dont_change_device = stay or self._sharded
        try:
            super()._configure_distributed_model(model)
        finally:
            self.dont_change_device = stay
        members = find_units(self.module, prepare=materialise)
        if not self._sharded:
            self.amsp.units = [ReplicatedUnit(index, unit) for index, unit in enumerate(members)]
            return
        mesh = self.amsp.mesh
        for index, unit in enumerate(members):
            sharded = ShardedUnit(
                index, unit, mesh.sizes.param, mesh.coordinates.param, self.device, self._broadcast_tensor
            )
            self.amsp.units.append(sharded)
        if not stay:
            self._move_rest_to_device()

    def _broadcast_model(self) -> None:
        """All that share parameters start from their first rank's values: here, or unit by unit while sharding."""
        if not self._sharded:
            for param in self.module.parameters():
                param.data = param.data.contiguous()
                self._broadcast_tensor(param.data)
            self._broadcast_buffers()

    def _broadcast_buffers(self) -> None:
        """Buffers, too, start as the first rank's, as in DistributedDataParallel; DeepSpeed leaves them to seeds."""
        for buffer in self.module.buffers():
            if buffer.layout is not torch.strided:
                continue  # has no bytes of its own to send
            whole = buffer.contiguous().resolve_conj().resolve_neg()
            self._broadcast_tensor(whole)
            if whole is not buffer:
                buffer.data = whole  # one that is expanded cannot be written to

    def _broadcast_tensor(self, tensor: torch.Tensor) -> None:
        mesh = self.amsp.mesh
        if mesh.data_parallel.size > 1 and tensor.numel():
            # As bytes, since not every backend knows every dtype; flat first, since a scalar has no byte view.
            octets = tensor.view(-1).view(torch.uint8)
            self.amsp.comm.broadcast(mesh.data_parallel, octets, mesh.first_rank, "initial values").wait()

    def _move_rest_to_device(self) -> None:
        """Buffers and parameters without a unit follow the device; the units are there already."""
        self.module.to(self.device)
        for param in self.module.parameters():
            if not param.dtype.is_floating_point:
                param.data = param.data.contiguous()
                self._broadcast_tensor(param.data)
        self._broadcast_buffers()

    def _forward_prologue(self, inputs: Any, kwargs: Any) -> Any:
        self.amsp.comm.phase("forward")
        with self._unpartitioned():
            return super()._forward_prologue(inputs, kwargs)

    def _forward_epilogue(self) -> None:
        with self._unpartitioned():
            super()._forward_epilogue()
        self.amsp.comm.phase(None)

    def _backward_prologue(self) -> None:
        self.amsp.comm.phase("backward")
        super()._backward_prologue()

    def _backward_epilogue(self) -> None:
        super()._backward_epilogue()
        self.amsp.comm.phase(None)

    # ---- optimizer ----------------------------------------------------------------------------------------

    def _do_optimizer_sanity_check(self, basic_optimizer: torch.optim.Optimizer) -> str:
        """Every precision goes through AMSPOptimizer; untested optimizers are its business, too."""
        return str(ZERO_OPTIMIZATION)

    def _configure_zero_optimizer(self, optimizer: torch.optim.Optimizer | None) -> AMSPOptimizer:
        if optimizer is None:
            raise refusal("optimizer", "there is none; an amsp engine trains, so name one or pass one to initialize")
        amsp = self.amsp
        amsp.optimizer = AMSPOptimizer(
            self, self.module, amsp.units, optimizer, amsp.plan, amsp.mesh, amsp.comm, self._settings(), self._scaler()
        )
        if is_compiled(self.module):
            self._prepare_for_compiled_code()
        return amsp.optimizer

    def _prepare_for_compiled_code(self) -> None:
        if self._sharded:
            raise refusal(
                "amsp.sharding.parameters",
                "torch.compile cannot be used with sharded parameters; set it to [1, 1] or do not compile",
            )
        if self.amsp.optimizer is not None:
            self.amsp.optimizer.publish_later = False

    def compile(self, *args: Any, **kwargs: Any) -> Any:
        """As DeepSpeed's, for whole parameters. Compiled code reads them unseen, so steps wait for publishes."""
        self._prepare_for_compiled_code()
        return super().compile(*args, **kwargs)

    def zero_grad(self) -> None:
        """Drop the gradients of the window, wherever they rest."""
        super().zero_grad()
        if self.amsp.optimizer is not None:
            self.amsp.optimizer.zero_grad()

    def _settings(self) -> OptimizerSettings:
        config = self._config
        named_dtype = config.grad_accum_dtype
        predivide = float(self.gradient_predivide_factor())
        return OptimizerSettings(
            clip=float(self.gradient_clipping()),
            accumulation_dtype=None if named_dtype is None else DtypeEnum(named_dtype).value,
            wire_dtype=config.communication_data_type and self.communication_data_type,
            bucket_numel=self._bucket_numel(),
            # DeepSpeed skips a step without a finite norm in fp32, too; only bf16 has a switch for it.
            check_overflow=bool(config.bfloat16_config.check_grad_overflow)
            if self.bfloat16_enabled()
            else self.fp16_enabled() or self._zero.compute_grad_norm,
            divisor=self.amsp.data_parallel.batches if self.gradient_average else 1,
            prescale=1.0 / (predivide if self.postscale_gradients() else self.amsp.plan.sharding.s_dp),
            compute_norm=self._zero.compute_grad_norm,
            allow_untested=bool(self.zero_allow_untested_optimizer()),
            zero_fill_unused=self._block.unused_parameters == "zero_fill",
            verify_every=self._block.verify_every,
            persistence=self._zero.persistent,
            log_order_changes=self._zero.log_order_changes,
        )

    def _scaler(self) -> Any:
        model_dtype, _ = self.get_data_types()
        return CreateLossScaler(
            model_dtype, self.loss_scale(), self.dynamic_loss_scale(), self.dynamic_loss_scale_args()
        )

    def _bucket_numel(self) -> int:
        if self.amsp.plan.bucket_bytes is None:
            return self._zero.bucket_numel
        model_dtype, _ = self.get_data_types()
        return max(self.amsp.plan.bucket_bytes // int(model_dtype.itemsize), 1)

    def _scheduler_from_config(self, optimizer: Any) -> Any:
        """torch's schedulers insist on a torch optimizer; DeepSpeed's take ours. They edit the same groups."""
        ours = self.scheduler_name() is None or hasattr(lr_schedules, self.scheduler_name())
        return super()._scheduler_from_config(optimizer if ours else self.basic_optimizer)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """As DeepSpeed's.

        Raises:
            ModelChanged: parameters came, went or thawed since the engine was made.
        """
        self._tree.check()
        return super().forward(*inputs, **kwargs)

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """As DeepSpeed's.

        Raises:
            ModelChanged: as `forward`.
            CheckpointError: on every rank, after the update, if a save in the background has failed.
        """
        self._tree.check()
        boundary = self.is_gradient_accumulation_boundary()
        self.amsp.comm.phase("step")
        steps = self.global_steps
        result = super().step(*args, **kwargs)
        self.amsp.comm.phase(None)
        if boundary and self.amsp.comm.breakdown is not None:
            self.amsp.comm.breakdown.step_over()
        if self.global_steps > steps and self.monitor.enabled and self.global_rank == 0:
            scalars = self.amsp.scalars().items()
            self.monitor.write_events([(f"Train/AMSP/{name}", value, self.global_samples) for name, value in scalars])
        self.amsp.step_over()
        if boundary:
            self._check_save()
        return result

    def allreduce_gradients(self, bucket_size: int = 0) -> None:
        """End of a backward: what the hooks left over is sent. The bucket size is the plan's."""
        boundary = self.is_gradient_accumulation_boundary()
        self.optimizer.set_gradient_accumulation_boundary(boundary)
        self.optimizer.reduce_gradients()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Defer the reduction of this backward's gradients to a later one; only where gradients rest whole.

        Raises:
            RuntimeError: gradients or parameters are sharded (stage 2 and 3), so every backward reduces.
        """
        if self.zero_optimization_partition_gradients():
            raise RuntimeError(
                f"no_sync() needs gradients that rest whole on every rank, but this plan shards them "
                f"({self.amsp.plan.sharding}). Use gradient_accumulation_steps, which defers what can be deferred, or "
                f"set amsp.sharding.gradients and parameters to [1, 1]"
            )
        with super().no_sync():
            yield

    def destroy(self) -> None:
        """Take everything off the module, DeepSpeed's own forward hooks included, once it has its last values."""
        try:
            super().destroy()
        finally:
            self._take_off()

    def _take_off(self) -> None:
        for name in ("module_forward_pre_hook", "module_forward_post_hook"):
            if name in self.__dict__:
                self.__dict__.pop(name).remove()
        runtime = self.__dict__.get("amsp")
        if runtime is not None:
            runtime.mesh.destroy()
            for unit in self._sharded_units():
                for param in unit.parameters:
                    vars(param)[FREED] = True


def _asked(config: Any, client_optimizer: Any, zero: ZeroSettings) -> Asked:
    """What the planner wants to know of a DeepSpeedConfig; an optimizer passed to ``initialize`` wins over its."""
    half = torch.float16 if config.float16_config.enabled else torch.float32
    dtype = torch.bfloat16 if config.bfloat16_config.enabled else half
    client = type(client_optimizer).__name__ if client_optimizer is not None else None
    return Asked(
        micro_batch=config.train_micro_batch_size_per_gpu,
        micro_batches=config.gradient_accumulation_steps,
        stage=config.zero_optimization_stage,
        dtype=dtype,
        gradient_dtype=torch.float32 if config.grad_accum_dtype == "fp32" else dtype,
        optimizer=client or config.optimizer_name or "adamw",
        clipping=config.gradient_clipping > 0,
        bucket_elements=zero.bucket_numel,
        zero=zero,
    )
