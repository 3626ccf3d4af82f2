"""What kinds of model (and late, of config) an amsp engine refuses, or treats with more care."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.moe.layer import MoE
from deepspeed.runtime.zero.parameter_offload import ZeROOrderedDict
from torch import nn

from deepspeed_amsp.config import ConfigError, Problem, preflight
from deepspeed_amsp.config_preflight import lookup, shown
from deepspeed_amsp.data_parallel import DataParallel
from deepspeed_amsp.partition.materialise import is_cut, whole_shape
from deepspeed_amsp.state_access import StateAccess

FREED = "_amsp_freed"
"""Set on parameters whose engine is gone and whose values went with it."""


def refusal(path: str, reason: str) -> ConfigError:
    """A ConfigError about one line of the config."""
    return ConfigError([Problem(path, reason)])


def refuse_model(model: nn.Module) -> None:
    """Raises ConfigError for a model that cannot be trained here."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            raise refusal(
                "amsp",
                f"{name} has max_norm, which rewrites its weight in every forward; the optimizer's master would undo "
                f"that. Build it without max_norm and normalise what it returns",
            )
    if any(isinstance(module, MoE) for module in model.modules()):
        raise refusal("amsp", "deepspeed.moe.layer.MoE has experts of its own on every rank, which would be averaged")
    if any(isinstance(module._parameters, ZeROOrderedDict) for module in model.modules()):
        raise refusal(
            "amsp", "an engine of DeepSpeed's own stage 3 was made over this model, and left its hooks; build it anew"
        )
    for name, param in model.named_parameters():
        if getattr(param, FREED, False):
            raise refusal(
                "amsp",
                f"{name} is empty: an engine with sharded parameters was made over this model and destroyed. Build the "
                f"model anew, or gather its weights (engine.save_16bit_model) before destroying the engine",
            )
        if is_cut(param) and vars(param)["nvme_swapper"] is not None:
            raise refusal("amsp", f"zero.Init has put {name} on NVMe; build the model without a remote_device")
        if isinstance(getattr(param, "_z3_optimizer", None), StateAccess):
            raise refusal("amsp", "another amsp engine was made over this model; destroy that one first")


def refuse_mixed_parts(model: nn.Module, data_parallel: DataParallel) -> None:
    """Raises ConfigError where zero.Init has cut parameters over ranks that hold different parts of the model.

    It gives all of these ranks the values of the first, and the parts would never differ.
    """
    if data_parallel.parts == 1:
        return
    for name, param in model.named_parameters():
        over = dist.get_process_group_ranks(vars(param)["ds_process_group"]) if is_cut(param) else []
        if not set(over) <= set(data_parallel.ranks):
            raise refusal(
                "mpu",
                f"deepspeed.zero.Init has cut {name} over ranks of several model-parallel parts, and given all of them "
                f"the values of one: pass it data_parallel_group=mpu.get_data_parallel_group(), or build the model "
                f"without it",
            )


def refuse_taken(model: nn.Module, stage: int) -> None:
    """Raises ConfigError where DeepSpeed's own engine is to take a model from an amsp engine and would find nothing.

    Whole parameters are there for anybody, but for stage 3, which takes our marks on them for its own.
    """
    for param in model.parameters():
        if isinstance(vars(param).get("_z3_optimizer"), StateAccess):
            if stage == 3 or param.shape != whole_shape(param):
                raise refusal(
                    "amsp",
                    "the model belongs to an amsp engine, which has its parameters: evaluate with that engine (or let "
                    "Lightning validate within fit), or export the weights and build the model anew",
                )
            return


def refuse_scripted(model: nn.Module) -> None:
    """Raises ConfigError for a ScriptModule with parameters, where parameters are sharded: it runs no hooks."""
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule) and any(True for _ in module.parameters()):
            raise refusal(
                "amsp.sharding.parameters",
                f"{name or 'the model'} is a ScriptModule, which runs no hooks, so nothing gathers its parameters in "
                f"time; set it to [1, 1] or do not script the module",
            )


