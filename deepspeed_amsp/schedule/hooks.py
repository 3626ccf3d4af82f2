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
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from deepspeed_amsp.partition.params import ShardedUnit, Unit
from deepspeed_amsp.schedule.gather import Gatherer
from deepspeed_amsp.schedule.publish import Publisher
from deepspeed_amsp.schedule.transforms import in_transform, outside_transforms
from deepspeed_amsp.schedule.uses import ModuleUse, OpenUses, in_backward, running_backward

OnGradient = Callable[[Unit, int, torch.Tensor], None]


class WatchedParameters(dict):  # type: ignore[type-arg]
    """A module's ``_parameters`` that tells the hooks when one of them is read.

    Copying or pickling a module gives the copy a plain dict: it is not part of the engine.
    """

    def __init__(
        self,
        plain: Mapping[str, nn.Parameter | None],
        on_read: Callable[[nn.Parameter], None],
    ) -> None:
        super().__init__(plain)
        self._on_read = on_read

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
        for param in super().values():
            if param is not None and not torch.compiler.is_compiling():
                self._on_read(param)

    def __reduce__(
        self,
    ) -> tuple[type[dict[str, nn.Parameter | None]], tuple[dict[str, nn.Parameter | None]]]:
        return dict, (dict(self.items()),)


class Frame:
    """A module whose forward is running, with its own units, and behind them those that it read from others."""

    __slots__ = ("_handled", "module", "use")

    def __init__(self, module: nn.Module, own: Sequence[ShardedUnit]) -> None:
        self.module = module
        self.use = ModuleUse(list(own))
        self._handled = sys.exc_info()[1]

    @property
    def failed(self) -> bool:
        """Asked when the forward is over: whether by an exception, as when a recomputation has all that it wants."""
        return sys.exc_info()[1] is not self._handled


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
        self._uses = OpenUses(gatherer.free) if gatherer is not None else None
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
        """Hand every complete gradient of ``trainable`` to ``on_gradient(unit, index, gradient)``; a sharded unit that
        has all of its own is freed."""
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
        if self._gatherer is not None and self._uses is not None:
            self._uses.clear()
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
        for index in self._early:
            self._wait(index)

    def _wait(self, unit: int) -> None:
        if self._publisher.pending:
            with outside_transforms():
                self._publisher.wait_unit(unit)

    def _watch(self, module: nn.Module) -> None:
        module._parameters = WatchedParameters(module._parameters, self._on_read)
        self._watched.append(module)

    def _on_read(self, param: nn.Parameter) -> None:
        """Somebody takes a parameter, by name or from a list.

        In a forward or a backward it must be whole: a sum over listed parameters that are empty would be a
        wrong loss without an error. A model that lists its parameters to find a dtype gathers the first unit.
        """
        entry = self._unit_of.get(id(param))
        if entry is None:
            return
        unit = entry[0]
        self._wait(unit.index)
        if not isinstance(unit, ShardedUnit) or not (self._frames or in_backward()):
            return
        assert self._gatherer is not None and self._uses is not None
        if self._frames:
            # Also a unit that happens to be gathered is borrowed: this module's backward will want it again.
            if not self._used_by_outer(unit):
                self._frames[-1].use.units.append(unit)
        else:
            self._uses.read(unit)
        if not unit.readable:
            backward = in_backward()
            self._gatherer.use(unit, backward, recomputed=backward)

    def _before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        assert self._gatherer is not None
        if module is self._model and all(frame.module is not module for frame in self._frames):
            self.start_forward()
        frame = Frame(module, self._sharded_of.get(module, ()))
        self._frames.append(frame)
        backward = in_backward()
        for unit in frame.use.units:
            self._gatherer.use(unit, backward, recomputed=backward)
        if torch.is_grad_enabled() and not in_transform() and frame.use.frozen:
            self._end_with_inputs(frame.use, (args, kwargs))

    def _end_with_inputs(self, use: ModuleUse, inputs: Any) -> None:
        """A frozen unit has no gradient whose arrival could free it: it goes when all its inputs have theirs.

        That is the last thing that a module's backward does, except for a leaf, whose gradient autograd
        delivers as soon as it is there. A leaf gets no hook; then the end of its graph frees the unit.
        """
        uses = self._uses
        assert uses is not None
        watched = [t for t in output_tensors(inputs) if t.requires_grad and t.grad_fn is not None]
        use.ends_with_inputs = bool(watched)
        # The hook must not hold its own tensor: nobody can collect a circle that runs through autograd's graph.
        every = missing = len(watched)
        seen_in = -1

        def arrived(_: torch.Tensor) -> None:
            nonlocal missing, seen_in
            if running_backward() != seen_in:
                missing, seen_in = every, running_backward()
            missing -= 1
            if missing == 0:
                uses.end(use)

        for tensor in watched:
            tensor.register_hook(arrived)

    def _after_forward(self, module: nn.Module, _args: Any, output: Any) -> Any:
        assert self._gatherer is not None
        use, failed = ModuleUse([]), False
        while self._frames:
            frame = self._frames.pop()
            frame.use.units += [unit for unit in use.units if unit not in frame.use.units]
            use, failed = frame.use, frame.failed
            if frame.module is module:
                break
        if not use.units or (failed and in_backward()):
            return None
        leaving = [unit for unit in use.units if not self._used_by_outer(unit)]
        if not in_transform():
            output = self._without_views(output, leaving)
        grad = torch.is_grad_enabled()
        if in_transform() or (grad and not self._gather_before_backward(output, use)):
            # No output that we can see leads to the backward of this module, so nothing would gather it again.
            for unit in use.units:
                self._hold(unit)
        elif not in_backward():
            # A recomputation keeps what it gathered: the gradient needs it next.
            for unit in leaving:
                self._gatherer.free_after_forward(unit, backward_follows=grad)
        return output

    def _hold(self, unit: ShardedUnit) -> None:
        """Keep a unit that somebody may read unseen: of a recomputation until its backward is over, else until the
        step, since nobody says when a graph is used for the last time."""
        assert self._uses is not None
        if in_backward() and not in_transform():
            self._uses.read(unit)
        else:
            unit.held = True

    def _used_by_outer(self, unit: ShardedUnit) -> bool:
        return any(unit in frame.use.units for frame in self._frames)

    def _without_views(self, output: Any, leaving: list[ShardedUnit]) -> Any:
        """The output, with copies in place of parameters and views of them: learned positions, queries.

        Whoever gets them may keep them for longer than the unit stays gathered.
        """

        def own(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.clone() if any(unit.holds(tensor) for unit in leaving) else tensor

        return map_tensors(own, output)

    def _gather_before_backward(self, output: Any, use: ModuleUse) -> bool:
        """Whether the output has tensors: those that need a gradient will announce the module's backward."""
        gatherer, uses = self._gatherer, self._uses
        assert gatherer is not None and uses is not None

        def before_backward(_: torch.Tensor) -> None:
            for unit in use.units:
                gatherer.use(unit, backward=True)
                # The graph of a gradient is made: a later backward will come here from where we cannot see it.
                unit.held = unit.held or torch.is_grad_enabled()
            uses.begin(use)

        found = list(output_tensors(output))
        for tensor in found:
            if tensor.requires_grad:
                tensor.register_hook(before_backward)
        return bool(found)

    def _gradient_hook(self, unit: Unit, index: int, on_gradient: OnGradient) -> Callable[[torch.Tensor], None]:
        uses = self._uses
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
            on_gradient(unit, index, gradient.detach())
            if uses is not None and isinstance(unit, ShardedUnit):
                uses.gradient(unit, index)

        return hook


def output_tensors(output: Any) -> Iterator[torch.Tensor]:
    """Tensors in a module's output: nested containers and dataclasses are looked into."""
    for leaf in tree_leaves(output):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            for field in dataclasses.fields(leaf):
                yield from output_tensors(getattr(leaf, field.name))


def map_tensors(change: Callable[[torch.Tensor], torch.Tensor], output: Any) -> Any:
    """The output with ``change`` made to its tensors; itself, if none was. Dataclasses are changed in place."""
    found = list(output_tensors(output))
    changed = {id(tensor): new for tensor, new in zip(found, map(change, found), strict=True) if new is not tensor}
    if not changed:
        return output

    def put(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return changed.get(id(leaf), leaf)
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            for field in dataclasses.fields(leaf):
                object.__setattr__(leaf, field.name, tree_map(put, getattr(leaf, field.name)))
        return leaf

    return tree_map(put, output)
