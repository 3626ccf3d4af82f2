"""What of DeepSpeed's engine saves, loads and exports, for states that are cut by the plan.

A checkpoint is for the plan, world size and node order that wrote it.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine

from deepspeed_amsp.checkpoint.plan_file import check_written_plan, write_plan
from deepspeed_amsp.partition.params import ShardedUnit, Unit
from deepspeed_amsp.plan.layout import LayoutError
from deepspeed_amsp.runtime import Runtime


class CheckpointingEngine(DeepSpeedEngine):  # type: ignore[misc]
    """The base of AMSPEngine, which fills in ``amsp`` before DeepSpeed's constructor runs."""

    amsp: Runtime
    _unpartitioned_view = False

    @property
    def _sharded(self) -> bool:
        return self.amsp.plan.sharding.s_p > 1

    @contextmanager
    def _unpartitioned(self) -> Iterator[None]:
        """Let an engine method take its path for whole parameters: the stage 3 path is made for ``ds_`` ones."""
        before, self._unpartitioned_view = self._unpartitioned_view, True
        try:
            yield
        finally:
            self._unpartitioned_view = before

    def zero_optimization_partition_weights(self) -> bool:
        return not self._unpartitioned_view and bool(super().zero_optimization_partition_weights())

    def _configure_checkpointing(self) -> None:
        super()._configure_checkpointing()
        first_replica = self.amsp.mesh.first_replica
        self.save_zero_checkpoint = first_replica
        if self._sharded:
            self.save_non_zero_checkpoint = first_replica

    def module_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The module's state; with s_p > 1 this rank's shards under ``amsp_shards`` instead of parameters."""
        self._wait_for_parameters()
        state = super().module_state_dict(*args, **kwargs)
        if not self._sharded:
            return state
        held = {spec.name for unit in self.amsp.units for spec in unit.layout.params}
        held |= {alias for alias, name in self._get_shared_params().items() if name in held}
        rest = OrderedDict((name, value) for name, value in state.items() if name not in held)
        wanted = [
            unit for unit in self._sharded_units() if unit.trainable or not kwargs.get("exclude_frozen_parameters")
        ]
        rest["amsp_shards"] = {_unit_key(unit): unit.shard.detach() for unit in wanted}
        return rest

    def load_module_state_dict(
        self,
        checkpoint: Mapping[str, Any],
        strict: bool = True,
        custom_load_fn: Callable[..., None] | None = None,
        **_: Any,
    ) -> None:
        self._wait_for_parameters()
        state = dict(checkpoint["module"])
        shards = state.pop("amsp_shards", None)
        if custom_load_fn is not None:
            if self._sharded:
                raise LayoutError("custom_load_fn needs whole parameters; load with amsp.sharding.parameters [1, 1]")
            custom_load_fn(src=state, dst=self.module)
            return
        if not self._sharded:
            # Frozen parameters may have been left out on purpose (exclude_frozen_parameters).
            absent = self._frozen_names() - state.keys()
            kept = {name: value for name, value in self.module.state_dict().items() if name in absent}
            self.module.load_state_dict({**state, **kept}, strict=strict)
            return
        if shards is None:
            raise LayoutError("the checkpoint holds whole parameters, but this plan needs the shards of its own plan")
        self.optimizer.values_change()
        for unit in self._sharded_units():
            if unit.trainable or _unit_key(unit) in shards:
                unit.shard.copy_(shards[_unit_key(unit)])
        self.optimizer.values_changed()
        self.module.load_state_dict(state, strict=False)

    def load_checkpoint(self, load_dir: str, tag: str | None = None, *args: Any, **kwargs: Any) -> Any:
        """As DeepSpeed's, for a checkpoint of the same plan, world size and node order.

        Raises:
            LayoutError: on every rank, when another plan, world size or node order wrote the checkpoint.
        """
        check_written_plan(load_dir, tag, self.amsp.plan)
        with self._unpartitioned():
            result = super().load_checkpoint(load_dir, tag, *args, **kwargs)
        self._wait_for_parameters()
        return result

    def save_checkpoint(self, save_dir: str, tag: str | None = None, *args: Any, **kwargs: Any) -> Any:
        self._wait_for_parameters()
        with self._unpartitioned():
            return super().save_checkpoint(save_dir, tag, *args, **kwargs)

    def _create_checkpoint_file(self, save_dir: str, tag: str, zero_checkpoint: bool) -> bool:
        created = super()._create_checkpoint_file(save_dir, tag, zero_checkpoint)
        if dist.get_rank() == 0 and not zero_checkpoint:
            write_plan(os.path.join(save_dir, str(tag)), self.amsp.plan)
        return bool(created)

    def _get_ckpt_name(
        self, checkpoints_path: str, tag: str, mp_placeholder: str | None = None, pp_placeholder: str | None = None
    ) -> str:
        """One model file, or with s_p > 1 one for every rank of a replica: each holds its shards."""
        with self._unpartitioned():
            path = str(super()._get_ckpt_name(checkpoints_path, tag, mp_placeholder, pp_placeholder))
        if not self._sharded:
            return path
        rank = pp_placeholder if pp_placeholder is not None else self.amsp.mesh.scalars.index
        return os.path.join(os.path.dirname(path), f"zero_pp_rank_{rank}_{os.path.basename(path)}")

    def _get_zero_param_shapes(self) -> list[dict[str, torch.Size]]:
        """Full shapes of the optimized parameters, by name, one dictionary for all groups."""
        optimized = set(self.optimizer.trainable_names)
        specs = [spec for unit in self.amsp.units for spec in unit.layout.params]
        return [OrderedDict((spec.name, torch.Size(spec.shape)) for spec in specs if spec.name in optimized)]

    def _get_zero_frozen_param_attributes(self, attr_func: Callable[[Any], Any]) -> None:
        """Frozen parameters are part of the module state; nothing is saved twice."""
        return

    def _get_shared_params(self) -> dict[str, str]:
        first: dict[int, str] = {}
        shared = {}
        for name, param in self.module.named_parameters(remove_duplicate=False):
            if id(param) in first:
                shared[name] = first[id(param)]
            first.setdefault(id(param), name)
        return shared

    def save_16bit_model(self, *args: Any, **kwargs: Any) -> bool:
        self._wait_for_parameters()
        return bool(super().save_16bit_model(*args, **kwargs))

    def _copy_recovery_script(self, save_path: str) -> None:
        """DeepSpeed's zero_to_fp32.py cannot read our files, so it is not put beside them."""

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> Any:
        """Whole working copies on the CPU of rank 0, gathered unit by unit; None on other ranks. Collective."""
        self._wait_for_parameters()
        keep = dist.get_rank() == 0
        whole: dict[str, torch.Tensor] = {}
        for unit, values in self.optimizer.gathered_units():
            if keep:
                names = (spec.name for spec in unit.layout.params)
                whole.update((name, value.detach().cpu().clone()) for name, value in zip(names, values, strict=True))
        if not keep:
            return None
        aliases = self._get_shared_params()
        frozen = self._frozen_names()
        state = OrderedDict()
        for name, value in self.module.state_dict().items():
            source = aliases.get(name, name)
            if not (exclude_frozen_parameters and source in frozen):
                state[name] = whole[source] if source in whole else value.cpu()
        return state

    def _frozen_names(self) -> set[str]:
        return {name for name, param in self.module.named_parameters() if not param.requires_grad}

    def _sharded_units(self) -> list[ShardedUnit]:
        return [unit for unit in self.amsp.units if isinstance(unit, ShardedUnit)]

    def _wait_for_parameters(self) -> None:
        if self.amsp.optimizer is not None:
            self.amsp.optimizer.wait_for_parameters()


def _unit_key(unit: Unit) -> str:
    return f"{unit.index}:{unit.name}:{unit.dtype}"
