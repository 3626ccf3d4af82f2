"""What a load changes in an engine: planned and read on the host first, and applied only when all of it is there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from copy import copy, deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from deepspeed_amsp.checkpoint.contents import aliases, module_rest, pieces_without_master
from deepspeed_amsp.checkpoint.flat import FlatTensor, Part
from deepspeed_amsp.checkpoint.manifest import Manifest
from deepspeed_amsp.checkpoint.together import CheckpointError
from deepspeed_amsp.optimizer import AMSPOptimizer
from deepspeed_amsp.partition.optim_states import Master
from deepspeed_amsp.runtime import Runtime

OF_AN_IMPLEMENTATION = {"fused", "foreach", "capturable", "differentiable"}
"""What a parameter group says of how the optimizer computes here; of another device's it may not be able to."""
SHOWN = 4
"""Names that an error lists."""


@dataclass(frozen=True)
class Choice:
    """What to load.

    strict: names must match; frozen parameters that were left out on purpose may be missing.
    optimizer_states: moments, steps and what the parameter groups say, too.
    exact_masters: False rounds masters to this run's working dtype (zero_optimization.load_from_fp32_weights).
    custom: gets the whole module state [src, dst=module] instead of our loading it.
    """

    strict: bool = True
    optimizer_states: bool = True
    exact_masters: bool = True
    custom: Callable[..., None] | None = None


