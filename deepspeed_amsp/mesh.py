"""The three-axis rank mesh and its process groups. The only file that creates process groups.

Ranks form the grid ``(replicate, optim, param)`` with ``param`` varying fastest; the ``optim`` axis splits
at s_g into ``(outer, inner)``. Which rank stands at which position of the grid is the caller's choice; groups
number their ranks in grid order, which is the order of their rings. Every axis exists once per purpose, so that
a gather never queues behind a reduction in the same communicator; ``merge_communicators`` shares them between
purposes.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from itertools import product
from typing import NamedTuple

import torch
import torch.distributed as dist

from deepspeed_amsp.plan.factors import Sharding
from deepspeed_amsp.topology import LEAF_KEY, TopologyError

GROUP_BACKEND: str | None = None
"""Backend of the groups made here; None means the default group's. Tests put a checking backend here."""


class Purpose(str, Enum):
    """What a communicator is for. Collectives of different purposes never share a queue (unless merged)."""

    SETUP = "setup"
    GATHER = "gather"
    PARAM_REDUCE = "param_reduce"
    GRAD_REDUCE = "grad_reduce"
    PUBLISH = "publish"
    SCALARS = "scalars"


class Coordinates(NamedTuple):
    """A place in the grid."""

    replicate: int
    outer: int
    inner: int
    param: int


@dataclass(frozen=True)
class Group:
    """The ranks along one axis through this rank, in grid order; ``index`` is this rank's place among them.

    ``handle`` is None when the rank is alone. Its own numbering is that of ``ranks``.
    """

    purpose: Purpose
    axis: str
    ranks: tuple[int, ...]
    index: int
    handle: dist.ProcessGroup | None

    @property
    def size(self) -> int:
        return len(self.ranks)


class AxisSizes(NamedTuple):
    """Lengths of the grid's axes; their product is the world size."""

    replicate: int
    outer: int
    inner: int
    param: int

    @classmethod
    def of(cls, sharding: Sharding) -> AxisSizes:
        return cls(sharding.replicate, sharding.optim_outer, sharding.optim_inner, sharding.param)

    def coordinates(self, position: int) -> Coordinates:
        rest, param = divmod(position, self.param)
        rest, inner = divmod(rest, self.inner)
        replicate, outer = divmod(rest, self.outer)
        return Coordinates(replicate, outer, inner, param)

    def position(self, at: Coordinates) -> int:
        return ((at.replicate * self.outer + at.outer) * self.inner + at.inner) * self.param + at.param

    def partition(self, free: tuple[str, ...]) -> list[tuple[int, ...]]:
        """All groups of positions that differ only in the ``free`` coordinates, each in grid order."""
        fixed = [name for name in self._fields if name not in free]
        groups = []
        for values in product(*(range(getattr(self, name)) for name in fixed)):
            at = dict(zip(fixed, values, strict=True))
            members = []
            for free_values in product(*(range(getattr(self, name)) for name in self._fields if name in free)):
                names = [name for name in self._fields if name in free]
                members.append(self.position(Coordinates(**at, **dict(zip(names, free_values, strict=True)))))
            groups.append(tuple(members))
        return groups


AXES: dict[str, tuple[str, ...]] = {
    "param": ("param",),
    "inner": ("inner",),
    "outer": ("outer",),
    "optim": ("outer", "inner"),
    "replicate": ("replicate",),
    "data": ("replicate", "outer", "inner"),
    "shards": ("outer", "inner", "param"),
    "world": ("replicate", "outer", "inner", "param"),
}
"""Axis name -> the coordinates that vary on it. ``data`` is optim x replicate (the all_reduce route);
``shards`` holds one whole copy of the optimizer states."""


