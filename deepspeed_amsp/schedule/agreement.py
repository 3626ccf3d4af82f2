"""What ranks must agree on before a step: which parameters were used, and that they gathered the same units."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch

from deepspeed_amsp.comm import Communicator, Ticket
from deepspeed_amsp.mesh import Group


class DivergenceError(RuntimeError):
    """Ranks ran different modules, so that their collectives over the ``param`` axis do not belong together."""


class Agreement:
    """One small AllReduce a step over all ranks, issued before the gradients are waited for.

    It carries, per trainable parameter, whether any rank had a gradient for it in this window, and (s_p > 1)
    a hash of the order in which units were gathered and reduced, as (h, -h), whose maxima only cancel where
    all ranks have the same. A gather that meets another unit of the same size would else mix their values in
    silence.

    Args:
        names: all trainable parameters, in the same order on every rank.
        compare_order: whether there is an order to compare (s_p > 1).
    """

    def __init__(
        self, names: Sequence[str], comm: Communicator, world: Group, device: torch.device, compare_order: bool
    ) -> None:
        self._index = {name: index for index, name in enumerate(names)}
        self._comm = comm
        self._world = world
        self._device = device
        self._compare_order = compare_order
        self._used: set[str] = set()
        self._order: list[str] = []
        self._hash = 0

    def used(self, name: str) -> None:
        """A gradient of parameter ``name`` has arrived on this rank."""
        self._used.add(name)

    def issued(self, action: str) -> None:
        """A collective over the ``param`` axis was issued for a unit."""
        if self._compare_order:
            self._order.append(action)
            self._hash = zlib.crc32(action.encode(), self._hash)

    def ask(self) -> tuple[torch.Tensor, Ticket | None]:
        """Issue the exchange; pass what it returns to `unused` and `check`."""
        flags = [0] * len(self._index)
        for name in self._used:
            flags[self._index[name]] = 1
        vector = torch.tensor([*flags, self._hash, -self._hash], dtype=torch.int64, device=self._device)
        ticket = None
        if self._world.size > 1:
            ticket = self._comm.all_reduce(self._world, vector, "agreement", largest=True)
        return vector, ticket

    def check(self, vector: torch.Tensor) -> None:
        """Read the hashes on the host: with s_p > 1 one read a step, before anything is updated.

        Raises:
            DivergenceError: on every rank, with the first action that differs and the ranks.
        """
        if not self._compare_order:
            return
        high, low = vector[-2:].tolist()
        if high == -low:
            return
        orders = self._comm.all_gather_objects(self._world, self._order)
        raise DivergenceError(_first_difference(orders, self._world.ranks))

    def unused(self, vector: torch.Tensor, owned: Sequence[str]) -> set[str]:
        """Of the parameters ``owned`` here, those without a gradient on any rank.

        Reads the host copy only if this rank itself had no gradient for one of them.
        """
        doubtful = [name for name in owned if name not in self._used]
        if not doubtful:
            return set()
        flags = vector.tolist()
        return {name for name in doubtful if not flags[self._index[name]]}

    def start_window(self) -> None:
        self._used.clear()
        self._order.clear()
        self._hash = 0


def _first_difference(orders: Sequence[Sequence[str]], ranks: Sequence[int]) -> str:
    longest = max(len(order) for order in orders)
    for position in range(longest):
        actions = [order[position] if position < len(order) else "nothing more" for order in orders]
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
    return "ranks disagree on the order of their gathers"
