"""The hooks that drive the schedule. The only file that registers hooks or watches modules.

Three kinds of event, each translated into a call of a scheduler:

* a module's forward begins or ends: units are gathered (s_p > 1) and freed;
* a gradient reaches a unit's output: its backward is next, so it is gathered again;
* a parameter's gradient is complete: it is handed to the reducer.

Reads of parameters are watched, too: a module that reads its own or another module's parameter gets the
published value, and a gathered one, whether or not the forward of the module that holds it was called.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from deepspeed_amsp.partition.params import ShardedUnit, Unit
from deepspeed_amsp.schedule.gather import Gatherer
from deepspeed_amsp.schedule.publish import Publisher

OnGradient = Callable[[Unit, int, torch.Tensor], bool]


def in_backward() -> bool:
    """Whether autograd is running a backward pass here; a forward then is a recomputation."""
    return bool(torch._C._current_graph_task_id() != -1)


class WatchedParameters(dict):  # type: ignore[type-arg]
    """A module's ``_parameters`` that tells the hooks when one of them is read.

    Copying or pickling a module gives the copy a plain dict: it is not part of the engine.
    """

    def __init__(
        self,
        plain: Mapping[str, nn.Parameter | None],
        on_read: Callable[[nn.Parameter], None],
        on_list: Callable[[nn.Parameter], None],
    ) -> None:
        super().__init__(plain)
        self._on_read = on_read
        self._on_list = on_list

    def __getitem__(self, name: str) -> nn.Parameter | None:
        param: nn.Parameter | None = super().__getitem__(name)
        if param is not None and not torch.compiler.is_compiling():
            self._on_read(param)
        return param

    def get(self, name: str, default: Any = None) -> Any:
        if name not in self:
            return default
        return self[name]

    def items(self) -> Any:
        self._list()
        return super().items()

    def values(self) -> Any:
        self._list()
        return super().values()

    def _list(self) -> None:
        """Listing wants the published values, but not the gathered ones: models list to find a dtype."""
        for param in super().values():
            if param is not None and not torch.compiler.is_compiling():
                self._on_list(param)

    def __reduce__(
        self,
    ) -> tuple[type[dict[str, nn.Parameter | None]], tuple[dict[str, nn.Parameter | None]]]:
        return dict, (dict(self.items()),)


class Frame:
    """A module whose forward is running, with the units that it read from other modules."""

    __slots__ = ("borrowed", "module")

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.borrowed: list[ShardedUnit] = []


class Hooks:
    """Registers everything on a model and takes everything off again.

    Args:
        model: the user's module.
        units: all its units.
        publisher: waited for before a parameter is read.
        gatherer: None when s_p = 1.
    """

    def __init__(
        self,
        model: nn.Module,
        units: list[Unit],
        publisher: Publisher,
        gatherer: Gatherer | None,
    ) -> None:
        self._model = model
        self._publisher = publisher
        self._gatherer = gatherer
        self._handles: list[Any] = []
        self._frames: list[Frame] = []
        self._watched: list[nn.Module] = []
        self._unit_of: dict[int, tuple[Unit, int]] = {
            id(param): (unit, index) for unit in units for index, param in enumerate(unit.parameters)
        }
        self._sharded_of: dict[nn.Module, list[ShardedUnit]] = {}
        self._early: set[int] = set()
        """Units that somebody may read without our seeing it; they are waited for when the forward begins."""
        leaves: dict[nn.Module, list[ShardedUnit]] = {}
        for unit in units:
            if isinstance(unit, ShardedUnit) and unit.leaf:
                leaves.setdefault(unit.module, []).append(unit)
        for module in model.modules():
            held = [self._unit_of[id(p)][0] for p in module.parameters(recurse=False) if id(p) in self._unit_of]
            self._early.update(unit.index for unit in self._references(module))
            if isinstance(module, torch.jit.ScriptModule):
                self._early.update(unit.index for unit in held)
                continue
            below = leaves.get(module, [])
            own = list(dict.fromkeys([unit for unit in held if isinstance(unit, ShardedUnit)] + below))
            if own:
                self._sharded_of[module] = own
            if held:
                self._watch(module)
            if gatherer is not None:
                self._handles.append(module.register_forward_pre_hook(self._before_forward, with_kwargs=True))
                self._handles.append(module.register_forward_hook(self._after_forward, always_call=True))
        if gatherer is None and self._early:
            self._handles.append(model.register_forward_pre_hook(lambda *_: self._wait_early()))

    def watch_gradients(self, trainable: list[nn.Parameter], on_gradient: OnGradient) -> None:
        """Hand every complete gradient of ``trainable`` to ``on_gradient(unit, index, gradient)``, which says
        whether the unit now has all of its own; a sharded unit is freed then."""
        for param in trainable:
            unit, index = self._unit_of[id(param)]
            hook = self._gradient_hook(unit, index, on_gradient)
            self._handles.append(param.register_post_accumulate_grad_hook(hook))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for module in self._watched:
            if isinstance(module._parameters, WatchedParameters):
                module._parameters = dict(dict.items(module._parameters))
        self._watched.clear()
        self._frames.clear()

    def start_forward(self) -> None:
        """The outermost forward begins."""
        self._frames.clear()
        self._wait_early()
        if self._gatherer is not None and not in_backward():
            self._gatherer.forward_order.start()

    def end_backward(self) -> None:
        """A backward is over: drop what it prefetched for nothing, and begin the record of the next one.

        Not at its beginning: the outputs' own hooks run before anybody is told that backward has begun.
        """
        if self._gatherer is not None:
            self._gatherer.free_all()
            self._gatherer.backward_order.start()

    def __deepcopy__(self, memo: dict[int, Any]) -> Hooks:
        """Copying a module copies its hooks. Ours belong to the one that they were made for."""
        if self._gatherer is not None:
            raise TypeError(
                "a module whose parameters are sharded (amsp.sharding.parameters above 1) cannot be copied: its values "
                "are elsewhere. Build a second module and load the gathered weights into it"
            )
        return self

    def _references(self, module: nn.Module) -> list[Unit]:
        """Units of parameters that the module holds outside its ``_parameters``, as it is or in a container."""
        found = []
        for name, value in vars(module).items():
            if name in ("_parameters", "_modules", "_buffers"):
                continue
            inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
            found += [self._unit_of[id(item)][0] for item in inner if id(item) in self._unit_of]
        return found

    def _wait_early(self) -> None:
        if self._publisher.pending:
            for index in self._early:
                self._publisher.wait_unit(index)

    def _watch(self, module: nn.Module) -> None:
        module._parameters = WatchedParameters(module._parameters, self._on_read, self._on_list)
        self._watched.append(module)

    def _on_read(self, param: nn.Parameter) -> None:
        entry = self._unit_of.get(id(param))
        if entry is None:
            return
        unit = entry[0]
        self._on_list(param)
        if self._frames and isinstance(unit, ShardedUnit):
            assert self._gatherer is not None
            # Also a unit that happens to be gathered is borrowed: this module's backward will want it again.
            if not self._used_by_outer(unit):
                self._frames[-1].borrowed.append(unit)
            if not unit.readable:
                self._gatherer.use(unit, in_backward(), recomputed=in_backward())

    def _on_list(self, param: nn.Parameter) -> None:
        if self._publisher.pending and id(param) in self._unit_of:
            self._publisher.wait_unit(self._unit_of[id(param)][0].index)

    def _before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        assert self._gatherer is not None
        if module is self._model and all(frame.module is not module for frame in self._frames):
            self.start_forward()
        self._frames.append(Frame(module))
        backward = in_backward()
        used = self._sharded_of.get(module, ())
        for unit in used:
            self._gatherer.use(unit, backward, recomputed=backward)
        frozen = [unit for unit in used if not unit.trainable]
        if frozen and torch.is_grad_enabled():
            self._free_after_backward(frozen, (args, kwargs))

    def _free_after_backward(self, frozen: list[ShardedUnit], inputs: Any) -> None:
        """A frozen unit has no gradient whose arrival could free it: it goes when all its inputs have theirs.

        A leaf that is not part of a recomputation is the user's own and may outlive the step, so it gets no
        hook; then the end of backward frees the unit.
        """
        gatherer = self._gatherer
        assert gatherer is not None
        watched = [t for t in output_tensors(inputs) if t.requires_grad and (t.grad_fn is not None or in_backward())]
        missing = len(watched)

        def arrived(gradient: torch.Tensor) -> None:
            nonlocal missing
            missing -= 1
            if missing == 0:
                for unit in frozen:
                    gatherer.free(unit)

        for tensor in watched:
            tensor.register_hook(arrived)

    def _after_forward(self, module: nn.Module, _args: Any, output: Any) -> None:
        assert self._gatherer is not None
        borrowed: list[ShardedUnit] = []
        while self._frames:
            frame = self._frames.pop()
            borrowed += frame.borrowed
            if frame.module is module:
                break
        used = self._sharded_of.get(module, []) + borrowed
        if not used:
            return
        visible = not torch.is_grad_enabled() or self._gather_before_backward(output, used)
        if not visible:
            # No output that we can see leads to the backward of this module, so nothing would gather it again:
            # it stays until the end of the backward.
            return
        if not in_backward():
            # A recomputation keeps what it gathered: the gradient needs it next.
            for unit in used:
                if not self._used_by_outer(unit):
                    self._gatherer.free_after_forward(unit, backward_follows=torch.is_grad_enabled())

    def _used_by_outer(self, unit: ShardedUnit) -> bool:
        return any(unit in frame.borrowed or unit in self._sharded_of.get(frame.module, ()) for frame in self._frames)

    def _gather_before_backward(self, output: Any, used: list[ShardedUnit]) -> bool:
        """Whether the output has tensors: those that need a gradient will announce the module's backward."""
        gatherer = self._gatherer
        assert gatherer is not None

        def before_backward(gradient: torch.Tensor) -> None:
            for unit in used:
                gatherer.use(unit, backward=True)

        found = list(output_tensors(output))
        for tensor in found:
            if tensor.requires_grad:
                tensor.register_hook(before_backward)
        return bool(found)

    def _gradient_hook(self, unit: Unit, index: int, on_gradient: OnGradient) -> Callable[[torch.Tensor], None]:
        gatherer = self._gatherer
        spec = unit.layout.params[index]

        def hook(param: torch.Tensor) -> None:
            gradient = param.grad
            if gradient is None:
                return
            param.grad = None
            if gradient.layout is not torch.strided:
                raise TypeError(
                    f"{spec.name} has a sparse gradient, which cannot be reduced in a bucket; build its module with "
                    f"sparse=False"
                )
            if gradient.shape != spec.shape:
                raise ValueError(
                    f"{spec.name} had shape {spec.shape} when the engine was made and has {tuple(gradient.shape)} now; "
                    f"change the model before deepspeed.initialize"
                )
            complete = on_gradient(unit, index, gradient.detach())
            if complete and gatherer is not None and isinstance(unit, ShardedUnit):
                gatherer.free(unit)

        return hook


def output_tensors(output: Any) -> Iterator[torch.Tensor]:
    """Tensors in a module's output: nested containers and dataclasses are looked into."""
    for leaf in tree_leaves(output):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            for field in dataclasses.fields(leaf):
                yield from output_tensors(getattr(leaf, field.name))
