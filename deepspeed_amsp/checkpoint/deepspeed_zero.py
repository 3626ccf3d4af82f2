"""Reading the checkpoints of DeepSpeed's own ZeRO stages 1, 2 and 3, as if an amsp engine had written them.

Weights come through the functions of deepspeed.utils.zero_to_fp32, which know how each stage and version lays its
partitions out. Optimizer states are laid out like the fp32 weights that they belong to, so they come through the same
functions. A rank holds one whole fp32 copy of the model on its host at a time.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from deepspeed.utils import zero_to_fp32

from deepspeed_amsp.checkpoint.flat import FlatTensor
from deepspeed_amsp.checkpoint.manifest import (
    MASTER,
    OPTIMIZER,
    Manifest,
    TensorInfo,
    master_key,
    module_key,
    scaler_progress,
    state_key,
)
from deepspeed_amsp.checkpoint.together import CheckpointError

_OPTIM, _MODEL = "*_optim_states.pt", "*_model_states.pt"
_REFUSED = (
    ("*expert_*_model_states.pt", "it holds experts (MoE), which are cut by expert parallelism"),
    ("layer_*", "it was written by pipeline parallelism"),
    ("mp_rank_01_*", "it was written by tensor (model) parallelism"),
    ("zero_pp_rank_*_mp_rank_01_*", "it was written by tensor (model) parallelism"),
)
_THEIRS = {
    "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params",
    "frozen_param_fragments", "lr_scheduler", "data_sampler", "random_ltd", "skipped_steps", "global_steps",
    "global_samples", "dp_world_size", "mp_world_size", "ds_config", "ds_version", "checkpoint_parallel_dimensions",
}  # fmt: skip
"""What DeepSpeed adds to the client's state."""


