"""The three-axis rank mesh and its process groups. The only file that creates process groups.

Ranks form the grid ``(replicate, optim, param)`` with ``param`` varying fastest; the ``optim`` axis splits
at s_g into ``(outer, inner)``, and each of them at the node into a cross-node and an in-node part. Which rank
stands at which position of the grid is the caller's choice; groups number their ranks in grid order, which is the
order of their rings. Every axis exists once per purpose, so that a gather never queues behind a reduction in the
same communicator; ``merge_communicators`` shares them between purposes.

Beside tensor parallelism there is one such grid for every data-parallel group, all alike.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from itertools import product
from typing import NamedTuple

import torch
import torch.distributed as dist

from deepspeed_amsp.plan.factors import ShardFactor, Sharding
from deepspeed_amsp.topology import LEAF_KEY, TopologyError

GROUP_BACKEND: str | None = None
"""Backend of the groups made here; None means the default group's. Tests put a checking backend here."""


class Purpose(str, Enum):
    """What a communicator is for. Collectives of different purposes never share a queue (unless merged)."""

    SETUP = "setup"
    GATHER = "gather"
    PARAM_REDUCE = "param_reduce"
    GRAD_REDUCE = "grad_reduce"
    GRAD_GATHER = "grad_gather"
    PUBLISH = "publish"
    SCALARS = "scalars"
    PROFILE = "profile"


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


