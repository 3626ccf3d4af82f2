"""Weights that come from safetensors files unit by unit, into a model that was built without memory."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

SOURCE = "_amsp_weights"
"""Set on modules that were built inside `Init` with files to read from."""

INDEX = "model.safetensors.index.json"


class WeightsError(ValueError):
    """The files do not hold what the model needs."""


class Weights:
    """Tensors of a folder of safetensors files, or of one file, read one at a time by name.

    Raises:
        FileNotFoundError: there is no such file, or no safetensors file in the folder.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._file_of = dict(_index(self.path))

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def find(self, names: Iterable[str], shape: torch.Size) -> str | None:
        """The first of ``names`` that is there; None if none is.

        Raises:
            WeightsError: it has another shape.
        """
        name = next((name for name in names if name in self), None)
        if name is not None:
            with self._open(name) as file:
                found = tuple(file.get_slice(name).get_shape())
            if found != tuple(shape):
                raise WeightsError(f"{name} has shape {found} in {self.path}, but {tuple(shape)} in the model")
        return name

    def read(self, name: str) -> torch.Tensor:
        """The tensor, on the CPU, in the dtype of the file; nothing else of the file is read."""
        with self._open(name) as file:
            tensor: torch.Tensor = file.get_tensor(name)
        return tensor

    def _open(self, name: str) -> Any:
        return _open(self._file_of[name])


@contextmanager
def Init(weights: str | Path | None = None) -> Iterator[None]:
    """Build modules whose parameters take no memory; the engine gives them values unit by unit, and cuts them at once.

        with deepspeed_amsp.Init("folder with safetensors"):
            model = AutoModelForCausalLM.from_config(config)

    So no rank ever holds a whole model (with ``s_p > 1``). Values are read by rank 0 from ``weights``: the files of
    ``save_pretrained`` or `amsp export`, which all ranks must see, under the names of ``model.named_parameters()``.
    Without files, or for what is not in them, they are those of the modules' ``reset_parameters``. Buffers are built
    as always.

    Raises:
        FileNotFoundError: there are no such files.
    """
    source = Weights(weights) if weights is not None else None
    register = nn.Module.register_parameter

    def register_without_memory(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(self, name, param)
        if param is not None and not param.is_meta:
            # The object stays the same, since others may be about to register it, too.
            torch._C._swap_tensor_impl(param, nn.Parameter(param.to("meta"), param.requires_grad))
        vars(self)[SOURCE] = source

    patched: Any = register_without_memory
    nn.Module.register_parameter = patched  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _index(path: Path) -> Iterator[tuple[str, Path]]:
    """(name of a tensor, its file)."""
    if path.is_dir() and path.joinpath(INDEX).is_file():
        listed = json.loads(path.joinpath(INDEX).read_text(encoding="utf-8"))["weight_map"]
        yield from ((name, path / file) for name, file in listed.items())
        return
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files or not files[0].is_file():
        raise FileNotFoundError(f"no safetensors files: {path.absolute()}")
    for file in files:
        with _open(file) as opened:
            yield from ((name, file) for name in opened.keys())  # noqa: SIM118 (it is no mapping)


def _open(file: Path) -> Any:
    try:
        from safetensors import safe_open
    except ImportError as error:
        raise ImportError("deepspeed_amsp.Init reads safetensors files: pip install safetensors") from error
    return safe_open(file, framework="pt")
