"""In which order the rank grid takes the nodes, so that groups meet as few leaf switches as possible. Pure.

A factor with s1 > 1 cuts the node order into consecutive pieces of s1 nodes, and the groups of its axes lie
inside a piece. What is made small is the number of (piece, leaf) pairs, over all distinct factors: `crossings`.

Why it is enough to keep each leaf's nodes together and to choose the order of the leaves: draw a line between
a piece and a leaf that meet. N / s1 pieces and L leaves that fall into C connected parts need at least
N / s1 + L - C lines, and a part's leaves hold a multiple of s1 nodes. Leaves laid one after another need
exactly that many, with a part ending wherever the nodes so far are a multiple of s1. Factors divide each
other, so the parts of a larger one are unions of the parts of a smaller one, and one order of the leaves
serves all of them. So the best order is the one in which the running count of nodes is a multiple of some s1
most often. Leaves together have another virtue: no ring crosses between switches more often than it must.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

from deepspeed_amsp.plan.factors import COMPONENTS, Sharding
from deepspeed_amsp.topology import Topology

SEARCH_WIDTH = 1000
"""Partial orders that the search keeps at each length. Up to 12 leaves that neither fit alone nor in pairs it is
exhaustive; with more it may miss the best order, and stays quick."""


def place_nodes(topology: Topology, sharding: Sharding) -> tuple[int, ...]:
    """All nodes in the order for the rank grid: that of the ranks, unless leaf switches are known and gain by another.

    The same on all ranks that have the same arguments.
    """
    if topology.leaves is None:
        return tuple(range(topology.nodes))
    spans = sorted({getattr(sharding, name).s1 for name in COMPONENTS})
    return node_order(topology.leaves, [span for span in spans if span > 1])


def node_order(leaves: Sequence[int], spans: Sequence[int]) -> tuple[int, ...]:
    """An order of the nodes with the fewest `crossings`, and with few `ring_crossings` among those.

    Nodes of a leaf keep the order of their ranks, so the nodes of a host stay together.

    Args:
        leaves: the leaf switch of each node.
        spans: numbers of nodes that groups span, ascending, each above 1 and a divisor of the next and of the
            number of nodes.
    """
    by_leaf: dict[int, list[int]] = defaultdict(list)
    for node, leaf in enumerate(leaves):
        by_leaf[leaf].append(node)
    members = list(by_leaf.values())
    # A span of all nodes is one piece, whatever their order.
    inner = [span for span in spans if span < len(leaves)]
    sequence = _leaf_sequence([len(nodes) for nodes in members], inner)
    found = tuple(node for index in sequence for node in members[index])
    ranked = tuple(range(len(leaves)))
    return min(ranked, found, key=lambda order: (crossings(order, leaves, spans), ring_crossings(order, leaves, spans)))


def crossings(order: Sequence[int], leaves: Sequence[int], spans: Sequence[int]) -> int:
    """Over the pieces of every span: how many leaf switches the nodes of a piece are under."""
    return sum(len({leaves[node] for node in piece}) for span in spans for piece in _pieces(order, span))


def ring_crossings(order: Sequence[int], leaves: Sequence[int], spans: Sequence[int]) -> int:
    """Links between different leaf switches in the rings over every piece, and in those of the replicate axis."""
    apart = max(spans, default=1)
    rings = [piece for span in spans for piece in _pieces(order, span)]
    rings += [order[first::apart] for first in range(apart)]
    return sum(leaves[ring[at - 1]] != leaves[node] for ring in rings for at, node in enumerate(ring))


def _pieces(order: Sequence[int], span: int) -> list[Sequence[int]]:
    return [order[start : start + span] for start in range(0, len(order), span)]


def _leaf_sequence(sizes: Sequence[int], spans: Sequence[int]) -> list[int]:
    """Indices into ``sizes``, ordered so that running totals are multiples of the spans as often as possible.

    Leaves that are a multiple of the largest span on their own are best alone, and any two that are one
    together are best as neighbours: whatever stood between them fits without them as well as with them.
    """
    whole = math.lcm(*spans)
    by_rest: dict[int, list[int]] = defaultdict(list)
    for index, size in enumerate(sizes):
        by_rest[size % whole].append(index)
    parts = [[index] for index in by_rest.pop(0, [])]
    for rest in sorted(by_rest):
        here, there = by_rest[rest], by_rest.get(whole - rest, [])
        while here and there and (rest != whole - rest or len(here) > 1):
            parts.append(sorted((here.pop(0), there.pop(0))))
    left = {rest: indices for rest, indices in by_rest.items() if indices}
    if left:
        parts.append([left[rest].pop(0) for rest in _search({r: len(i) for r, i in left.items()}, spans)])
    return [index for part in sorted(parts, key=min) for index in part]


def _search(counts: dict[int, int], spans: Sequence[int]) -> tuple[int, ...]:
    """The best order of sizes that are given as {size: how many}, by states "so many of each are laid"."""
    kinds = sorted(counts)
    beam: dict[tuple[int, ...], tuple[int, tuple[int, ...]]] = {(0,) * len(kinds): (0, ())}
    for _ in range(sum(counts.values())):
        longer: dict[tuple[int, ...], tuple[int, tuple[int, ...]]] = {}
        for used, (gain, path) in beam.items():
            for at, kind in enumerate(kinds):
                if used[at] == counts[kind]:
                    continue
                after = (*used[:at], used[at] + 1, *used[at + 1 :])
                total = sum(number * size for number, size in zip(after, kinds, strict=True))
                more = gain + sum(total % span == 0 for span in spans)
                if after not in longer or more > longer[after][0]:
                    longer[after] = (more, (*path, kind))
        beam = dict(sorted(longer.items(), key=lambda item: (-item[1][0], item[0]))[:SEARCH_WIDTH])
    return next(iter(beam.values()))[1]
