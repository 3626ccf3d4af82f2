"""What ranks must agree on before a step: which parameters were used, and that they gathered the same units."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Collection, Sequence

import torch
from deepspeed.accelerator import get_accelerator

from deepspeed_amsp.comm import Communicator, Ticket
from deepspeed_amsp.mesh import Group

REMEMBERED = 20_000
"""Actions that a message can look back on: evaluation and generation between two steps may make any number."""

_UNSAID = -(2**62)
"""What a rank says about other groups' orders; every rank's own hash is larger."""

_USED, _LATE = 1, 2
"""Flags of a parameter; the largest of all ranks counts, 0 is unused."""


class DivergenceError(RuntimeError):
    """Ranks ran different modules, so that their collectives over the ``param`` axis do not belong together."""


class Agreement:
    """One small AllReduce a step over all ranks, issued before the gradients are waited for.

    It carries, per trainable parameter, whether any rank had a gradient for it in this window, and one that came too
    late (see `GradientReducer.late`), and (s_p > 1) per ``param`` group a hash of the order in which units were
    gathered and reduced, as (h, -h), whose maxima only cancel where all ranks of the group have the same. A gather
    that meets another unit of the same size would else mix their values in silence. Groups may differ from each
    other: they share no such collective.

    Args:
        names: all trainable parameters, in the same order on every rank.
        groups: the ranks of every group of the ``param`` axis. Groups of one rank have no order.
    """

    def __init__(
        self,
        names: Sequence[str],
        comm: Communicator,
        world: Group,
        groups: Sequence[tuple[int, ...]],
        device: torch.device,
    ) -> None:
        self._index = {name: index for index, name in enumerate(names)}
        self._comm = comm
        self._world = world
        self._device = device
        self._groups = groups if len(groups[0]) > 1 else ()
        me = world.ranks[world.index]
        self._mine = next((number for number, ranks in enumerate(self._groups) if me in ranks), 0)
        self._used: set[str] = set()
        self._order: deque[str] = deque(maxlen=REMEMBERED)
        self._issued = 0
        self._hash = 0
        self._late: deque[tuple[LateRead, tuple[int, list[str]]]] = deque()

    def used(self, name: str) -> None:
        """A gradient of parameter ``name`` has arrived on this rank."""
        self._used.add(name)

    def issued(self, action: str) -> None:
        """A collective over the ``param`` axis was issued for a unit."""
        if self._groups:
            self._order.append(action)
            self._issued += 1
            self._hash = zlib.crc32(action.encode(), self._hash)

    def ask(self, late: Collection[str]) -> tuple[torch.Tensor, Ticket | None]:
        """Issue the exchange; `check`, `unused` and `late` take its values, once somebody has read them."""
        flags = [0] * len(self._index)
        for name in self._used:
            flags[self._index[name]] = _USED
        for name in late:
            flags[self._index[name]] = _LATE
        hashes = [_UNSAID, _UNSAID] * len(self._groups)
        if hashes:
            hashes[2 * self._mine : 2 * self._mine + 2] = [self._hash, -self._hash]
        vector = torch.tensor([*flags, *hashes], dtype=torch.int64, device=self._device)
        ticket = None
        if self._world.size > 1 and vector.numel():
            ticket = self._comm.all_reduce(self._world, vector, "agreement", largest=True)
        return vector, ticket

    @property
    def has_order(self) -> bool:
        """Whether there is an order of gathers to compare."""
        return len(self._groups) > 0

    def late(self, values: Sequence[float]) -> set[str]:
        """Parameters of which some rank has a gradient that came too late."""
        return {name for name, index in self._index.items() if values[index] == _LATE}

    def must_read(self, owned: Sequence[str]) -> bool:
        """Whether this rank must know what the others used: it had itself no gradient for something that it owns."""
        return not self._used.issuperset(owned)

    def check(self, values: Sequence[float]) -> None:
        """Compare the orders of gathers.

        Raises:
            DivergenceError: on every rank, with the first action that differs and the ranks.
        """
        self._compare(values[len(self._index) :], (self._issued, list(self._order)))

    def check_later(self, vector: torch.Tensor) -> None:
        """Compare the orders two steps later, when the device's values have come to the host by themselves."""
        if self.has_order:
            self._late.append((LateRead(vector[len(self._index) :]), (self._issued, list(self._order))))

    def check_late(self) -> None:
        """Compare what `check_later` was given two steps ago; as `check`, and like it on all ranks at the same step.

        Comparing as soon as values happen to be there would let one rank ask the others while they train on.
        """
        while len(self._late) > 1:
            read, order = self._late.popleft()
            self._compare(read.values(), order)

    def _compare(self, hashes: Sequence[float], order: tuple[int, list[str]]) -> None:
        wrong = [ranks for at, ranks in enumerate(self._groups) if hashes[2 * at] != -hashes[2 * at + 1]]
        if not wrong:
            return
        orders = dict(zip(self._world.ranks, self._comm.all_gather_objects(self._world, order), strict=True))
        raise DivergenceError(_first_difference([orders[rank] for rank in wrong[0]], wrong[0]))

    def unused(self, values: Sequence[float], owned: Sequence[str]) -> set[str]:
        """Of the parameters ``owned`` here, those without a gradient on any rank."""
        return {name for name in owned if not values[self._index[name]]}

    def start_window(self) -> None:
        self._used.clear()
        self._order.clear()
        self._issued = 0
        self._hash = 0


class LateRead:
    """Values of a device tensor [n] for the host, which waits only if it is two steps ahead of the device."""

    def __init__(self, tensor: torch.Tensor) -> None:
        accelerator = get_accelerator()
        self._host = accelerator.pin_memory(torch.empty(tensor.shape, dtype=tensor.dtype))
        self._host.copy_(tensor, non_blocking=True)
        self._copied = accelerator.Event()
        self._copied.record()

    def values(self) -> list[float]:
        self._copied.synchronize()
        return list(self._host.tolist())


def _first_difference(orders: Sequence[tuple[int, Sequence[str]]], ranks: Sequence[int]) -> str:
    """The message; an order is (how many actions, the last of them)."""
    first = max(count - len(kept) for count, kept in orders)
    for position in range(first, max(count for count, _ in orders)):
        actions = [
            kept[position - (count - len(kept))] if position < count else "nothing more" for count, kept in orders
        ]
        if len(set(actions)) > 1:
            seen = "; ".join(
                f"{action} on rank{'s' if len(who) > 1 else ''} {', '.join(map(str, who))}"
                for action in dict.fromkeys(actions)
                for who in [[rank for rank, a in zip(ranks, actions, strict=True) if a == action]]
            )
            return (
                f"ranks ran different modules, so their gathers do not match and this step's values are wrong. "
                f"First difference: {seen}. With parameters sharded every rank must call the same modules; mark "
                f"the module that chooses between them as a leaf (deepspeed.utils.set_z3_leaf_modules), or set "
                f"amsp.sharding.parameters to [1, 1]."
            )
    return f"ranks {list(ranks)} disagree on the order of their gathers, long before the last {REMEMBERED} of them"
