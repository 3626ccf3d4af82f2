"""Nodes of a world, from launcher variables and host names."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_amsp.topology import Topology, TopologyError, detect_gpus_per_node, detect_topology


def hosts(*counts: int) -> list[str]:
    """Host names of the ranks of hosts a, b, ... that have these counts."""
    return [name for name, count in zip("abcdefgh", counts, strict=False) for _ in range(count)]


class TestDetect:
    """Where gpus_per_node comes from."""

    @pytest.mark.parametrize(
        ("value", "env", "world", "names", "expected"),
        [
            (None, {"LOCAL_WORLD_SIZE": "4"}, 8, None, 4),
            (None, {"LOCAL_SIZE": "2"}, 8, None, 2),
            (None, {"LOCAL_WORLD_SIZE": "4", "LOCAL_SIZE": "2"}, 8, None, 4),
            (None, {"LOCAL_WORLD_SIZE": ""}, 8, None, 8),
            (None, {}, 8, None, 8),
            (None, {}, 8, hosts(4, 4), 4),
            (None, {"LOCAL_WORLD_SIZE": "4"}, 8, hosts(4, 4), 4),
            (None, {}, 1, hosts(1), 1),
            (2, {"LOCAL_WORLD_SIZE": "4"}, 4, hosts(4), 2),
            (1, {"LOCAL_WORLD_SIZE": "4"}, 4, None, 1),
            (4, {"LOCAL_WORLD_SIZE": "4"}, 8, hosts(4, 4), 4),
            # two agents of two on one machine: their number is the node
            (None, {"LOCAL_WORLD_SIZE": "2"}, 4, hosts(4), 2),
            (4, {"LOCAL_WORLD_SIZE": "2"}, 4, hosts(4), 4),
            # uneven hosts, cut into nodes that divide both
            (2, {"LOCAL_WORLD_SIZE": "4"}, 6, hosts(4, 2), 2),
            (1, {"LOCAL_WORLD_SIZE": "3"}, 5, hosts(3, 2), 1),
        ],
    )
    def test_right(
        self, value: int | None, env: dict[str, str], world: int, names: list[str] | None, expected: int
    ) -> None:
        assert detect_gpus_per_node(value, env, world, names) == expected

    @pytest.mark.parametrize(
        ("value", "env", "world", "names", "words"),
        [
            (
                8,
                {"LOCAL_WORLD_SIZE": "4"},
                8,
                hosts(4, 4),
                ["gpus_per_node = 8", "a: 4, b: 4", "legal values: 1, 2, 4"],
            ),
            (3, {"LOCAL_WORLD_SIZE": "4"}, 8, None, ["gpus_per_node = 3", "LOCAL_WORLD_SIZE = 4", "1, 2, 4"]),
            (8, {}, 4, None, ["gpus_per_node = 8", "one host has all 4", "1, 2, 4"]),
            (0, {}, 4, None, ["positive integer", "0"]),
            (True, {}, 4, None, ["positive integer", "True"]),
            (None, {"LOCAL_WORLD_SIZE": "3"}, 8, hosts(4, 4), ["LOCAL_WORLD_SIZE = 3", "a: 4, b: 4"]),
            (None, {"LOCAL_WORLD_SIZE": "8"}, 8, hosts(4, 4), ["LOCAL_WORLD_SIZE = 8", "a: 4, b: 4"]),
            (None, {"LOCAL_WORLD_SIZE": "four"}, 8, None, ["LOCAL_WORLD_SIZE", "'four'"]),
            (None, {"LOCAL_SIZE": "0"}, 8, None, ["LOCAL_SIZE", "'0'"]),
            (None, {"LOCAL_WORLD_SIZE": "-4"}, 8, None, ["LOCAL_WORLD_SIZE", "'-4'"]),
            (None, {}, 3, hosts(2), ["2 host names", "world size 3"]),
        ],
    )
    def test_refused(
        self, value: Any, env: dict[str, str], world: int, names: list[str] | None, words: list[str]
    ) -> None:
        with pytest.raises(TopologyError) as caught:
            detect_gpus_per_node(value, env, world, names)
        for word in words:
            assert word in str(caught.value)


class TestUnevenHosts:
    """Hosts with different counts, and what is possible on them."""

    def test_says_counts_and_the_common_node(self) -> None:
        with pytest.raises(TopologyError) as caught:
            detect_gpus_per_node(None, {"LOCAL_WORLD_SIZE": "8"}, 12, hosts(8, 4))
        assert "a: 8, b: 4" in str(caught.value)
        assert '{"gpus_per_node": 4} to cut the hosts into 3 nodes of 4 GPUs' in str(caught.value)
        assert "s0 may then be 1, 2, 4." in str(caught.value)

    def test_says_when_only_single_gpus_are_possible(self) -> None:
        with pytest.raises(TopologyError, match=r"a: 2, b: 3.*only s0 = 1 is possible"):
            detect_gpus_per_node(None, {}, 5, hosts(2, 3))

    def test_seen_from_the_launcher_alone(self) -> None:
        with pytest.raises(TopologyError, match=r"LOCAL_WORLD_SIZE = 4, world size 6.*nodes of 2 GPUs"):
            detect_gpus_per_node(None, {"LOCAL_WORLD_SIZE": "4"}, 6, None)

    def test_same_error_on_every_host(self) -> None:
        texts = set()
        for local in ("2", "3"):  # the launcher tells each host its own count
            with pytest.raises(TopologyError) as caught:
                detect_gpus_per_node(None, {"LOCAL_WORLD_SIZE": local}, 5, hosts(2, 3))
            texts.add(str(caught.value))
        assert len(texts) == 1

    def test_scattered_ranks(self) -> None:
        with pytest.raises(TopologyError, match=r"a has ranks \[0, 2\], b has ranks \[1, 3\]"):
            detect_gpus_per_node(None, {}, 4, ["a", "b", "a", "b"])

    def test_scattered_by_twos(self) -> None:
        """What the error says is taken: nodes of two, each on one host."""
        names = ["a", "a", "b", "b", "a", "a"]
        with pytest.raises(TopologyError, match=r'a has ranks \[0, 1, 4, 5\].*\{"gpus_per_node": 2\} to count every 2'):
            detect_gpus_per_node(None, {}, 6, names)
        assert detect_gpus_per_node(2, {}, 6, names) == 2
        assert detect_topology(2, {}, 6, names, [["b"], ["a"]]).leaves == (1, 0, 1)
        with pytest.raises(TopologyError, match=r"gpus_per_node = 4 does not divide every host .*a: 2, b: 2, a: 2"):
            detect_gpus_per_node(4, {}, 6, names)

    def test_many_hosts_are_not_all_named(self) -> None:
        even = [f"n{node}" for node in range(100) for _ in range(8)]
        with pytest.raises(TopologyError, match=r"\(the hosts have n99: 7, 99 others: 8 each\)"):
            detect_gpus_per_node(None, {}, 799, even[:-1])
        turns = [f"n{rank % 100:02}" for rank in range(800)]
        with pytest.raises(TopologyError, match="contiguous") as caught:
            detect_gpus_per_node(None, {}, 800, turns)
        assert "n07 has ranks [7, 107, 207, 307, 407, 507, 607, 707], 92 more hosts are alike" in str(caught.value)

    @given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 8)), min_size=1, max_size=6), st.integers(1, 8))
    def test_a_value_is_taken_exactly_when_no_node_spans_two_hosts(
        self, stretches: list[tuple[str, int]], value: int
    ) -> None:
        names = [host for host, count in stretches for _ in range(count)]
        try:
            found = detect_gpus_per_node(value, {}, len(names), names)
        except TopologyError:
            found = None
        nodes = [names[i : i + value] for i in range(0, len(names), value)]
        fits = all(len(node) == value and len(set(node)) == 1 for node in nodes)
        assert found == (value if fits else None)


class TestTopology:
    """Ranks and nodes."""

    def test_nodes(self) -> None:
        world = Topology(6, 2)
        assert world.nodes == 3
        assert [world.node_of(rank) for rank in range(6)] == [0, 0, 1, 1, 2, 2]
        assert [world.local_index(rank) for rank in range(6)] == [0, 1, 0, 1, 0, 1]
        assert [list(world.ranks_of(node)) for node in range(3)] == [[0, 1], [2, 3], [4, 5]]

    def test_out_of_range(self) -> None:
        world = Topology(4, 2)
        for call in (lambda: world.node_of(4), lambda: world.local_index(-1), lambda: world.ranks_of(2)):
            with pytest.raises(TopologyError, match=r"is not in 0\.\."):
                call()

    @pytest.mark.parametrize(("world", "per_node"), [(0, 1), (4, 0), (4, True), (4.0, 2)])
    def test_positive_integers(self, world: Any, per_node: Any) -> None:
        with pytest.raises(TopologyError, match="positive integer"):
            Topology(world, per_node)

    def test_full_nodes(self) -> None:
        with pytest.raises(TopologyError, match=r"does not divide world_size = 6.*\[1, 2, 3, 6\]"):
            Topology(6, 4)

    def test_detected(self) -> None:
        world = detect_topology(2, {"LOCAL_WORLD_SIZE": "4"}, 8, hosts(4, 4), [["a"], ["b"]])
        assert world == Topology(8, 2, (0, 0, 1, 1))
        assert detect_topology(None, {}, 4, None).leaves is None

    def test_leaf_switches_need_host_names(self) -> None:
        with pytest.raises(TopologyError, match="needs the host name of every rank"):
            detect_topology(None, {}, 4, None, [["anything"]])

    def test_a_leaf_switch_for_every_node(self) -> None:
        with pytest.raises(TopologyError, match="1 leaf switches are given for 2 nodes"):
            Topology(4, 2, (0,))