class Restore:
    """One load into one engine.

    Args:
        saved: the contents of `manifest.STATE`.

    Raises:
        CheckpointError: the checkpoint does not fit this model or optimizer.
    """

    def __init__(
        self, amsp: Runtime, module: nn.Module, manifest: Manifest, saved: Mapping[str, Any], choice: Choice
    ) -> None:
        assert amsp.optimizer is not None
        self._amsp, self._module, self._manifest = amsp, module, manifest
        self._optimizer: AMSPOptimizer = amsp.optimizer
        self._saved, self._choice = saved, choice
        self._wanted: dict[str, list[Part]] = {}
        self._masters: list[tuple[Master, torch.Tensor]] = []
        self._copies: list[tuple[Callable[[], torch.Tensor], torch.Tensor]] = []
        self._rest: dict[str, Any] = {}
        self._states: dict[nn.Parameter, dict[str, Any]] = {}
        self._groups: list[Mapping[str, Any]] = []
        if choice.custom is not None:
            self._plan_custom()
        else:
            self._plan_module()
        if choice.optimizer_states:
            if saved.get("no_states"):
                raise CheckpointError(saved["no_states"])
            self._plan_states()
            self._groups = matched_groups(self._optimizer.states.group_names, manifest, saved)
            refuse_another_optimizer(self._optimizer.optimizer, self._groups)

    @property
    def wanted(self) -> dict[str, FlatTensor]:
        """Memory on the host for every element that this rank needs, to be filled from the checkpoint."""
        infos = self._manifest.tensors
        return {
            key: FlatTensor(infos[key].numel, infos[key].torch_dtype, tuple(parts))
            for key, parts in self._wanted.items()
        }

    def begin(self, undo: ExitStack) -> None:
        """Everything was read. ``undo`` gets the way back, which is collective, too."""
        self._optimizer.values_change()
        undo.callback(self._optimizer.publish_all)

    def apply_what_may_fail(self, undo: ExitStack) -> None:
        """Change what other code than ours changes, which may refuse: the user's, the module's, the optimizer's.

        The working copies of trained parameters need no way back of their own: they follow from the masters.
        """
        states = self._optimizer.states
        undo.callback(states.as_it_is())  # whatever is loaded: a scheduler edits the groups, too
        if self._choice.optimizer_states:
            states.load(self._states, self._groups)
        if self._choice.custom is not None or self._rest:
            undo.callback(self._untrained_as_it_is())
        if self._choice.custom is not None:
            self._choice.custom(src=self._rest, dst=self._module)
        elif self._rest:
            self._module.load_state_dict(self._rest, strict=False)

    @torch.no_grad()
    def apply(self) -> None:
        """The rest, when nothing can fail any more. Collective, since updated parameters are published."""
        optimizer = self._optimizer
        dtypes = {unit.index: unit.dtype for unit in optimizer.units}
        for master, value in self._masters:
            exact = value if self._choice.exact_masters else value.to(dtypes[master.slot.piece.unit])
            master.value.data.view(-1).copy_(exact)
        for target, value in self._copies:
            target().copy_(value)
        if self._choice.custom is not None:
            optimizer.refresh_fp32_params()
        optimizer.publish_all()

    def _untrained_as_it_is(self) -> Callable[[], None]:
        """A function that puts back what no master says: frozen and non-float parameters, and buffers."""
        pieces = [
            unit.piece_view(piece)
            for unit in self._optimizer.units
            for piece in pieces_without_master(unit, self._optimizer, self._amsp.mesh)
        ]
        rest = [value for value in module_rest(self._optimizer, self._module).values() if torch.is_tensor(value)]
        before = [(value, value.detach().clone()) for value in (*pieces, *rest)]

        def put_back() -> None:
            with torch.no_grad():
                for value, old in before:
                    value.detach().copy_(old)

        return put_back

    # ---- planning -----------------------------------------------------------------------------------------

    def _want(self, key: str, start: int, numel: int) -> torch.Tensor:
        values = torch.empty(numel, dtype=self._manifest.tensors[key].torch_dtype)
        if numel:
            self._wanted.setdefault(key, []).append(Part(start, values))
        return values

    def _plan_module(self) -> None:
        """Masters of what is trained, working copies of what is not, and the rest of the module's state."""
        optimizer, mesh = self._optimizer, self._amsp.mesh
        rest = module_rest(optimizer, self._module)
        self._check_names(rest)
        for master in optimizer.states.all_masters():
            piece = master.slot.piece
            key = self._manifest.source(piece.param.name)
            if key is not None:
                self._masters.append((master, self._want(key, piece.start, piece.numel)))
        for unit in optimizer.units:
            for piece in pieces_without_master(unit, optimizer, mesh):
                key = self._manifest.source(piece.param.name)
                if key is not None:
                    value = self._want(key, piece.start, piece.numel)
                    self._copies.append((lambda unit=unit, piece=piece: unit.piece_view(piece), value))  # type: ignore[misc]
        objects = self._saved["objects"]
        for name in rest:
            key = self._manifest.source(name)
            if key is not None:
                info = self._manifest.tensors[key]
                self._rest[name] = self._want(key, 0, info.numel).view(info.shape)
            elif name in objects:
                self._rest[name] = objects[name]

    def _plan_custom(self) -> None:
        """The whole state of the module, for a function of the user's."""
        if self._amsp.plan.sharding.s_p > 1:
            raise CheckpointError("custom_load_fn needs whole parameters; load with amsp.sharding.parameters [1, 1]")
        for name in self._manifest.names():
            key = self._manifest.source(name)
            assert key is not None
            info = self._manifest.tensors[key]
            self._rest[name] = self._want(key, 0, info.numel).view(info.shape)
        self._rest.update({alias: self._rest[name] for alias, name in self._manifest.aliases.items()})
        self._rest.update(self._saved["objects"])

    def _plan_states(self) -> None:
        """Moments and steps of the masters owned here; a parameter without stored ones starts afresh."""
        scalars = self._saved["scalars"]
        for master in self._optimizer.states.all_masters():
            piece = master.slot.piece
            name, shape = piece.param.name, tuple(piece.param.shape)
            # A copy for each: pieces of one parameter must not count their steps in one tensor.
            entry = deepcopy(scalars.get(self._manifest.stored_name(name), {}))
            for state, key in self._manifest.states(name):
                info = self._manifest.tensors[key]
                if info.shape == shape:
                    entry[state] = self._want(key, piece.start, piece.numel).view(piece.shape)
                elif piece.whole:
                    entry[state] = self._want(key, 0, info.numel).view(info.shape)
                else:
                    raise CheckpointError(
                        f"the optimizer state {state!r} of {name} was stored with shape {info.shape}, and this plan "
                        f"cuts {name} {shape} into pieces; set amsp.sharding.parameters to [1, 1]"
                    )
            self._states[master.value] = entry

    def _check_names(self, rest: Mapping[str, Any]) -> None:
        """Raises CheckpointError unless the checkpoint has what this module has."""
        manifest = self._manifest
        shapes = {spec.name: spec.shape for unit in self._optimizer.units for spec in unit.layout.params}
        shapes |= {name: tuple(value.shape) for name, value in rest.items() if torch.is_tensor(value)}
        found = {name: manifest.source(name) for name in shapes}
        wrong = [
            f"{name} has shape {shapes[name]} here and {manifest.tensors[key].shape} there"
            for name, key in found.items()
            if key is not None and manifest.tensors[key].shape != tuple(shapes[name])
        ]
        there = {*manifest.left_out, *self._saved["objects"]}
        missing = sorted(name for name, key in found.items() if key is None and name not in there)
        missing += sorted(rest.keys() - shapes.keys() - there)
        mine = aliases(self._module)
        used = {manifest.stored_name(name) for name in shapes} | mine.keys()
        unexpected = sorted(manifest.names() - used)
        problems = [_listed("tensors of another shape", wrong)]
        if self._choice.strict:
            problems += [_listed("missing in the checkpoint", missing), _listed("not in this model", unexpected)]
        text = "; ".join(filter(None, problems))
        if text:
            hint = "" if wrong else ". load_module_strict=False loads what fits"
            raise CheckpointError(f"the checkpoint {manifest.tag} is of another model: {text}{hint}")