class ZeroCheckpoint:
    """A checkpoint of DeepSpeed's.

    Raises:
        CheckpointError: it is of a kind that cannot be read, or incomplete.
    """

    @staticmethod
    def is_one(folder: Path) -> bool:
        """Whether DeepSpeed has written ``folder``, in whatever way."""
        return any(any(folder.glob(pattern)) for pattern in (_OPTIM, _MODEL)) or (folder / "zero").is_dir()

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        _refuse(folder)
        files = zero_to_fp32.get_model_state_files(str(folder))
        self.path = Path(files[0])
        self._ranks = [_loaded(path)["optimizer_state_dict"] for path in _by_rank(folder, _OPTIM)]
        first = self._ranks[0]
        if "zero_stage" not in first:
            raise CheckpointError(f"{folder} was not written by ZeRO: its optimizer files name no stage")
        self.stage, self.world = int(first["zero_stage"]), _count(first["partition_count"])
        if len(self._ranks) != self.world:
            raise CheckpointError(
                f"{folder} holds the optimizer files of {len(self._ranks)} ranks, and {self.world} ranks wrote it"
            )
        with _silent():
            self._models = zero_to_fp32.parse_model_states(files)
        self._model = _loaded(self.path)
        self._shapes: Sequence[Mapping[str, torch.Size]] = self._model["param_shapes"]
        self._aliases = dict(self._model["shared_params"])
        self._rest = self._untrained()
        self._base = first["base_optimizer_state" if self.stage <= 2 else "optimizer_state_dict"]
        self._has_states = isinstance(self._base, Mapping) and "state" in self._base
        self.state = self._objects()
        self.manifest = self._manifest()

    def read(self, wanted: Mapping[str, FlatTensor]) -> None:
        """Fill ``wanted``, one kind of state after the other."""
        kinds: dict[str, dict[str, FlatTensor]] = {}
        for key, tensor in wanted.items():
            kind, _, rest = key.partition("/")
            if kind == OPTIMIZER:
                kind, _, rest = rest.partition("/")
            kinds.setdefault(kind, {})[rest] = tensor
        for kind, tensors in kinds.items():
            values = self._whole(kind) if kind == MASTER or kind in self._moments() else self._rest
            for name, tensor in tensors.items():
                flat = values[name].contiguous().detach().reshape(-1)
                for part in tensor.parts:
                    part.values.copy_(flat[part.start : part.start + part.values.numel()])

    # ---- tensors ------------------------------------------------------------------------------------------

    def _whole(self, kind: str) -> Mapping[str, Any]:
        """Masters, or one optimizer state, whole, by parameter; of stage 3 made when they are asked for."""
        flat = [self._partitions(rank, kind) for rank in self._ranks]
        found: dict[str, Any] = {}
        with _silent():
            if self.stage <= 2:
                paddings = self._ranks[0].get("param_alignment_paddings") or ()
                # Versions before 0.19.8 neither write paddings nor take any.
                further = (paddings,) if any(any(group) for group in paddings) else ()
                zero_to_fp32._zero2_merge_trainable_params(found, self.world, flat, self._models, *further)
            else:
                zero_to_fp32._zero3_merge_trainable_params(found, self.world, flat, self._models)
        return found

    def _partitions(self, rank: Mapping[str, Any], kind: str) -> list[torch.Tensor]:
        """What a rank holds of each group, as long as its fp32 weights are: moments may have padding behind them."""
        weights = rank["single_partition_of_fp32_groups" if self.stage <= 2 else "fp32_flat_groups"]
        if kind == MASTER:
            return list(weights)
        state = rank["base_optimizer_state" if self.stage <= 2 else "optimizer_state_dict"]["state"]
        return [
            state[index][kind].reshape(-1)[: weight.numel()] if weight.numel() else weight
            for index, weight in enumerate(weights)
        ]

    def _untrained(self) -> dict[str, torch.Tensor]:
        """What has no master, as the module has it: frozen and non-float parameters, and buffers."""
        trained = {name for shapes in self._shapes for name in shapes} | set(self._aliases)
        module = {name: value for name, value in self._model["module"].items() if torch.is_tensor(value)}
        if self.stage <= 2:
            return {name: value for name, value in module.items() if name not in trained}
        found = {name: module[name] for name in self._model["buffer_names"] if name in module}
        with _silent():
            zero_to_fp32._zero3_merge_frozen_params(found, self.world, self._models)
        return found

    def _moments(self) -> list[str]:
        """Optimizer states that have an element for each of the weights'."""
        found: set[str] = set()
        for index, weight in enumerate(self._partitions(self._ranks[0], MASTER)):
            if self._has_states and weight.numel():
                state = self._base["state"].get(index, {})
                found |= {key for key, v in state.items() if torch.is_tensor(v) and v.numel() >= weight.numel() > 1}
        return sorted(found)

    # ---- what it says about itself ------------------------------------------------------------------------

    def _manifest(self) -> Manifest:
        shapes = {name: tuple(shape) for group in self._shapes for name, shape in group.items()}
        tensors = {master_key(name): TensorInfo.of(shape, torch.float32) for name, shape in shapes.items()}
        for moment in self._moments():
            tensors |= {state_key(name, moment): TensorInfo.of(shape, torch.float32) for name, shape in shapes.items()}
        tensors |= {module_key(name): TensorInfo.of(tuple(v.shape), v.dtype) for name, v in self._rest.items()}
        return Manifest(
            tag=self._folder.name,
            plan={"world_size": self.world, "deepspeed_stage": self.stage},
            global_steps=self._model["global_steps"],
            tensors=tensors,
            aliases=self._aliases,
            left_out=(),
            buffers=tuple(self._model["buffer_names"]),
            files={},
            versions={"deepspeed": str(self._model.get("ds_version"))},
        )

    def _objects(self) -> dict[str, Any]:
        model, scaler = self._model, self._ranks[0].get("loss_scaler")
        groups = self._base["param_groups"] if self._has_states else []
        return {
            "client_state": {key: value for key, value in model.items() if key not in _THEIRS},
            **{key: model.get(key) for key in ("lr_scheduler", "data_sampler", "random_ltd")},
            **{key: model[key] for key in ("global_steps", "global_samples", "skipped_steps")},
            "loss_scaler": scaler_progress(scaler) if scaler else {},
            "groups": [{k: v for k, v in group.items() if k != "params"} for group in groups],
            "group_names": [[name for at in group["params"] for name in self._shapes[at]] for group in groups],
            "scalars": self._scalars(groups),
            "objects": {},
            "random": None,
            "no_states": None if self._has_states else self._why_no_states(),
        }

    def _scalars(self, groups: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
        """The step of every parameter: its group has taken them together."""
        found: dict[str, dict[str, Any]] = {}
        for group in groups:
            for at in group["params"]:
                state = self._base["state"].get(at, {})
                scalars = {
                    key: value for key, value in state.items() if not torch.is_tensor(value) or value.numel() == 1
                }
                if state and "step" not in scalars and "step" in group:
                    scalars["step"] = group["step"]
                found.update((name, scalars) for name in self._shapes[at] if scalars)
        return found

    def _why_no_states(self) -> str:
        return (
            f"{self._folder} is an elastic checkpoint, whose optimizer states are not laid out like its weights; "
            f"pass load_optimizer_states=False to load the weights"
        )


def _by_rank(folder: Path, pattern: str) -> list[str]:
    """Files in the order of DeepSpeed's ranks."""
    try:
        found: list[str] = zero_to_fp32.get_checkpoint_files(str(folder), pattern)
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{folder} holds no {pattern}: it was written without ZeRO, or not all of it is here. Weights alone can be "
            f"given to the model before deepspeed.initialize"
        ) from error
    return found


def _refuse(folder: Path) -> None:
    if (folder / "zero").is_dir():
        raise CheckpointError(
            f"{folder} is a universal checkpoint, which cannot be loaded; load the one that it was converted from"
        )
    for pattern, why in _REFUSED:
        if any(folder.glob(pattern)):
            raise CheckpointError(f"{folder} cannot be loaded: {why}")


def _loaded(path: str | Path) -> dict[str, Any]:
    # mmap: what is not wanted is not read. Like DeepSpeed's: load only what you trust.
    content: dict[str, Any] = torch.load(path, map_location="cpu", mmap=True, weights_only=False)
    return content


def _count(partitions: Any) -> int:
    """One number for every parameter group, or for all."""
    return max(partitions) if isinstance(partitions, list) else int(partitions)


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """These functions print what they do."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield
