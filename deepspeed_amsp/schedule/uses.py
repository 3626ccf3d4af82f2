"""Which units a backward has still to do with: nothing may be freed that somebody reads later (s_p > 1)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from deepspeed_amsp.partition.params import ShardedUnit


def running_backward() -> int:
    """The number of the innermost backward that autograd is running here, -1 if none; inner ones have higher ones."""
    return int(torch._C._current_graph_task_id())


def in_backward() -> bool:
    """Whether autograd is running a backward pass here; a forward then is a recomputation."""
    return running_backward() != -1


class ModuleUse:
    """One call of a module, whose backward will read ``units``: its own and those that it borrowed."""

    __slots__ = ("ends_with_inputs", "units")

    def __init__(self, units: list[ShardedUnit]) -> None:
        self.units = units
        self.ends_with_inputs = False
        """Somebody says `OpenUses.end` when all inputs of the call have their gradients."""

    @property
    def frozen(self) -> bool:
        """Whether no gradient will say when some unit is done."""
        return any(not unit.trainable for unit in self.units)


class OpenUses:
    """Counts, per unit, the calls whose backward has begun and may not be over.

    A trained unit is freed when its gradients are complete, a frozen one when the inputs of all calls have their
    gradients; in both cases only when no call is open. What stays in doubt stays until the backward is over.

    A gradient that arrives in one backward says nothing about the backwards around it (a re-entrant checkpoint runs
    one inside another): they may bring another one, and calls that they opened stay open.

    Args:
        free: drops the full copy of a unit.
    """

    def __init__(self, free: Callable[[ShardedUnit], None]) -> None:
        self._free = free
        self._open: dict[int, dict[ModuleUse, int]] = {}
        self._arrived: dict[tuple[int, int], set[int]] = {}
        self._complete: set[int] = set()

    def begin(self, use: ModuleUse) -> None:
        """The backward of a call is next."""
        for unit in use.units:
            self._open.setdefault(unit.index, {})[use] = running_backward()
        if use.frozen and not use.ends_with_inputs:
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self.end(use))

    def read(self, unit: ShardedUnit) -> None:
        """A recomputation read the unit outside any module's forward: nothing will say when that is over."""
        self._open.setdefault(unit.index, {})[ModuleUse([unit])] = running_backward()

    def end(self, use: ModuleUse) -> None:
        """The backward of a call is over: all its inputs have their gradients, or the graph was left."""
        for unit in use.units:
            others = self._open.get(unit.index, {})
            was_open = others.pop(use, None) is not None
            if was_open and not others and (not unit.trainable or unit.index in self._complete):
                self._free(unit)

    def gradient(self, unit: ShardedUnit, index: int) -> None:
        """Parameter ``index`` of a unit has its gradient of the running backward.

        Ranks may use different parts of a leaf, so one is never freed before the end, which is the same for all.
        """
        now = running_backward()
        arrived = self._arrived.setdefault((unit.index, now), set())
        arrived.add(index)
        if len(arrived) < len(unit.parameters) or unit.leaf:
            return
        outer = {use: begun for use, begun in self._open.get(unit.index, {}).items() if begun < now}
        self._open[unit.index] = outer
        self._complete.add(unit.index)
        if not outer:
            self._free(unit)

    def clear(self) -> None:
        """The outermost backward is over."""
        self._open.clear()
        self._arrived.clear()
        self._complete.clear()
