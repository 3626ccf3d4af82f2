"""Where optimizer states live: each owner holds fp32 masters and the optimizer's state of its own pieces."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from deepspeed_amsp.partition.params import Unit
from deepspeed_amsp.plan.layout import BucketLayout, LayoutError, Slot

ELEMENTWISE = frozenset(
    {
        "ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD",
        "FusedAdam", "DeepSpeedCPUAdam", "FusedLion", "DeepSpeedCPULion", "DeepSpeedCPUAdagrad", "Lion",
    }
)  # fmt: skip
"""Optimizers that treat every element alone, so that their tensors may be cut (torch.optim, DeepSpeed)."""

NEEDS_WHOLE = frozenset({"Adafactor", "Muon", "MuonWithAuxAdam", "FusedLamb", "Lamb"})
"""Optimizers whose update depends on the tensor's shape or norm."""

UNSUPPORTED = {
    "LBFGS": "it needs a closure and all parameters in one place",
    "SparseAdam": "gradients are dense here; use Adam",
}


_MOMENTS: dict[str, Callable[[Mapping[str, Any]], int]] = {
    "Adam": lambda group: 3 if group.get("amsgrad") else 2,
    "NAdam": lambda group: 2,
    "RAdam": lambda group: 2,
    "Adamax": lambda group: 2,
    "Adadelta": lambda group: 2,
    "Adagrad": lambda group: 1,
    "FusedLion": lambda group: 1,
    "SGD": lambda group: 1 if group.get("momentum") else 0,
    "RMSprop": lambda group: 1 + bool(group.get("momentum")) + bool(group.get("centered")),
}
_MOMENTS["AdamW"] = _MOMENTS["FusedAdam"] = _MOMENTS["Adam"]


def moments_per_element(optimizer: torch.optim.Optimizer) -> int | None:
    """State values per parameter element of the first group; None for an optimizer that is not in the table."""
    rule = _MOMENTS.get(type(optimizer).__name__)
    return rule(optimizer.param_groups[0]) if rule is not None and optimizer.param_groups else None


@dataclass(frozen=True)
class Master:
    """The fp32 copy of a piece at its owner; ``value`` has the piece's shape."""

    slot: Slot
    value: nn.Parameter


def cuts_allowed(optimizer: torch.optim.Optimizer, parameters_sharded: bool, allow_untested: bool) -> bool:
    """Whether tensors may be cut for ``optimizer``.

    Raises:
        LayoutError: the optimizer cannot work here, or it needs whole tensors and s_p > 1 cuts them.
    """
    name = type(optimizer).__name__
    if name in UNSUPPORTED:
        raise LayoutError(f"optimizer {name} cannot be used with an amsp block: {UNSUPPORTED[name]}")
    if name in ELEMENTWISE:
        return True
    if not parameters_sharded:
        return False
    known = "needs whole tensors" if name in NEEDS_WHOLE else "is not known to treat elements one by one"
    if name in NEEDS_WHOLE or not allow_untested:
        raise LayoutError(
            f"optimizer {name} {known}, but amsp.sharding.parameters above 1 cuts tensors into shards. "
            f"Set amsp.sharding.parameters to [1, 1] (optimizer states stay whole at their owner)"
            + ("" if name in NEEDS_WHOLE else ', or "zero_allow_untested_optimizer": true if it is elementwise')
            + "."
        )
    return True


def make_masters(layout: BucketLayout, owner: int, units: Mapping[int, Unit]) -> list[Master]:
    """fp32 (fp64 for fp64 parameters) copies of the pieces of ``layout`` that ``owner`` owns."""
    masters = []
    for slot in layout.owner_slots(owner):
        working = units[slot.piece.unit].piece_view(slot.piece)
        wide = torch.promote_types(working.dtype, torch.float32)
        # to() returns the same tensor when the dtype already fits; a master is always a copy.
        value = working.detach().to(wide, copy=True).view(slot.piece.shape)
        masters.append(Master(slot, nn.Parameter(value)))
    return masters


