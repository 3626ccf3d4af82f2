"""`ModelSpec` from a user's module, without its memory: units, FLOPs and activations.

    package.module:factory

names a function without arguments. It returns a module, or a pair of a module and a function that makes a batch:
``batch(sequence) -> args``, a tensor, a tuple of positional or a dict of keyword arguments of the module's forward for
one sample of ``sequence`` tokens. Without it the module is called with int64 tokens [1, sequence]. What the forward
returns is a loss if it is one number (also as ``.loss``); else the cross-entropy of its logits [1, sequence, vocab]
(also as ``.logits``) is taken.

Activations are those of one block (a member of the largest ModuleList), run alone, and of the module with that one
block, run on fake CPU tensors in bf16. Saved tensors are counted, as are temporaries while they live.
"""

from __future__ import annotations

import importlib
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from deepspeed_amsp.module_spec import blocks_of, model_spec
from deepspeed_amsp.plan.models import load_model
from deepspeed_amsp.plan.specs import Activations, ModelSpec, SpecError

Batch = Callable[[int], Any]
SEQUENCES = (2048, 4096)
"""For which activations are measured."""

DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Probed:
    """A spec, and one line on what could not be measured and why, or None."""

    model: ModelSpec
    warning: str | None


def probe_factory(name: str, sequences: tuple[int, ...] = SEQUENCES) -> Probed:
    """The spec of what ``module:factory`` makes.

    Raises:
        SpecError: there is no such module or factory, it fails, or what it makes is no module.
    """
    module, batch = make(name)
    spec = model_spec(module, name)
    try:
        figures = probe(module, batch, sequences)
    except Exception as error:  # noqa: BLE001 - it is the user's code that runs, and a plan can do without
        reason = " ".join(str(error).split())[:200]
        return Probed(
            spec, f"{name}: its forward and backward could not be run ({type(error).__name__}: {reason}); estimated."
        )
    return Probed(replace(spec, activations=figures), None)


def probe_config(path: str, sequences: tuple[int, ...] = SEQUENCES) -> Probed:
    """The spec of a Hugging Face config.json (or its folder), with activations of transformers' own model of it.

    Raises:
        SpecError: the file is no config, or transformers is missing or cannot build its model.
    """
    spec = load_model(path)
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise SpecError(f"{path}: --probe builds its model with transformers, which is not installed.") from error
    try:
        with torch.device("meta"):
            module = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))
        module.config.use_cache = False  # what generation keeps is no activation of training
        figures = probe(module, None, sequences)
    except Exception as error:  # noqa: BLE001 - any version of transformers runs here, and a plan can do without
        reason = " ".join(str(error).split())[:200]
        return Probed(spec, f"{path}: its model could not be run ({type(error).__name__}: {reason}); estimated.")
    return Probed(replace(spec, activations=figures), None)


def make(name: str) -> tuple[nn.Module, Batch]:
    """Call ``module:factory`` on the meta device.

    Raises:
        SpecError: as of `probe_factory`.
    """
    path, _, attribute = name.partition(":")
    if not path or not attribute:
        raise SpecError(f"{name!r} names no factory: write package.module:factory.")
    try:
        factory = getattr(importlib.import_module(path), attribute)
    except Exception as error:  # it is the user's code that runs
        kind = "" if isinstance(error, ImportError | AttributeError) else f"{type(error).__name__}: "
        raise SpecError(f"{name}: cannot be imported: {kind}{error}.") from error
    try:
        with torch.device("meta"):
            made = factory()
    except Exception as error:
        raise SpecError(f"{name}: the factory failed on the meta device: {type(error).__name__}: {error}.") from error
    module, batch = made if isinstance(made, tuple) and len(made) == 2 else (made, _tokens)
    if not isinstance(module, nn.Module) or not callable(batch):
        raise SpecError(f"{name}: must return a torch.nn.Module, or a pair of one and a function, not {made!r:.80}.")
    return module, batch


def probe(
    module: nn.Module, batch: Batch | None = None, sequences: tuple[int, ...] = SEQUENCES
) -> tuple[Activations, ...]:
    """Activations of ``module``, which may be on the meta device and stays as it is but for fake values.

    Raises:
        Exception: whatever its forward or backward raises on fake tensors.
    """
    return tuple(_probe(module, batch or _tokens, sequence) for sequence in sequences)


def _probe(module: nn.Module, batch: Batch, sequence: int) -> Activations:
    """What a layer keeps is what a second block adds: it depends on the next block whether an output is kept."""
    listed, blocks = blocks_of(module)
    calls: list[tuple[Any, Any]] = []
    with FakeTensorMode(allow_non_fake_inputs=True), _fake(module):
        inputs = batch(sequence)

        def whole() -> _Run:
            return _measure(module, lambda: _loss(_call(module, inputs)))

        if not blocks:
            alone = whole()
            return Activations(sequence, 0, 0, alone.kept, 0, alone.backward)
        with _shortened(module, listed, 1), _recorded(blocks[0], calls):
            one = whole()
        args, kwargs = tree_map(_leaf, calls[0])
        block = _measure(blocks[0], lambda: blocks[0](*args, **kwargs))
        added = block.kept
        if len(blocks) > 1:
            with _shortened(module, listed, 2):
                added = whole().kept - one.kept
    first = next((tensor for tensor in tree_leaves((args, kwargs)) if _differentiable(tensor)), None)
    own = first.numel() * first.element_size() if first is not None else 0
    # A module that recomputes its blocks by itself adds less than a block keeps.
    return Activations(sequence, max(added, block.kept), own, one.kept - added, block.backward, one.backward)


