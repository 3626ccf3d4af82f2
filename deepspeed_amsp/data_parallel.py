"""Which ranks share parameters, where other parallelism stands beside data parallelism. Pure: nobody communicates here.

Ranks that compute with the same parameters on other data form a data-parallel group; the rank grid is laid over one
such group. Under tensor parallelism there are as many groups as a tensor has parts, and the ranks that hold the parts
of the same tensors form model-parallel groups across them. Under sequence parallelism ranks hold whole tensors and
work on parts of a sequence: they are in one group with the others (DeepSpeed calls it sequence-data-parallel).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deepspeed_amsp.about import shortened
from deepspeed_amsp.placement import place_nodes
from deepspeed_amsp.plan.factors import Sharding
from deepspeed_amsp.topology import Topology, TopologyError, counted

Ranks = tuple[int, ...]


@dataclass(frozen=True)
class DataParallel:
    """All data-parallel groups of a run, as every rank sees them, and the one that ``rank`` is in.

    groups: ascending ranks of each, in the order of their first ranks; they have one size and hold every rank once.
    models: the model-parallel groups, which meet each data-parallel one in one rank.
    sequence: how many ranks of a group work on parts of the same sequences.

    Raises:
        TopologyError: the groups are not like that.
    """

    groups: tuple[Ranks, ...]
    models: tuple[Ranks, ...]
    rank: int
    sequence: int = 1

    def __post_init__(self) -> None:
        """Check that both kinds of group divide the ranks, and that they cross each other."""
        world = 1 + max(rank for group in (*self.groups, *self.models) for rank in group)
        for what, groups in (("data", self.groups), ("model", self.models)):
            if sorted(rank for group in groups for rank in group) != list(range(world)):
                raise TopologyError(
                    f"the {what}-parallel groups of the mpu, {_listed(groups)}, do not hold each of ranks 0 to "
                    f"{world - 1} once"
                )
            if len(set(map(len, groups))) > 1:
                raise TopologyError(f"the {what}-parallel groups of the mpu, {_listed(groups)}, differ in size")
        sharing = [frozenset(group) for group in self.groups]
        apart = next((m for m in self.models if any(len(group.intersection(m)) != 1 for group in sharing)), None)
        if apart is not None:
            raise TopologyError(
                f"the model-parallel group {_shown(apart)} of the mpu must have one rank of each data-parallel group, "
                f"{_listed(self.groups)}"
            )
        if self.sequence < 1 or self.size % self.sequence:
            raise TopologyError(
                f"sequences over {self.sequence} ranks do not divide {self.size} ranks that hold the same parameters"
            )

    @property
    def ranks(self) -> Ranks:
        """Those that this rank shares its parameters with, itself included, ascending."""
        return next(group for group in self.groups if self.rank in group)

    @property
    def model(self) -> Ranks:
        """Those that hold the parts of this rank's tensors."""
        return next(group for group in self.models if self.rank in group)

    @property
    def size(self) -> int:
        """s_dp."""
        return len(self.groups[0])

    @property
    def part(self) -> int:
        """Which part of cut tensors this rank and those that it shares parameters with hold, from 0."""
        return self.model.index(self.rank)

    @property
    def parts(self) -> int:
        """Into how many parts the other parallelism cuts tensors."""
        return len(self.models[0])

    @property
    def batches(self) -> int:
        """How many ranks of a group take different samples, which is what batch sizes count."""
        return self.size // self.sequence

    def topology(self, run: Topology) -> Topology:
        """Where this rank's group lies on the nodes of the ``run``.

        Raises:
            TopologyError: a group has different numbers of ranks on its nodes, or not the same as the other groups.
        """
        return self._topologies(run)[self.groups.index(self.ranks)]

    def node_order(self, run: Topology, sharding: Sharding) -> tuple[int, ...]:
        """In which order this rank's grid takes the nodes that it lies on."""
        return place_nodes(self.topology(run), sharding)

    def orders(self, run: Topology, sharding: Sharding) -> tuple[Ranks, ...]:
        """The rank at each position of the grid, for every group: node after node, as `place_nodes` orders them."""
        return tuple(
            tuple(ranks[position] for position in topology.ranks_along(place_nodes(topology, sharding)))
            for ranks, topology in zip(self.groups, self._topologies(run), strict=True)
        )

    def describe(self) -> list[str]:
        """What stands beside data parallelism, a line each; nothing in pure data parallelism."""
        lines = []
        if self.parts > 1:
            lines.append(
                f"{len(self.groups)} data-parallel groups of {self.size} ranks, a model-parallel part each: "
                f"{_listed(self.groups)}"
            )
        if self.sequence > 1:
            lines.append(
                f"sequence parallelism over {self.sequence} ranks: gradients are added up over {self.size} ranks and "
                f"divided by {self.batches}"
            )
        return lines

    def _topologies(self, run: Topology) -> list[Topology]:
        found = [run.of(ranks) for ranks in self.groups]
        if len({topology.gpus_per_node for topology in found}) > 1:
            counts = counted(
                [(_shown(ranks), topology.gpus_per_node) for ranks, topology in zip(self.groups, found, strict=True)]
            )
            raise TopologyError(
                f"the data-parallel groups of the mpu differ in how many of their ranks a node of {run.gpus_per_node} "
                f"has ({counts}); number the ranks so that every group lies on the nodes alike"
            )
        return found


def _shown(ranks: Sequence[int]) -> str:
    return f"[{shortened(list(ranks))}]"


def _listed(groups: Sequence[Sequence[int]]) -> str:
    """The first groups; the others are counted."""
    more = len(groups) - 4
    return " ".join(map(_shown, groups[:4])) + (f" and {more} more" if more > 0 else "")