class Grid(NamedTuple):
    """One number for every axis of the grid, the last varying fastest: their lengths, or the coordinates of a place.

    The three axes ``replicate``, ``optim`` = (``outer``, ``inner``) and ``param`` are each taken apart into a part
    across nodes and one inside a node. Factors that nest (Eq. 5-7) make the order of ranks, node by node, the grid's.
    """

    replicate_cross: int
    replicate_node: int
    outer_cross: int
    outer_node: int
    inner_cross: int
    inner_node: int
    param: int

    @classmethod
    def sizes(cls, sharding: Sharding) -> Grid:
        p, g, os, dp = (sharding.parameters, sharding.gradients, sharding.optimizer_states, sharding.data_parallel)
        outer, inner = (os.s1 // g.s1, os.s0 // g.s0), (g.s1 // p.s1, g.s0 // p.s0)
        return cls(dp.s1 // os.s1, dp.s0 // os.s0, *outer, *inner, p.size)

    def coordinates(self, position: int) -> Grid:
        """Where ``position`` is in a grid of these sizes."""
        digits = []
        for size in reversed(self):
            position, digit = divmod(position, size)
            digits.append(digit)
        return Grid(*reversed(digits))

    def position(self, at: Grid) -> int:
        """The position of ``at`` in a grid of these sizes."""
        number = 0
        for size, digit in zip(self, at, strict=True):
            number = number * size + digit
        return number

    def partition(self, axis: tuple[str, ...]) -> list[tuple[int, ...]]:
        """All groups of positions that differ only in the coordinates of ``axis``, of which the last varies fastest."""
        fixed = [name for name in self._fields if name not in axis]
        groups = []
        for values in product(*(range(getattr(self, name)) for name in fixed)):
            base = Grid(*[0] * len(self))._replace(**dict(zip(fixed, values, strict=True)))
            free = product(*(range(getattr(self, name)) for name in axis))
            groups.append(tuple(self.position(base._replace(**dict(zip(axis, at, strict=True)))) for at in free))
        return groups


_INNER, _OUTER, _REPLICATE = (
    ("inner_cross", "inner_node"),
    ("outer_cross", "outer_node"),
    ("replicate_cross", "replicate_node"),
)
AXES: dict[str, tuple[str, ...]] = {
    "param": ("param",),
    "inner": _INNER,
    "outer": _OUTER,
    "replicate": _REPLICATE,
    "data": (*_REPLICATE, *_OUTER, *_INNER),
    "shards": (*_OUTER, *_INNER, "param"),
    "data_parallel": Grid._fields,
    # By owner number, which counts stage by stage (see `plan.layout.OwnerGrid`).
    "optim": (*_INNER, *_OUTER),
    "optim_staged": (*reversed(_INNER), *reversed(_OUTER)),
    "optim_cross": ("inner_cross", "outer_cross"),
    "optim_node": ("inner_node", "outer_node"),
    "data_cross": ("replicate_cross", "outer_cross", "inner_cross"),
    "data_node": ("replicate_node", "outer_node", "inner_node"),
    **{name: (name,) for name in Grid._fields if name != "param"},
}
"""Axis name -> the coordinates that vary on it, in the order of the group's ranks. ``data`` is optim x replicate
(the all_reduce route); ``shards`` holds one whole copy of the optimizer states."""


@dataclass(frozen=True)
class Span:
    """An axis over which a collective may go in one stage (``flat``) or, across nodes, in two.

    ``back`` has the ranks of ``node`` and a queue of its own, for the way back of a sum: the stages of several
    buckets are under way at once, and within a queue all ranks must agree on their order (see `schedule.pipeline`).
    """

    flat: Group
    node: Group | None = None
    cross: Group | None = None
    back: Group | None = None

    @property
    def size(self) -> int:
        return self.flat.size

    @property
    def stage_sizes(self) -> list[int]:
        """Ranks in each stage of an AllReduce: there, across nodes, and back."""
        return (
            [self.size]
            if self.node is None or self.cross is None
            else [self.node.size, self.cross.size, self.node.size]
        )


class Mesh:
    """Process groups of one plan.

    All ranks create all groups in the same order, each distinct (purpose, rank set) once. New groups inherit
    the default group's timeout. Must be built after ``torch.distributed`` is initialised.

    Args:
        hierarchical: make the groups for collectives in two stages, in node and across nodes.
        orders: for every data-parallel group of the run the rank at each position of its grid, the same on every rank;
            None for one group of ascending ranks.
        models: all model-parallel groups, which cross the data-parallel ones; none without model parallelism.

    Raises:
        TopologyError: this torch only makes groups of ascending ranks, and others are needed.
    """

    def __init__(
        self,
        sharding: Sharding,
        merge_communicators: bool = False,
        hierarchical: bool = False,
        orders: Sequence[Sequence[int]] | None = None,
        models: Sequence[Sequence[int]] = (),
    ) -> None:
        self.sharding = sharding
        self.sizes = Grid.sizes(sharding)
        self.rank = dist.get_rank()
        self._orders = [tuple(order) for order in orders or [range(sharding.s_dp)]]
        run = sorted(rank for order in self._orders for rank in order)
        if run != list(range(sharding.s_dp * len(self._orders))):
            raise ValueError(f"orders must name each rank once, {sharding.s_dp} in each, not {self._orders}")
        self.order = next(order for order in self._orders if self.rank in order)
        """The rank at each position of this rank's grid."""
        self.coordinates = self.sizes.coordinates(self.order.index(self.rank))
        self.hierarchical = hierarchical
        self.merged = merge_communicators
        self._handles: dict[tuple[str, tuple[int, ...]], dist.ProcessGroup | None] = {}
        everybody = self.order if len(self._orders) == 1 else tuple(run)
        self.world = self._among(Purpose.SETUP, "world", [everybody])
        """All ranks of the run: for what is decided or reported once."""
        self.data_parallel = self._group(Purpose.SETUP, "data_parallel")
        """All ranks of this rank's grid: those that start from the same values."""
        self.param_groups = self._ranks("param")
        """Who shares the parameters of one copy, everywhere in the run."""
        self.gather = self._group(Purpose.GATHER, "param")
        self.param_reduce = self._group(Purpose.PARAM_REDUCE, "param")
        self.inner_stages = self._stages("inner")
        """Over which every micro-batch's gradients are reduced, in this order; in node first if hierarchical."""
        self.outer_stages = self._stages("outer")
        self.inner = self._span(Purpose.GRAD_REDUCE, "inner")
        self.replicate = self._span(Purpose.GRAD_REDUCE, "replicate")
        self.data = self._span(Purpose.GRAD_REDUCE, "data")
        self.publish = self._span(Purpose.PUBLISH, "optim", by_owner="optim_staged" if hierarchical else "optim")
        self.scalars = self._group(Purpose.SCALARS, "shards")
        self.world_scalars = self._among(Purpose.SCALARS, "world", [everybody])
        alone = Group(Purpose.SCALARS, "model", (self.rank,), 0, None)
        self.model = self._among(Purpose.SCALARS, "model", [tuple(group) for group in models]) if models else alone
        """The ranks that hold the parts of this rank's tensors, alone without model parallelism."""
        self.first_rank = self.order.index(min(self.order))
        """Index in `data_parallel` of the rank whose values everybody there starts from."""

    @property
    def stages(self) -> tuple[Group, ...]:
        """All stages in which a gradient gets to its owner."""
        return (*self.inner_stages, *self.outer_stages)

    @property
    def kept_coordinates(self) -> tuple[int, ...]:
        """This rank's coordinates in the inner stages: which part of a gradient rests here."""
        return tuple(group.index for group in self.inner_stages)

    @property
    def owner(self) -> int:
        """This rank's number as an owner."""
        return self.publish.flat.index

    @property
    def starts(self) -> bool:
        """Whether the others of this grid start from this rank's values: rank 0 in pure data parallelism."""
        return self.data_parallel.index == self.first_rank

    @property
    def first_replica(self) -> bool:
        return self.replicate.flat.index == 0

    def destroy(self) -> None:
        """Destroy the groups made here. Local; must not run while a collective is in flight."""
        if dist.is_initialized():
            for handle in self._handles.values():
                if handle is not None:
                    dist.destroy_process_group(handle)
        self._handles.clear()

    def _stages(self, axis: str) -> tuple[Group, ...]:
        names = (f"{axis}_node", f"{axis}_cross") if self.hierarchical else (axis,)
        return tuple(self._group(Purpose.GRAD_REDUCE, name) for name in names)

    def _span(self, purpose: Purpose, axis: str, by_owner: str | None = None) -> Span:
        flat = self._group(purpose, by_owner or axis, axis)
        if not self.hierarchical:
            return Span(flat)
        node, cross = self._group(purpose, f"{axis}_node"), self._group(purpose, f"{axis}_cross")
        # An axis that lies in a node, or has one rank of every node, has nothing to do in two stages.
        if node.size == 1 or cross.size == 1:
            return Span(flat)
        back = self._group(Purpose.GRAD_GATHER, f"{axis}_node") if purpose is Purpose.GRAD_REDUCE else None
        return Span(flat, node, cross, back)

    def _group(self, purpose: Purpose, axis: str, name: str | None = None) -> Group:
        return self._among(purpose, name or axis, self._ranks(axis))

    def _ranks(self, axis: str) -> list[tuple[int, ...]]:
        """All groups along an axis, of all grids."""
        parts = self.sizes.partition(AXES[axis])
        return [tuple(order[position] for position in positions) for order in self._orders for positions in parts]

    def _among(self, purpose: Purpose, axis: str, groups: Sequence[tuple[int, ...]]) -> Group:
        """The one of ``groups`` that this rank is in. All ranks of the run take part in creating each of them."""
        for ranks in groups:
            self._create(purpose, ranks)
        mine = next(ranks for ranks in groups if self.rank in ranks)
        return Group(purpose, axis, mine, mine.index(self.rank), self._handles.get(self._key(purpose, mine)))

    def _key(self, purpose: Purpose, ranks: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
        return ("" if self.merged else purpose.value, ranks)

    def _create(self, purpose: Purpose, ranks: tuple[int, ...]) -> None:
        key = self._key(purpose, ranks)
        # DeepSpeed asks the scalars' group for a rank (None would mean the whole world to it), so that one
        # exists even for a rank that is alone in it.
        alone = len(ranks) == 1 and purpose is not Purpose.SCALARS
        if alone or key in self._handles:
            return
        handle = _new_group(list(ranks), _default_timeout())
        self._handles[key] = handle if self.rank in ranks else None


def make_siblings(mesh: ShardFactor, data_parallel: ShardFactor) -> Group:
    """The group of ``mesh`` GPUs through this rank, for the profiler; the caller gives it to `destroy_group`.

    All ranks make all groups of that shape. Those in a node have neighbouring ranks, as a param axis has; those across
    nodes have every (R / s0)-th of a node, as an optim axis has. All ranks call this, in one order of meshes.
    """
    one, whole = ShardFactor(data_parallel.s0 // mesh.s0), ShardFactor(data_parallel.s0, mesh.s1)
    if mesh.s1 == 1:
        sharding, axis = Sharding(mesh, mesh, mesh, data_parallel), "param"
    else:
        sharding, axis = Sharding(one, whole, whole, data_parallel), "optim"
    found = None
    for ranks in Grid.sizes(sharding).partition(AXES[axis]):
        handle = _new_group(list(ranks), _default_timeout())
        if dist.get_rank() in ranks:
            found = Group(Purpose.PROFILE, str(mesh), ranks, ranks.index(dist.get_rank()), handle)
    assert found is not None, "the groups are a partition of the ranks"
    return found


def destroy_group(group: Group) -> None:
    """Destroy what `make_siblings` made. Local; must not run while a collective is in flight, nor before all ranks have
    been through one: others may still be connecting."""
    dist.destroy_process_group(group.handle)


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


def launch_order_warning(device_type: str, merged: bool, env: Mapping[str, str]) -> str | None:
    """What to say about NCCL with several communicators on one device: without an implicit launch order, kernels of
    different communicators may be launched in another order on another rank, and block each other."""
    if device_type != "cuda" or merged or env.get("NCCL_LAUNCH_ORDER_IMPLICIT", "0") not in ("", "0"):
        return None
    return (
        'several communicators are used side by side: set NCCL_LAUNCH_ORDER_IMPLICIT=1, or "merge_communicators": true '
        "in the amsp block, if ranks ever hang in a collective"
    )


def _default_timeout() -> timedelta | None:
    """The default group's own timeout, since new_group would fall back to torch's constant."""
    default = dist.group.WORLD
    if default is None:
        return None
    device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
    options = getattr(default._get_backend(device), "options", None)
    timeout = getattr(options, "_timeout", None)
    return timeout if isinstance(timeout, timedelta) else None