class OwnedStates:
    """The basic optimizer, working on this rank's masters instead of the model's parameters.

    ``param_groups`` stay the same dictionaries, so that schedulers and users who edit them are heard. A
    group may be empty on a rank that owns none of its tensors.

    Args:
        optimizer: made over the model's parameters; its groups are re-pointed here.
        parameters: fully qualified name -> parameter, for all tensors that the masters come from.
        masters: by bucket, in forward order.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Mapping[str, nn.Parameter],
        masters: Sequence[Sequence[Master]],
    ) -> None:
        self.optimizer = optimizer
        self.masters = masters
        names = {id(param): name for name, param in parameters.items()}
        self.group_names = [
            [names[id(param)] for param in group["params"] if id(param) in names] for group in optimizer.param_groups
        ]
        """Parameters by group, as the user gave them: on every rank the same, whoever owns them."""
        group_of = {id(p): index for index, group in enumerate(optimizer.param_groups) for p in group["params"]}
        by_group: list[list[nn.Parameter]] = [[] for _ in optimizer.param_groups]
        self._bucket_groups: list[list[list[nn.Parameter]]] = []
        old_state = dict(optimizer.state)
        optimizer.state.clear()
        for bucket in masters:
            split: list[list[nn.Parameter]] = [[] for _ in optimizer.param_groups]
            for master in bucket:
                param = parameters[master.slot.piece.param.name]
                _copy_marks(param, master.value)
                split[group_of[id(param)]].append(master.value)
                if old_state.get(param):
                    group = optimizer.param_groups[group_of[id(param)]]
                    optimizer.state[master.value] = _initial_state(optimizer, group, old_state[param], master)
            self._bucket_groups.append(split)
            for total, members in zip(by_group, split, strict=True):
                total.extend(members)
        self._all_groups = by_group
        self._point_at(by_group)
        # An optimizer that is not known to be elementwise may couple its tensors (an EMA of a global norm,
        # say), so it sees all of them in one step.
        self.stepwise = type(optimizer).__name__ in ELEMENTWISE | NEEDS_WHOLE

    def step_bucket(self, index: int) -> None:
        """Update the masters of one bucket from their ``.grad``."""
        self._point_at(self._bucket_groups[index])
        try:
            self.optimizer.step()
        finally:
            self._point_at(self._all_groups)

    def step_all(self) -> None:
        self.optimizer.step()

    def all_masters(self) -> Iterable[Master]:
        for bucket in self.masters:
            yield from bucket

    @property
    def master_bytes(self) -> int:
        return sum(m.value.numel() * m.value.element_size() for m in self.all_masters())

    @property
    def state_bytes(self) -> int:
        """Bytes of the optimizer's per-element state (moments); step counters and other scalars not counted."""
        tensors = [t for state in self.optimizer.state.values() for t in state.values() if torch.is_tensor(t)]
        return sum(t.numel() * t.element_size() for t in tensors if t.dim())

    def load(self, states: Mapping[nn.Parameter, dict[str, Any]], groups: Sequence[Mapping[str, Any]]) -> None:
        """Replace the optimizer's states, and what its groups say beside their parameters.

        Args:
            states: by master; one that is not in it has no state afterwards, as before its first step.
            groups: what to set in each group; keys that are not in it stay.
        """
        optimizer = self.optimizer
        kept, packed = optimizer.param_groups, optimizer.state_dict()
        order = [param for group in kept for param in group["params"]]
        packed["state"] = {index: states[param] for index, param in enumerate(order) if states.get(param)}
        packed["param_groups"] = [
            {**old, **new, "params": old["params"]} for old, new in zip(packed["param_groups"], groups, strict=True)
        ]
        # The optimizer's own method knows which states belong on which device, and in which dtype.
        optimizer.load_state_dict(packed)
        for mine, loaded in zip(kept, optimizer.param_groups, strict=True):
            mine.clear()
            mine.update(loaded)
        # It makes new dictionaries; who holds the old ones (schedulers, users) must still be heard.
        optimizer.param_groups = kept

    def as_it_is(self) -> Callable[[], None]:
        """A function that undoes a `load`, and edits of the groups, from here on."""
        optimizer = self.optimizer
        groups, said, state = optimizer.param_groups, [dict(group) for group in optimizer.param_groups], optimizer.state

        def put_back() -> None:
            for group, old in zip(groups, said, strict=True):
                group.clear()
                group.update(old)
            optimizer.param_groups, optimizer.state = groups, state

        return put_back

    def _point_at(self, groups: Sequence[Sequence[nn.Parameter]]) -> None:
        if len(groups) != len(self.optimizer.param_groups):
            raise LayoutError(
                f"the optimizer had {len(groups)} param_groups when the engine was made and has "
                f"{len(self.optimizer.param_groups)} now; pass all groups to deepspeed.initialize"
            )
        for group, members in zip(self.optimizer.param_groups, groups, strict=True):
            group["params"] = list(members)


def _copy_marks(source: nn.Parameter, target: nn.Parameter) -> None:
    """Carry over the plain flags that optimizers look for on a parameter (Muon's ``use_muon`` and so on)."""
    for key, value in vars(source).items():
        if isinstance(value, bool | int | float | str):
            setattr(target, key, value)


def _initial_state(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], state: Mapping[str, Any], master: Master
) -> dict[str, Any]:
    """State of a master whose parameter already has one (Adagrad makes its state when it is constructed)."""
    made_over_freed = any(torch.is_tensor(v) and v.dim() and not v.numel() for v in state.values())
    if made_over_freed and master.value.numel():
        # The optimizer was constructed after the parameters had been sharded, so it saw empty stand-ins.
        probe = type(optimizer)([master.value], **{key: group[key] for key in optimizer.defaults})
        return dict(probe.state[master.value])
    return _cut_state(state, master)


def _cut_state(state: Mapping[str, Any], master: Master) -> dict[str, Any]:
    """The part of a parameter's optimizer state that belongs to ``master``'s piece."""
    piece = master.slot.piece
    result: dict[str, Any] = {}
    for key, value in state.items():
        if torch.is_tensor(value) and value.dim() and value.numel() == piece.param.numel:
            flat = value.detach().reshape(-1)[piece.start : piece.stop]
            result[key] = flat.to(master.value.dtype, copy=True).view(piece.shape)
        elif torch.is_tensor(value) and not value.dim():
            result[key] = value.clone()
        elif torch.is_tensor(value):
            raise LayoutError(
                f"the optimizer already has a state {key!r} of shape {tuple(value.shape)} for {piece.param.name} "
                f"{piece.param.shape}, which cannot be cut; pass an optimizer that has not stepped yet"
            )
        else:
            result[key] = value
    return result