def is_compiled(model: nn.Module) -> bool:
    """Whether torch.compile was applied to the model, a part of it, or one of their forward methods."""
    return any(
        hasattr(module, "_orig_mod")
        or getattr(module, "_compiled_call_impl", None) is not None
        or hasattr(module.forward, "_torchdynamo_orig_callable")
        for module in model.modules()
    )


def refuse_config(ds_config: Mapping[str, Any], read_for: float, data_parallel: DataParallel) -> None:
    """Raises ConfigError for what may still have been open when the config was read, for ``read_for`` ranks."""
    named = lookup(ds_config, "sequence_parallel_size")
    if named is not None and named != data_parallel.sequence:
        raise refusal(
            "sequence_parallel_size",
            f"is {shown(named)}, but sequences lie over {data_parallel.sequence} ranks: write data_parallel_size "
            f"beside it, pass initialize an mpu that has get_sequence_parallel_*, or remove it",
        )
    ranks = data_parallel.batches
    preflight(ds_config, world_size=ranks)
    if read_for != ranks:
        reason = f"the config was read for {read_for:g} data-parallel GPUs, but there are {ranks}"
        raise refusal(
            "train_batch_size",
            f"{reason}; call deepspeed.init_distributed() before reading it, and pass every engine the same mpu",
        )


class ModelChanged(RuntimeError):
    """The model got or lost parameters after its engine was made, which knows nothing of that."""


class ModuleTree:
    """The modules and parameters that an engine was made over.

    A module that is put in place of another one after ``initialize`` would be computed with and never trained,
    since neither its hooks nor its masters exist; and the optimizer would go on holding the old one.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._names = dict(self._parameters())
        self._frozen = [param for param in self._names if not param.requires_grad]
        self._record()

    def check(self) -> None:
        """Raises ModelChanged, with the names, when parameters came, went or thawed. Cheap while nothing changed."""
        thawed = [self._names[param] for param in self._frozen if param.requires_grad]
        if thawed:
            raise ModelChanged(
                f"{', '.join(thawed)} had requires_grad=False when the engine was made, so there is no optimizer state "
                f"for it and it would not be trained. Leave it trainable until after deepspeed.initialize (to freeze "
                f"and thaw it then is fine), or call engine.destroy() and initialize anew"
            )
        if all(_members(module) == members for module, members in self._seen):
            return
        now = dict(self._parameters())
        came = sorted(name for param, name in now.items() if param not in self._names)
        went = sorted(name for param, name in self._names.items() if param not in now)
        if came or went:
            changes = [f"{', '.join(names)} {what}" for names, what in ((came, "came"), (went, "went")) if names]
            raise ModelChanged(
                f"the model was changed after the engine had been made: {'; '.join(changes)}. What came would not be "
                f"trained. Change the model before deepspeed.initialize, or call engine.destroy() and initialize anew"
            )
        self._record()

    def _record(self) -> None:
        self._seen = [(module, _members(module)) for module in self._model.modules()]

    def _parameters(self) -> Iterator[tuple[nn.Parameter, str]]:
        for prefix, module in self._model.named_modules():
            if isinstance(module, torch.jit.ScriptModule):
                continue
            for name, param in dict.items(module._parameters):
                # torch.func.functional_call puts plain tensors there for the time of a call.
                if isinstance(param, nn.Parameter):
                    yield param, f"{prefix}.{name}" if prefix else name


def _members(module: nn.Module) -> list[int]:
    """What hangs at a module, by identity; past the watchers, since nothing is read.

    A scripted module makes its Python side anew whenever it is asked, and cannot be changed anyway.
    """
    if isinstance(module, torch.jit.ScriptModule):
        return []
    return [*map(id, module._modules.values()), *map(id, dict.values(module._parameters))]