@dataclass(frozen=True)
class _Run:
    """Bytes that a forward keeps, and what its own peak or the backward's holds on top of them."""

    kept: int
    backward: int


def _measure(module: nn.Module, run: Callable[[], Any]) -> _Run:
    """Forward and backward; the gradient of a parameter is dropped when it is complete, as the engine does."""
    with _Storages() as storages, _dropped_gradients(module):
        outputs = [t for t in tree_leaves(run()) if _differentiable(t)]
        edges = [torch.autograd.graph.get_gradient_edge(t) for t in outputs]
        grads = [torch.empty_like(t) for t in outputs]
        outputs.clear()  # who needs them later has saved them
        kept = storages.now - sum(grad.nbytes for grad in grads)
        torch.autograd.backward(edges, grads)
        return _Run(kept, storages.peak - kept)


class _Storages(TorchDispatchMode):
    """Bytes of live storages that operations made since it was entered."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._known and storage._cdata not in inputs:
                    self._add(storage)
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()

        def died(_: Any) -> None:
            self._known.pop(key, None)
            self.now -= size

        self._known[key] = weakref.ref(storage, died)
        self.now += size
        self.peak = max(self.peak, self.now)


@contextmanager
def _dropped_gradients(module: nn.Module) -> Iterator[None]:
    def drop(param: torch.Tensor) -> None:
        param.grad = None

    handles = [p.register_post_accumulate_grad_hook(drop) for p in module.parameters() if p.requires_grad]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _fake(module: nn.Module) -> Iterator[None]:
    """Fake bf16 CPU tensors in place of parameters and buffers; a tie stays one."""
    made: dict[int, torch.Tensor] = {}
    before: list[tuple[Any, str, torch.Tensor]] = []
    for part in module.modules():
        tables: list[Any] = [part._parameters, part._buffers]
        for table in tables:
            for key, tensor in table.items():
                if tensor is not None:
                    before.append((table, key, tensor))
    for table, key, tensor in before:
        if id(tensor) not in made:
            dtype = DTYPE if tensor.is_floating_point() else tensor.dtype
            value = torch.empty(tensor.shape, dtype=dtype, device="cpu")
            is_parameter = isinstance(tensor, nn.Parameter)
            made[id(tensor)] = nn.Parameter(value, tensor.requires_grad) if is_parameter else value
        table[key] = made[id(tensor)]
    try:
        yield
    finally:
        for table, key, tensor in before:
            table[key] = tensor


@contextmanager
def _shortened(module: nn.Module, listed: str, length: int) -> Iterator[None]:
    """The first ``length`` blocks only."""
    if not length:
        yield
        return
    table = module.get_submodule(listed)._modules
    whole = dict(table)
    for key in list(table)[length:]:
        del table[key]
    try:
        yield
    finally:
        table.clear()
        table.update(whole)


@contextmanager
def _recorded(block: nn.Module, calls: list[tuple[Any, Any]]) -> Iterator[None]:
    """Note the arguments of every call of ``block``."""
    forward = block.forward

    def noting(*args: Any, **kwargs: Any) -> Any:
        if not calls:
            # Values are not needed, and holding them would count them as kept.
            calls.append(tree_map(_shape_of, (args, kwargs)))
        return forward(*args, **kwargs)

    with mock.patch.object(block, "forward", noting):
        yield


@dataclass(frozen=True)
class _Shape:
    """A tensor argument, to be made anew."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


def _shape_of(value: Any) -> Any:
    return _Shape(tuple(value.shape), value.dtype, value.requires_grad) if isinstance(value, torch.Tensor) else value


def _leaf(value: Any) -> Any:
    if not isinstance(value, _Shape):
        return value
    return torch.empty(value.shape, dtype=value.dtype).requires_grad_(value.requires_grad)


def _differentiable(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _tokens(sequence: int) -> torch.Tensor:
    return torch.zeros(1, sequence, dtype=torch.int64)


def _call(module: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, dict):
        return module(**inputs)
    return module(*inputs) if isinstance(inputs, tuple) else module(inputs)


def _loss(output: Any) -> torch.Tensor:
    """The loss in an output, or the cross-entropy of its logits."""
    for key in ("loss", "logits"):
        value = getattr(output, key, None)
        if isinstance(value, torch.Tensor):
            output = value
            break
    tensors = [t for t in tree_leaves(output) if _differentiable(t)]
    if not tensors:
        raise TypeError("its forward returns no tensor that needs a gradient")
    first: torch.Tensor = tensors[0]
    if first.numel() == 1:
        return first
    scores = first.float().flatten(0, -2)
    return F.cross_entropy(scores, torch.zeros(scores.shape[0], dtype=torch.int64))