def matched_groups(
    names: Sequence[Sequence[str]], manifest: Manifest, saved: Mapping[str, Any]
) -> list[Mapping[str, Any]]:
    """What each parameter group is to say: what the stored group of the same parameters says, in whatever order.

    `OF_AN_IMPLEMENTATION` stays as it is here.

    A group without stored parameters (new ones, or none) takes the group in its place if there are as many, and else
    stays as it is.

    Raises:
        CheckpointError: a group has parameters of several stored ones.
    """
    home = {name: index for index, group in enumerate(saved["group_names"]) for name in group}
    found: list[Mapping[str, Any]] = []
    for index, group in enumerate(names):
        homes: dict[int, str] = {}
        for name in group:
            at = home.get(manifest.stored_name(name))
            if at is not None:
                homes.setdefault(at, name)
        if len(homes) > 1:
            where = ", ".join(f"{name} in group {at}" for at, name in sorted(homes.items()))
            raise CheckpointError(
                f"param_groups[{index}] has parameters that were in different groups when the checkpoint was written "
                f"({where}): make the groups as they were, or pass load_optimizer_states=False"
            )
        empty_place = not homes and len(names) == len(saved["groups"]) and not saved["group_names"][index]
        at = next(iter(homes), index if empty_place else None)
        says = {} if at is None else saved["groups"][at]
        found.append({key: value for key, value in says.items() if key not in OF_AN_IMPLEMENTATION})
    return found


def refuse_another_optimizer(optimizer: torch.optim.Optimizer, stored: Sequence[Mapping[str, Any]]) -> None:
    """An optimizer of another class would miss its states at the first step, and only on ranks that own something.

    Groups tell: each has settings that the other does not know. What only one side has more is a scheduler's, the
    user's, or another release's.

    Raises:
        CheckpointError: the groups are another optimizer's.
    """
    settings = set(optimizer.defaults) - OF_AN_IMPLEMENTATION
    for here, there in zip(optimizer.param_groups, stored, strict=True):
        missing, unknown = settings - set(there), set(there) - set(here) - {"initial_lr"}
        if there and missing and unknown:
            raise CheckpointError(
                f"the checkpoint's optimizer had {', '.join(sorted(unknown))}, {type(optimizer).__name__} has "
                f"{', '.join(sorted(missing))}: take the optimizer that wrote it, or pass load_optimizer_states=False"
            )


def as_it_is(thing: Any) -> Callable[[], None]:
    """A function that puts back what ``load_state_dict`` of a scheduler or the like changes, even if it only began."""
    state = deepcopy(thing.state_dict())
    before = {
        name: copy(value) if isinstance(value, list | dict | set) else value for name, value in vars(thing).items()
    }

    def put_back() -> None:
        # Its own way first, for what it holds in objects of its own; one that refuses states refuses this one, too.
        with suppress(Exception):
            thing.load_state_dict(state)
        vars(thing).clear()
        vars(thing).update(before)

    return put_back


def _listed(what: str, names: Sequence[str]) -> str:
    if not names:
        return ""
    more = len(names) - SHOWN
    return f"{what}: {', '.join(names[:SHOWN])}" + (f" and {more} more" if more > 0 else "")