class Mesh:
    """Process groups of one plan.

    All ranks create all groups in the same order, each distinct (purpose, rank set) once. New groups inherit
    the default group's timeout. Must be built after ``torch.distributed`` is initialised.

    Args:
        order: the rank at each position of the grid, the same on every rank; None for ascending ranks.

    Raises:
        TopologyError: this torch only makes groups of ascending ranks, and ``order`` needs others.
    """

    def __init__(
        self, sharding: Sharding, merge_communicators: bool = False, order: Sequence[int] | None = None
    ) -> None:
        self.sharding = sharding
        self.sizes = AxisSizes.of(sharding)
        self.rank = dist.get_rank()
        self._order = tuple(range(sharding.s_dp)) if order is None else tuple(order)
        if sorted(self._order) != list(range(sharding.s_dp)):
            raise ValueError(f"order must name each of {sharding.s_dp} ranks once, not {list(self._order)}")
        self.coordinates = self.sizes.coordinates(self._order.index(self.rank))
        self._merge = merge_communicators
        self._handles: dict[tuple[str, tuple[int, ...]], dist.ProcessGroup | None] = {}
        self.world = self._group(Purpose.SETUP, "world")
        self.gather = self._group(Purpose.GATHER, "param")
        self.param_reduce = self._group(Purpose.PARAM_REDUCE, "param")
        self.inner = self._group(Purpose.GRAD_REDUCE, "inner")
        self.outer = self._group(Purpose.GRAD_REDUCE, "outer")
        self.replicate = self._group(Purpose.GRAD_REDUCE, "replicate")
        self.data = self._group(Purpose.GRAD_REDUCE, "data")
        self.publish = self._group(Purpose.PUBLISH, "optim")
        self.scalars = self._group(Purpose.SCALARS, "shards")
        self.world_scalars = self._group(Purpose.SCALARS, "world")
        self.first_rank = self.world.ranks.index(0)
        """Index in `world` of the process with rank 0, whose values everybody starts from."""

    @property
    def owner_index(self) -> int:
        """This rank's place on the ``optim`` axis, outer * inner_size + inner."""
        return self.coordinates.outer * self.sizes.inner + self.coordinates.inner

    def destroy(self) -> None:
        """Destroy the groups made here. Local; must not run while a collective is in flight."""
        if dist.is_initialized():
            for handle in self._handles.values():
                if handle is not None:
                    dist.destroy_process_group(handle)
        self._handles.clear()

    def _group(self, purpose: Purpose, axis: str) -> Group:
        mine: tuple[int, ...] = ()
        for positions in self.sizes.partition(AXES[axis]):
            ranks = tuple(self._order[position] for position in positions)
            self._create(purpose, ranks)
            if self.rank in ranks:
                mine = ranks
        handle = self._handles.get(self._key(purpose, mine))
        return Group(purpose, axis, mine, mine.index(self.rank), handle)

    def _key(self, purpose: Purpose, ranks: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
        return ("" if self._merge else purpose.value, ranks)

    def _create(self, purpose: Purpose, ranks: tuple[int, ...]) -> None:
        key = self._key(purpose, ranks)
        # DeepSpeed asks the scalars' group for a rank (None would mean the whole world to it), so that one
        # exists even for a rank that is alone in it.
        alone = len(ranks) == 1 and purpose is not Purpose.SCALARS
        if alone or key in self._handles:
            return
        handle = _new_group(list(ranks), _default_timeout())
        self._handles[key] = handle if self.rank in ranks else None


def _new_group(ranks: list[int], timeout: timedelta | None) -> dist.ProcessGroup:
    if ranks == sorted(ranks):
        return dist.new_group(ranks, timeout=timeout, backend=GROUP_BACKEND)
    if "sort_ranks" not in inspect.signature(dist.new_group).parameters:
        raise TopologyError(
            f"torch {torch.__version__} sorts the ranks of a group (new_group has no sort_ranks), but this plan "
            f"has another order: install a newer torch. If it is {LEAF_KEY} that orders them, listing the hosts by "
            f"leaf switch in the hostfile or removing the key helps, too."
        )
    return dist.new_group(ranks, timeout=timeout, backend=GROUP_BACKEND, sort_ranks=False)


def _default_timeout() -> timedelta | None:
    """The default group's own timeout, since new_group would fall back to torch's constant."""
    default = dist.group.WORLD
    if default is None:
        return None
    device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
    options = getattr(default._get_backend(device), "options", None)
    timeout = getattr(options, "_timeout", None)
    return timeout if isinstance(timeout, timedelta) else None
