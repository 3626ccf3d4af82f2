"""What DeepSpeed's ``mpu`` and its mesh of data and sequence parallelism say about who shares parameters with whom.

Both are asked for what DeepSpeed's own engine asks them for (utils/groups.py of 0.19.8).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch.distributed as dist
from deepspeed.utils import groups
from deepspeed.utils.bwc import bwc_pipeline_parallel_world_size

from deepspeed_amsp.config import ConfigError, Problem
from deepspeed_amsp.data_parallel import DataParallel, Ranks

_MEGATRON = tuple(
    f"get_{kind}_parallel_{what}" for kind in ("model", "data") for what in ("rank", "world_size", "group")
)
_SEQUENCE = (
    "get_sequence_parallel_world_size",
    "get_sequence_parallel_group",
    "get_sequence_data_parallel_rank",
    "get_sequence_data_parallel_world_size",
    "get_sequence_data_parallel_group",
)
_NOT_BESIDE = {
    "get_expert_model_parallel_world_size": "expert parallelism",
    "get_context_parallel_world_size": "Megatron's context parallelism (Ulysses works: get_sequence_parallel_*)",
}


class _Said(NamedTuple):
    """What one rank's mpu or mesh says.

    data: the ranks that share its parameters; empty for all.
    model: the ranks that hold the parts of its tensors; empty where tensors are whole.
    problem: why it makes no sense, if it does not.
    """

    data: Ranks = ()
    model: Ranks = ()
    sequence: int = 1
    problem: str = ""


def refuse_mpu(mpu: Any) -> None:
    """Raises ConfigError for an mpu that lacks what DeepSpeed's config asks for.

    What else may be wrong with it is found by `find_data_parallel`, so that a rank that is told something else than the
    others does not leave them waiting.
    """
    lacks = _lacks(mpu) if mpu is not None else ""
    if lacks:
        raise ConfigError([Problem("mpu", lacks)])


def batch_ranks(mpu: Any, mesh_device: Any, sequence_parallel_size: Any) -> int | None:
    """How many ranks take different samples, as DeepSpeedConfig counts them; None before ranks have met.

    sequence_parallel_size: the config's key, which zero.Init goes by.
    """
    if not dist.is_initialized():
        return None
    if mpu is not None and not _only_sequences(mpu):
        return int(mpu.get_data_parallel_world_size())
    if mpu is not None:
        return dist.get_world_size() // int(mpu.get_sequence_parallel_world_size())
    if mesh_device is not None:
        return dist.get_world_size(mesh_device.get_group(mesh_dim="data_parallel"))
    whole = isinstance(sequence_parallel_size, int) and sequence_parallel_size > 1
    return dist.get_world_size() // (sequence_parallel_size if whole else 1)


def find_data_parallel(mpu: Any, mesh_device: Any, everywhere: Callable[[Any], list[Any]]) -> DataParallel:
    """Who shares parameters with whom: over all ranks, if neither of the two says otherwise. Collective.

    As in DeepSpeed, an mpu or a mesh that an earlier engine of the process was given counts, too.

    Args:
        everywhere: all-gathers a picklable value, in rank order.

    Raises on every rank:
        ConfigError: an mpu that cannot be used, on some rank.
        TopologyError: groups that do not divide the ranks, or do not cross.
    """
    mpu, mesh_device = mpu or groups.mpu, mesh_device or groups.mesh_device
    said: list[_Said] = everywhere(_said(mpu, mesh_device))
    wrong = {rank: one.problem for rank, one in enumerate(said) if one.problem}
    if wrong:
        rank, problem = next(iter(wrong.items()))
        where = "" if len(wrong) == len(said) else f"on rank {rank}: "
        raise ConfigError([Problem("mpu", where + problem)])
    models = tuple(sorted({one.model or (rank,) for rank, one in enumerate(said)}))
    data = tuple(sorted({one.data or tuple(range(len(said))) for one in said}))
    return DataParallel(data, models, dist.get_rank(), max(one.sequence for one in said))


def _said(mpu: Any, mesh_device: Any) -> _Said:
    if mpu is None and mesh_device is None:
        return _Said()
    if mpu is None:
        # DeepSpeed would average over the mesh's data_parallel dimension alone, and let the copies of the parameters
        # on the ranks of a sequence drift apart.
        return _Said(sequence=dist.get_world_size(mesh_device.get_group(mesh_dim="sequence_parallel")))
    if mesh_device is not None:
        return _Said(problem="stands beside a mesh of data and sequence parallelism (mesh_param, or data_parallel_size "
                             "in the config); give one of the two")  # fmt: skip
    try:
        problem = _lacks(mpu) or _beside(mpu)
        return _Said(problem=problem) if problem else _asked(mpu)
    except Exception as error:  # noqa: BLE001 - whatever it was, the other ranks must hear of it
        return _Said(problem=f"raised {type(error).__name__} when it was asked for its groups and sizes: {error}")


def _asked(mpu: Any) -> _Said:
    sequence = 1
    if hasattr(mpu, "get_sequence_data_parallel_group"):
        sequence = int(mpu.get_sequence_parallel_world_size())
        data = _ranks(mpu.get_sequence_data_parallel_group())
    else:
        data = _ranks(mpu.get_data_parallel_group())
    if _only_sequences(mpu):
        return _Said(data, sequence=sequence)
    model, size = _ranks(mpu.get_model_parallel_group()), int(mpu.get_data_parallel_world_size())
    if size * sequence != len(data):
        over = f" x {sequence} ranks of a sequence" if sequence > 1 else ""
        return _Said(problem=f"says that the data-parallel size is {size}{over}, but its group has {len(data)} ranks")
    for what, mine in (("data", data), ("model", model)):
        if dist.get_rank() not in mine:
            return _Said(problem=f"gives a {what}-parallel group that this rank is not in")
    said = int(mpu.get_model_parallel_rank()), int(mpu.get_model_parallel_world_size())
    found = model.index(dist.get_rank()), len(model)
    if said != found:
        # A checkpoint names parts by their number, and another run must find the same part under it.
        return _Said(problem=f"says that this rank is model-parallel rank {said[0]} of {said[1]}, but in its group, "
                             f"counted in ascending order, it is {found[0]} of {found[1]}")  # fmt: skip
    return _Said(data, model, sequence)


def _lacks(mpu: Any) -> str:
    """What an mpu does not have, as a sentence that goes on after its name; empty if it has all."""
    sequence = any(hasattr(mpu, name) for name in _SEQUENCE)
    needed = (*(() if _only_sequences(mpu) else _MEGATRON), *(_SEQUENCE if sequence else ()))
    missing = [name for name in needed if not hasattr(mpu, name)]
    if not missing:
        return ""
    return f"has no {', '.join(missing)}; DeepSpeed asks for these, as Megatron's parallel_state has them"


def _beside(mpu: Any) -> str:
    """What an mpu stands for that cannot stand here, as `_lacks`."""
    pipe = bwc_pipeline_parallel_world_size(mpu)
    if pipe > 1:
        return f"has {pipe} pipeline stages; pipeline parallelism cannot stand beside an amsp block, set it to 1"
    for name, what in _NOT_BESIDE.items():
        asked: Callable[[], int] | None = getattr(mpu, name, None)
        if asked is not None and asked() > 1:
            return f"says {name}() = {asked()}; {what} cannot stand beside an amsp block"
    return ""


def _only_sequences(mpu: Any) -> bool:
    """DeepSpeed's own parallel_state_sp, in which "model parallel" is another name for sequence parallel."""
    return hasattr(mpu, "initialize_sequence_parallel")


def _ranks(group: Any) -> Ranks:
    return tuple(sorted(dist.get_process_group_ranks(group or dist.group.WORLD)))
