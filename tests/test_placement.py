"""The order of nodes for the rank grid, against every other order, and the table of leaf switches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache
from itertools import permutations, product
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from deepspeed_amsp.leaf_table import Reading, agreed_table, parse_table, read_table, table_name
from deepspeed_amsp.placement import crossings, node_order, place_nodes, ring_crossings
from deepspeed_amsp.plan.factors import ShardFactor, Sharding, preset
from deepspeed_amsp.topology import Topology, TopologyError, detect_topology

KEY = "amsp.topology.leaf_switches"


def chains(nodes: int) -> list[list[int]]:
    """Every ascending list of spans above 1, each a divisor of the next and of ``nodes``."""
    found: list[list[int]] = [[]]
    for span in (d for d in range(2, nodes + 1) if nodes % d == 0):
        found += [[*chain, span] for chain in found if not chain or span % chain[-1] == 0]
    return found


@st.composite
def clusters(draw: st.DrawFn, largest: int) -> tuple[list[int], list[int]]:
    """(the leaf of each node, spans)."""
    nodes = draw(st.integers(1, largest))
    leaves = draw(st.lists(st.integers(0, nodes - 1), min_size=nodes, max_size=nodes))
    return leaves, draw(st.sampled_from(chains(nodes)))


@cache
def fewest(counts: tuple[int, ...], spans: tuple[int, ...]) -> int:
    """The fewest crossings of leaves with so many nodes each: every way to fill a first piece is tried."""
    if not spans or not any(counts):
        return 0
    best = 10**9
    for piece in product(*(range(count + 1) for count in counts)):
        if sum(piece) == spans[-1]:
            rest = tuple(count - taken for count, taken in zip(counts, piece, strict=True))
            met = sum(taken > 0 for taken in piece)
            inside = fewest(tuple(sorted(piece)), spans[:-1])
            best = min(best, met + inside + fewest(tuple(sorted(rest)), spans))
    return best


class TestNodeOrder:
    """Few leaf switches per group."""

    @given(clusters(6))
    @settings(max_examples=150, deadline=None)
    def test_no_order_of_up_to_six_nodes_has_fewer_crossings(self, cluster: tuple[list[int], list[int]]) -> None:
        leaves, spans = cluster
        order = node_order(leaves, spans)
        assert sorted(order) == list(range(len(leaves)))
        least = min(crossings(other, leaves, spans) for other in set(permutations(range(len(leaves)))))
        assert crossings(order, leaves, spans) == least

    @given(clusters(12))
    @settings(max_examples=150, deadline=None)
    def test_nor_of_up_to_twelve(self, cluster: tuple[list[int], list[int]]) -> None:
        leaves, spans = cluster
        counts = tuple(sorted(Counter(leaves).values()))
        assert crossings(node_order(leaves, spans), leaves, spans) == fewest(counts, tuple(spans))

    @given(clusters(16))
    def test_no_ring_of_a_changed_order_crosses_more_often_than_its_nodes_need(
        self, cluster: tuple[list[int], list[int]]
    ) -> None:
        leaves, spans = cluster
        order = node_order(leaves, spans)
        assume(order != tuple(range(len(leaves))))
        rings = [order[start : start + span] for span in spans for start in range(0, len(order), span)]
        rings += [order[first :: max(spans, default=1)] for first in range(max(spans, default=1))]
        for ring in rings:
            met = len({leaves[node] for node in ring})
            links = sum(leaves[ring[at - 1]] != leaves[node] for at, node in enumerate(ring))
            assert links == (met if met > 1 else 0)

    @given(clusters(16))
    def test_it_is_never_worse_than_the_order_of_the_ranks(self, cluster: tuple[list[int], list[int]]) -> None:
        leaves, spans = cluster
        ranked, found = tuple(range(len(leaves))), node_order(leaves, spans)
        measures = [(crossings(o, leaves, spans), ring_crossings(o, leaves, spans)) for o in (found, ranked)]
        assert measures[0] <= measures[1]
        if measures[0] == measures[1]:
            assert found == ranked, "nodes are not moved for nothing"

    @pytest.mark.parametrize(
        ("leaves", "spans", "order", "crossed"),
        [
            # 3, 2 and 3 nodes, pairs: one pair in each of the three, and the two nodes left over as the fourth
            ([0, 0, 0, 1, 1, 2, 2, 2], [2], (0, 1, 2, 5, 6, 7, 3, 4), 5),
            ([0, 0, 0, 1, 1, 2, 2, 2], [2, 4], (0, 1, 2, 5, 6, 7, 3, 4), 9),
            ([0, 1, 0, 1], [2], (0, 2, 1, 3), 2),
            ([0, 1, 1, 0], [2], (0, 3, 1, 2), 2),
            # nothing spans nodes: only the rings of the replicate axis are left to serve
            ([0, 1, 0, 1], [], (0, 2, 1, 3), 0),
            ([0, 1, 0, 1], [4], (0, 2, 1, 3), 2),
            # the order of the ranks is as good as any
            ([0, 0, 1, 1], [2], (0, 1, 2, 3), 2),
            ([0, 0, 0, 0], [2], (0, 1, 2, 3), 2),
            ([0, 1, 2, 3], [2], (0, 1, 2, 3), 4),
            ([0], [], (0,), 0),
        ],
    )
    def test_examples(self, leaves: list[int], spans: list[int], order: tuple[int, ...], crossed: int) -> None:
        assert node_order(leaves, spans) == order
        assert crossings(order, leaves, spans) == crossed

    def test_a_large_cluster_is_quick_and_gains(self) -> None:
        """1,024 nodes under 61 switches of 12 to 21, numbered at random: the search is no longer exhaustive."""
        leaves = [leaf for leaf in range(61) for _ in range(12 + leaf * 7 % 10)][:1024]
        leaves += [60] * (1024 - len(leaves))
        scattered = [leaves[node * 389 % 1024] for node in range(1024)]
        order = node_order(scattered, [2, 8, 32])
        assert sorted(order) == list(range(1024))
        pieces = 512 + 128 + 32
        assert crossings(order, scattered, [2, 8, 32]) < pieces + 2 * 61 < crossings(range(1024), scattered, [2, 8, 32])


class TestPlaceNodes:
    """From hosts and a plan to the order."""

    HOSTS = ("a", "b", "c", "d")
    TABLE = (("a", "c"), ("b", "d"))

    def place(self, hosts: Sequence[str], per_node: int, table: Sequence[Sequence[str]], s1: int) -> tuple[int, ...]:
        world = detect_topology(per_node, {}, len(hosts), hosts, table)
        over = ShardFactor(per_node, s1)
        return place_nodes(world, Sharding(ShardFactor(1), ShardFactor(1), over, ShardFactor(per_node, world.nodes)))

    def test_one_host_one_node(self) -> None:
        hosts = [host for host in self.HOSTS for _ in range(2)]
        assert self.place(hosts, 2, self.TABLE, 2) == (0, 2, 1, 3)

    def test_nodes_of_one_host_stay_together(self) -> None:
        """Two nodes on each host; pairs are a host each, and the ring over them gains by the move."""
        hosts = [host for host in self.HOSTS for _ in range(2)]
        for s1 in (2, 4):
            assert self.place(hosts, 1, self.TABLE, s1) == (0, 1, 4, 5, 2, 3, 6, 7)

    @given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 2)), min_size=1, max_size=5), st.integers(1, 3))
    def test_they_always_do(self, shapes: list[tuple[int, int]], span: int) -> None:
        leaves = [leaf for count, leaf in shapes for _ in range(count)]
        host = [number for number, (count, _) in enumerate(shapes) for _ in range(count)]
        assume(len(leaves) % span == 0)
        placed = [host[node] for node in node_order(leaves, [span] if span > 1 else [])]
        runs = [name for at, name in enumerate(placed) if at == 0 or placed[at - 1] != name]
        assert len(runs) == len(set(runs)), "the nodes of a host are neighbours"

    def test_without_a_table_it_is_the_order_of_the_ranks(self) -> None:
        assert place_nodes(Topology(8, 2), preset("zero1", ShardFactor(2, 4))) == (0, 1, 2, 3)

    def test_ranks_along(self) -> None:
        assert Topology(8, 2).ranks_along((0, 2, 1, 3)) == (0, 1, 4, 5, 2, 3, 6, 7)


class TestTable:
    """amsp.topology.leaf_switches, in the block or in a file."""

    def test_a_file(self, tmp_path: Path) -> None:
        path = tmp_path / "switches"
        path.write_text("# rack by rack\nnode1 node2\t node3  # A\n\nnode-4.local 10.0.0.5\n")
        assert read_table(str(path)) == Reading((("node1", "node2", "node3"), ("node-4.local", "10.0.0.5")))

    def test_the_block(self) -> None:
        assert read_table((("a",),)) == Reading((("a",),))
        assert read_table(None) == Reading(None)
        assert (table_name("t"), table_name(None)) == (f"{KEY} (t)", KEY)

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("a b\nc b\n", ["line 2", "b was named in line 1 already"]),
            ("a a\n", ["line 1", "a was named in line 1"]),
            ('[["a", "b"]]\n', ["line 1", "no host name", "one leaf switch a line"]),
            ("a\nb, c\n", ["line 2", "'b,' is no host name"]),
            ("\n# nothing\n", ["names no host"]),
            ("", ["names no host"]),
        ],
    )
    def test_a_wrong_file(self, text: str, words: list[str]) -> None:
        with pytest.raises(TopologyError) as caught:
            parse_table(text, "my/switches")
        for word in [KEY, "my/switches", *words]:
            assert word in str(caught.value)

    def test_a_file_that_cannot_be_read(self, tmp_path: Path) -> None:
        (tmp_path / "binary").write_bytes(b"\xff\xfe\x00a")
        for name, words in (("absent", "No such file"), (".", "directory"), ("binary", "decode"), ("nu\0ll", "null")):
            reading = read_table(str(tmp_path / name))
            assert reading.table is None
            assert KEY in reading.error and words in reading.error and str(tmp_path) in reading.error

    def test_all_ranks_agree_or_hear_the_same(self) -> None:
        one, other = (("a", "b"),), (("a",), ("b",))
        assert agreed_table([Reading(one)] * 3) == one
        assert agreed_table([Reading(None)] * 3) is None
        with pytest.raises(TopologyError, match=r"\[\['a', 'b'\]\] on rank 0; \[\['a'\], \['b'\]\] on ranks 1, 2"):
            agreed_table([Reading(one), Reading(other), Reading(other)])
        with pytest.raises(TopologyError, match=rf"{KEY} is not the same on every rank: .* none on rank 1"):
            agreed_table([Reading(one), Reading(None)])
        with pytest.raises(TopologyError, match=r"^On rank 1: cannot"):
            agreed_table([Reading(one), Reading(None, "cannot")])
        with pytest.raises(TopologyError, match=r"^cannot"):
            agreed_table([Reading(None, "cannot")] * 2)
        with pytest.raises(TopologyError, match=r"ranks 1, 2, 3, 4, 5, 6, 7, 8 and 1 more"):
            agreed_table([Reading(one), *[Reading(None)] * 9])

    @pytest.mark.parametrize(
        ("table", "words"),
        [
            ([["node1"]], "misses node2"),
            ([["node1", "node3"]], "names node3, which no rank runs on; did you mean 'node2'"),
            ([["node1"], ["node2", "node1"]], "names node1 more than once"),
            ([["node1", "node2"], []], "no host in row 2"),
        ],
    )
    def test_a_table_that_does_not_fit_the_hosts(self, table: list[list[str]], words: str) -> None:
        with pytest.raises(TopologyError, match=words) as caught:
            detect_topology(None, {}, 2, ["node1", "node2"], table, "amsp.topology.leaf_switches (file)")
        assert str(caught.value).startswith(f"{KEY} (file)")
