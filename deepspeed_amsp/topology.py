"""Which rank is on which node. Pure: the caller gathers host names and environment, nobody communicates here.

A node is gpus_per_node consecutive ranks. It is a host, or a part of one when gpus_per_node is set smaller
than the host's count, which lets one machine play several nodes.
"""

from __future__ import annotations

import difflib
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

# Set by whoever started the ranks of this host: torchrun and the deepspeed launcher, or the likes of mpirun.
LOCAL_SIZE_VARIABLES: tuple[str, ...] = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE")


LEAF_KEY = "amsp.topology.leaf_switches"

SHOWN_HOSTS = 8
"""As many are named in an error; a cluster may have hundreds."""


class TopologyError(ValueError):
    """The ranks do not lie on the hosts in a way that sharding can use."""


@dataclass(frozen=True)
class Topology:
    """world_size ranks, gpus_per_node consecutive ones to a node.

    leaves: the leaf switch of each node, numbered from 0; None when not known.
    """

    world_size: int
    gpus_per_node: int
    leaves: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        """Check that every node is full and, where switches are known, that it has one."""
        for name in ("world_size", "gpus_per_node"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise TopologyError(f"{name} must be a positive integer, not {value!r}.")
        if self.world_size % self.gpus_per_node != 0:
            raise TopologyError(
                f"gpus_per_node = {self.gpus_per_node} does not divide world_size = {self.world_size}; "
                f"legal values of gpus_per_node: {_divisors(self.world_size)}."
            )
        if self.leaves is not None and len(self.leaves) != self.nodes:
            raise TopologyError(f"{len(self.leaves)} leaf switches are given for {self.nodes} nodes; need one each.")

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return self.world_size // self.gpus_per_node

    def node_of(self, rank: int) -> int:
        """The node of a rank, from 0."""
        return self._checked(rank) // self.gpus_per_node

    def local_index(self, rank: int) -> int:
        """Position of the rank in its node, from 0."""
        return self._checked(rank) % self.gpus_per_node

    def ranks_of(self, node: int) -> range:
        """The ranks of a node, ascending."""
        if not 0 <= node < self.nodes:
            raise TopologyError(f"node {node} is not in 0..{self.nodes - 1}.")
        return range(node * self.gpus_per_node, (node + 1) * self.gpus_per_node)

    def ranks_along(self, node_order: Sequence[int]) -> tuple[int, ...]:
        """All ranks, node after node in `node_order`, ascending within a node."""
        return tuple(rank for node in node_order for rank in self.ranks_of(node))

    def of(self, ranks: Sequence[int]) -> Topology:
        """Where some of the ranks lie, given ascending and counted from 0 then.

        Raises:
            TopologyError: they are spread unevenly over the nodes that they are on.
        """
        counts = Counter(self.node_of(rank) for rank in ranks)
        if len(set(counts.values())) > 1:
            where = counted([(f"node {node}", count) for node, count in counts.items()])
            raise TopologyError(
                f"ranks {_shortened(ranks)}, which share their parameters, are spread unevenly over nodes of "
                f"{self.gpus_per_node} GPUs ({where}); every node needs the same number of them: change the groups of "
                f'the mpu, or set "topology": {{"gpus_per_node": ...}} to another number.'
            )
        leaves = None if self.leaves is None else tuple(self.leaves[node] for node in counts)
        return Topology(len(ranks), next(iter(counts.values())), leaves)

    def _checked(self, rank: int) -> int:
        if not 0 <= rank < self.world_size:
            raise TopologyError(f"rank {rank} is not in 0..{self.world_size - 1}.")
        return rank


def detect_topology(
    gpus_per_node: int | None,
    env: Mapping[str, str],
    world_size: int,
    host_names: Sequence[str] | None,
    leaf_switches: Sequence[Sequence[str]] | None = None,
    table_name: str = LEAF_KEY,
) -> Topology:
    """The checked topology of a run; gpus_per_node and leaf_switches are the values of amsp.topology.

    table_name: how errors call leaf_switches, for a table that comes from a file.
    """
    per_node = detect_gpus_per_node(gpus_per_node, env, world_size, host_names)
    if leaf_switches is None:
        return Topology(world_size, per_node)
    if host_names is None:
        raise TopologyError(f"{table_name} needs the host name of every rank.")
    check_leaf_switches(leaf_switches, host_names, table_name)
    leaf_of = {host: leaf for leaf, row in enumerate(leaf_switches) for host in row}
    return Topology(world_size, per_node, tuple(leaf_of[host] for host in host_names[::per_node]))


def detect_gpus_per_node(
    block_value: int | None, env: Mapping[str, str], world_size: int, host_names: Sequence[str] | None
) -> int:
    """GPUs of a node: amsp.topology.gpus_per_node, else what the launcher says, else the ranks of a host.

    host_names has the host of each rank, in rank order. Without it the launcher's LOCAL_WORLD_SIZE or
    LOCAL_SIZE is believed, and without that the whole world is one host. Raises TopologyError when hosts are
    uneven or their ranks are not contiguous (unless block_value divides every stretch of ranks on one host), when
    launcher and host names disagree, and when block_value does not divide a host. Every rank gets the same answer
    or the same error as long as the launcher says the same everywhere.
    """
    said = _launcher_says(env)
    if host_names is not None:
        stretches = _stretches(host_names, world_size)
        if block_value is None:
            _check_contiguous(host_names, stretches)
        counts, seen = [count for _, count in stretches], f"the hosts have {counted(stretches)}"
    elif said is not None:
        counts, seen = _split(world_size, said[1]), f"{said[0]} = {said[1]}, world size {world_size}"
    else:
        counts, seen = [world_size], f"one host has all {world_size}"
    if block_value is not None:
        return _cut(block_value, math.gcd(*counts), seen)
    if len(set(counts)) > 1:
        raise TopologyError(f"hosts have different numbers of ranks ({seen}). {_possible(counts)}")
    if said is None:
        return counts[0]
    # Several agents on one machine share its name: their smaller number is a node as good as the host.
    if counts[0] % said[1] != 0:
        raise TopologyError(
            f"{said[0]} = {said[1]} contradicts the host names ({seen}); unset it, start the same number of "
            'ranks on every host, or set "topology": {"gpus_per_node": ...}.'
        )
    return said[1]


def check_leaf_switches(
    leaf_switches: Sequence[Sequence[str]], host_names: Sequence[str], table_name: str = LEAF_KEY
) -> None:
    """Every host of this run stands once under one switch, and nothing else does. Raises TopologyError."""
    hosts = sorted(set(host_names))
    named = [name for row in leaf_switches for name in row]
    unknown = [name for name in named if name not in hosts]
    if unknown:
        nearest = difflib.get_close_matches(unknown[0], hosts, n=1, cutoff=0.0)[0]
        raise TopologyError(
            f"{table_name} names {', '.join(unknown)}, which no rank runs on; "
            f"did you mean {nearest!r}? Hosts of this run: {', '.join(hosts)}."
        )
    twice = sorted({name for name in named if named.count(name) > 1})
    if twice:
        raise TopologyError(f"{table_name} names {', '.join(twice)} more than once; a host is under one leaf switch.")
    empty = [str(number) for number, row in enumerate(leaf_switches, start=1) if not row]
    if empty:
        raise TopologyError(f"{table_name} has no host in row {', '.join(empty)}; remove the row.")
    missing = [host for host in hosts if host not in named]
    if missing:
        raise TopologyError(
            f"{table_name} misses {', '.join(missing)}; put every host of this run under its leaf switch, or "
            f"remove the key."
        )


def _launcher_says(env: Mapping[str, str]) -> tuple[str, int] | None:
    for name in LOCAL_SIZE_VARIABLES:
        text = env.get(name, "").strip()
        if text:
            if not (text.isascii() and text.isdigit()) or int(text) < 1:
                raise TopologyError(f"{name} must be a positive integer, not {text!r}.")
            return name, int(text)
    return None


def _stretches(host_names: Sequence[str], world_size: int) -> list[tuple[str, int]]:
    """Consecutive ranks on one host, in rank order: (host, how many)."""
    if len(host_names) != world_size:
        raise TopologyError(f"{len(host_names)} host names for world size {world_size}; need one per rank.")
    return [(name, len(list(ranks))) for name, ranks in groupby(host_names)]


def _check_contiguous(host_names: Sequence[str], stretches: Sequence[tuple[str, int]]) -> None:
    """Raises TopologyError when the ranks of a host are not numbered one after the other."""
    starts = Counter(name for name, _ in stretches)
    split = sorted(name for name, count in starts.items() if count > 1)
    if not split:
        return
    where = [
        f"{name} has ranks {_shortened([rank for rank, host in enumerate(host_names) if host == name])}"
        for name in split[:SHOWN_HOSTS]
    ]
    more = [f"{len(split) - SHOWN_HOSTS} more hosts are alike"] if len(split) > SHOWN_HOSTS else []
    common = math.gcd(*(count for _, count in stretches))
    node = "each rank" if common == 1 else f"every {common} consecutive ranks"
    raise TopologyError(
        f"the ranks of a host must be contiguous, but {', '.join([*where, *more])}; number them host by host, as the "
        f"deepspeed launcher and torchrun do (mpirun: --map-by slot), or set "
        f'"topology": {{"gpus_per_node": {common}}} to count {node} as a node.'
    )


def _split(world_size: int, local: int) -> list[int]:
    """Hosts of `local` ranks and what is left over for the last one."""
    whole, left = divmod(world_size, local)
    return [local] * whole + [left] * (left > 0)


def counted(hosts: Sequence[tuple[str, int]]) -> str:
    """(host or node, how many) as "a: 8, b: 4"; of many only those that differ from most, and how many those are."""
    if len(hosts) <= SHOWN_HOSTS:
        return ", ".join(f"{name}: {count}" for name, count in hosts)
    usual, _ = Counter(count for _, count in hosts).most_common(1)[0]
    odd = [f"{name}: {count}" for name, count in hosts if count != usual]
    others = f"{len(hosts) - len(odd)} {'others' if odd else 'hosts'}: {usual} each"
    left_out = [f"{len(odd) - SHOWN_HOSTS} more with other numbers"] if len(odd) > SHOWN_HOSTS else []
    return ", ".join([*odd[:SHOWN_HOSTS], *left_out, others])


def _possible(counts: Sequence[int]) -> str:
    """What uneven hosts can do: nodes of a size that divides the count of each host (accelerate#2780)."""
    common = math.gcd(*counts)
    if common == 1:
        return (
            "No number above 1 divides every host, so only s0 = 1 is possible: start the same number "
            'of ranks on every host, or set "topology": {"gpus_per_node": 1} to count each GPU as a node.'
        )
    return (
        f'Set "topology": {{"gpus_per_node": {common}}} to cut the hosts into {sum(counts) // common} nodes '
        f"of {common} GPUs; s0 may then be {_listed(_divisors(common))}."
    )


def _cut(block_value: int, common: int, seen: str) -> int:
    """block_value if it divides `common`, the largest number that divides every host."""
    if isinstance(block_value, bool) or not isinstance(block_value, int) or block_value < 1:
        raise TopologyError(f"amsp.topology.gpus_per_node must be a positive integer, not {block_value!r}.")
    if common % block_value != 0:
        raise TopologyError(
            f"amsp.topology.gpus_per_node = {block_value} does not divide every host ({seen}). It may cut "
            f"a host into several nodes, never join hosts; legal values: {_listed(_divisors(common))}."
        )
    return block_value


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _shortened(ranks: Sequence[int]) -> str:
    """A list with its middle left out when it is long."""
    shown = [*map(str, ranks)] if len(ranks) <= 8 else [*map(str, ranks[:4]), "...", str(ranks[-1])]
    return f"[{', '.join(shown)}]"


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
