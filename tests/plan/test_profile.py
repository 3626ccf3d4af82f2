"""Profiles: interpolation against the ring formula, the analytic model against hand-computed values, bad files."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_amsp.plan.builtin_profiles import BUILTIN, find_profile
from deepspeed_amsp.plan.factors import ShardFactor, enumerate_shardings
from deepspeed_amsp.plan.links import Links
from deepspeed_amsp.plan.profile import Entry, Op, Point, Profile, ProfileError, meshes_needed

RANKS_A_NODE = 8
PAIR = ShardFactor(2, 1)


def measured(points: dict[int, float], op: Op = Op.ALL_GATHER, mesh: ShardFactor = PAIR) -> Profile:
    entry = Entry(op, mesh, tuple(Point(size, seconds) for size, seconds in points.items()))
    return Profile("test", RANKS_A_NODE, 64, (entry,))


def ring(op: Op, size: float, mesh: ShardFactor) -> float:
    """Seconds by the formula of a ring: 1 us a hop, 100 GB/s in a node, 1 GB/s for a GPU's share of the NICs."""
    p = mesh.size
    rate = 100e9 if mesh.s1 == 1 else 1e9 * mesh.s0
    if op is Op.BROADCAST:
        return 1e-6 * (p - 1) / p + size / rate
    once = 1e-6 * (p - 1) + (p - 1) / p * size / rate
    return 2 * once if op is Op.ALL_REDUCE else once


def ring_profile(meshes: list[ShardFactor], sizes: tuple[int, ...] = (1000, 1_000_000, 64_000_000)) -> Profile:
    entries = [Entry(op, m, tuple(Point(b, ring(op, b, m)) for b in sizes)) for op in Op for m in meshes]
    return Profile("rings", RANKS_A_NODE, 64, tuple(entries))


# ---- meshes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cluster", [(1, 1), (2, 1), (1, 4), (2, 2), (4, 2), (8, 4), (6, 3), (8, 12)])
def test_meshes_are_those_of_every_axis_of_every_plan(cluster: tuple[int, int]) -> None:
    data_parallel = ShardFactor(*cluster)
    expected = set()
    for sharding in enumerate_shardings(data_parallel):
        one, p, g, os = ShardFactor(1), sharding.parameters, sharding.gradients, sharding.optimizer_states
        for low, high in ((one, p), (p, g), (g, os), (p, os), (os, data_parallel), (p, data_parallel)):
            ratio = ShardFactor(high.s0 // low.s0, high.s1 // low.s1)
            expected |= {ratio, ShardFactor(ratio.s0, 1), ShardFactor(1, ratio.s1)}
    found = meshes_needed(data_parallel)
    assert len(found) == len(set(found)) and set(found) == expected - {ShardFactor(1)}


def test_meshes_of_the_papers_cluster() -> None:
    assert len(meshes_needed(ShardFactor(8, 128))) == 4 * 8 - 1


# ---- bytes ------------------------------------------------------------------------------------------------------


def test_time_is_interpolated_not_bandwidth() -> None:
    """1 MB takes 1 ms and 64 MB take 10 ms: 8 MB take 1 + 9 * 7/63 = 2 ms, by bandwidth it would be 5 ms."""
    profile = measured({1_000_000: 1e-3, 64_000_000: 10e-3})
    assert profile.time(Op.ALL_GATHER, 8e6, PAIR) == pytest.approx(2e-3)
    assert profile.time(Op.ALL_GATHER, 1e6, PAIR) == 1e-3 and profile.time(Op.ALL_GATHER, 64e6, PAIR) == 10e-3


def test_outside_the_points_the_lines_go_on() -> None:
    profile = measured({1000: 30e-6, 2000: 40e-6, 4000: 90e-6})
    assert profile.time(Op.ALL_GATHER, 500, PAIR) == pytest.approx(25e-6)
    assert profile.time(Op.ALL_GATHER, 1e-9, PAIR) == pytest.approx(20e-6), "the latency"
    assert profile.time(Op.ALL_GATHER, 6000, PAIR) == pytest.approx(140e-6)
    assert profile.extrapolated(Op.ALL_GATHER, 4000, PAIR) == ""
    assert "6e+03 bytes are above the largest measured message, 4e+03" in profile.extrapolated(
        Op.ALL_GATHER, 6000, PAIR
    )


def test_no_latency_is_below_zero_and_a_larger_message_bounds_the_smaller() -> None:
    steep = measured({1000: 1e-6, 2000: 9e-6})
    assert 0 < steep.time(Op.ALL_GATHER, 1, PAIR) < 1e-8
    noisy = measured({1000: 10e-6, 2000: 8e-6, 3000: 12e-6})
    assert noisy.time(Op.ALL_GATHER, 1000, PAIR) == pytest.approx(8e-6)
    assert noisy.time(Op.ALL_GATHER, 2500, PAIR) == pytest.approx(10e-6)


def test_one_point_is_latency_below_and_bandwidth_above() -> None:
    profile = measured({1000: 1e-5})
    assert profile.time(Op.ALL_GATHER, 10, PAIR) == pytest.approx(1e-5)
    assert profile.time(Op.ALL_GATHER, 3000, PAIR) == pytest.approx(3e-5)


@pytest.mark.parametrize("profile", [measured({1000: 1e-3}), BUILTIN["a800-hdr"]], ids=["measured", "analytic"])
def test_nothing_to_do_takes_no_time(profile: Profile) -> None:
    for op in Op:
        assert profile.time(op, 1e6, ShardFactor(1, 1)) == 0.0 and profile.time(op, 0, ShardFactor(2, 2)) == 0.0


@pytest.mark.parametrize("size", [-1.0, float("nan"), float("inf")])
def test_impossible_sizes_are_refused(size: float) -> None:
    with pytest.raises(ProfileError, match=r"all_gather of .* bytes makes no sense"):
        BUILTIN["a800-hdr"].time(Op.ALL_GATHER, size, PAIR)


POINTS = st.dictionaries(st.integers(1, 10**9), st.floats(1e-6, 10), min_size=1, max_size=6)
SIZES = st.floats(0, 1e10)


@settings(max_examples=200, deadline=None)
@given(points=POINTS, one=SIZES, other=SIZES)
def test_more_bytes_never_take_less_time(points: dict[int, float], one: float, other: float) -> None:
    profile = measured(dict(sorted(points.items())))
    low, high = (profile.time(Op.ALL_GATHER, size, PAIR) for size in sorted((one, other)))
    assert 0 <= low <= high * (1 + 1e-12)


# ---- meshes that were not measured ------------------------------------------------------------------------------

CORNERS = [ShardFactor(2), ShardFactor(8), *(ShardFactor(a, b) for a in (1, 8) for b in (2, 64))]


@pytest.mark.parametrize("op", Op)
@pytest.mark.parametrize("mesh", [ShardFactor(4), ShardFactor(1, 16), ShardFactor(8, 4)], ids=str)
def test_between_neighbours_a_ring_is_met_exactly(op: Op, mesh: ShardFactor) -> None:
    profile = ring_profile(CORNERS)
    for size in (100, 5e5, 64e6, 1e9):
        assert profile.time(op, size, mesh) == pytest.approx(ring(op, size, mesh), rel=1e-9)
    assert profile.extrapolated(op, 64e6, mesh) == ""


@pytest.mark.parametrize("op", Op)
@pytest.mark.parametrize("mesh", [ShardFactor(2, 2), ShardFactor(4, 64), ShardFactor(4, 8)], ids=str)
def test_other_parts_of_a_node_share_its_nics_with_more_siblings(op: Op, mesh: ShardFactor) -> None:
    profile = ring_profile(CORNERS)
    for size in (100, 5e5, 64e6, 1e9):
        assert profile.time(op, size, mesh) == pytest.approx(ring(op, size, mesh), rel=1e-9)


def test_outside_the_data_it_must_be_asked_for() -> None:
    profile = ring_profile([ShardFactor(2), ShardFactor(4), ShardFactor(8, 2)])
    for mesh in (ShardFactor(8), ShardFactor(8, 4), ShardFactor(1, 2)):
        with pytest.raises(ProfileError, match=f"rings: all_gather on {mesh} is outside the measured meshes"):
            profile.time(Op.ALL_GATHER, 1e6, mesh)
        assert f"on {mesh} is outside" in profile.extrapolated(Op.ALL_GATHER, 1e6, mesh)
        for op, size in product(Op, (1000, 64e6)):
            found = profile.time(op, size, mesh, extrapolate=True)
            assert found == pytest.approx(ring(op, size, mesh), rel=1e-6), (op, size, mesh)


def test_times_inside_a_node_say_nothing_about_those_across() -> None:
    profile = ring_profile([ShardFactor(2), ShardFactor(8)])
    with pytest.raises(ProfileError, match=r"all_gather on 8x2 is outside the measured meshes \(2x1, 8x1\)"):
        profile.time(Op.ALL_GATHER, 1e6, ShardFactor(8, 2), extrapolate=True)
    with pytest.raises(ProfileError, match="no group is 16x1 with 8 GPUs a node"):
        profile.time(Op.ALL_GATHER, 1e6, ShardFactor(16), extrapolate=True)


# ---- the analytic model -----------------------------------------------------------------------------------------


def test_the_ring_formula_by_hand() -> None:
    """4 GPUs a node, 10 GB/s from each inside it, 8 GB/s from a node, 1 us and 10 us a hop."""
    profile = Profile("hand", 4, 8, links=Links(10e9, 8e9, 1e-6, 10e-6))
    # In a node: 3 hops of 1 us, 3/4 of 1 MB at 10 GB/s.
    assert profile.time(Op.ALL_GATHER, 1e6, ShardFactor(4)) == pytest.approx(3e-6 + 75e-6)
    assert profile.time(Op.REDUCE_SCATTER, 1e6, ShardFactor(4)) == pytest.approx(78e-6)
    assert profile.time(Op.ALL_REDUCE, 1e6, ShardFactor(4)) == pytest.approx(156e-6)
    # 4x2: 1 hop of 10 us and 2 * 3 of 1 us; 7/8 of 1 MB at 8 GB/s, which its group has for itself.
    assert profile.time(Op.ALL_GATHER, 1e6, ShardFactor(4, 2)) == pytest.approx(16e-6 + 109.375e-6)
    # 1x2: 1 hop of 10 us, 1/2 of 1 MB at a quarter of 8 GB/s: the three siblings have the rest.
    assert profile.time(Op.ALL_GATHER, 1e6, ShardFactor(1, 2)) == pytest.approx(10e-6 + 250e-6)
    # Broadcast on 2x2: (10 + 2 * 1) us a ring of 4, 1 MB at 4 GB/s.
    assert profile.time(Op.BROADCAST, 1e6, ShardFactor(2, 2)) == pytest.approx(3e-6 + 250e-6)


def test_a_node_with_fast_nics_is_limited_by_its_gpus() -> None:
    profile = Profile("hand", 4, 8, links=Links(10e9, 80e9, 1e-6, 10e-6))
    assert profile.time(Op.ALL_GATHER, 1e6, ShardFactor(4, 2)) == pytest.approx(16e-6 + 87.5e-6)


@pytest.mark.parametrize(("mesh", "gbit"), [(ShardFactor(8, 1), 1200), (ShardFactor(8, 64), 300)])
def test_the_papers_cluster_meets_the_papers_points(mesh: ShardFactor, gbit: float) -> None:
    """AllGather of 64 MB, Fig. 3, read off as "about"."""
    seconds = BUILTIN["a800-hdr"].time(Op.ALL_GATHER, 64e6, mesh)
    assert 64e6 * 8 / seconds / 1e9 == pytest.approx(gbit, rel=0.02)


@pytest.mark.parametrize("profile", BUILTIN.values(), ids=str)
def test_built_in_profiles_say_what_they_are(profile: Profile) -> None:
    assert profile.kind == "analytic" and profile.notes and profile.host
    assert profile.peak_flops == (989e12 if profile.name.startswith("h100") else 312e12)
    assert find_profile(profile.name) is profile
    assert profile.extrapolated(Op.ALL_GATHER, 1e12, ShardFactor(8, 128)) == ""


def test_an_analytic_profile_fits_any_cluster_a_measured_one_its_own_nodes() -> None:
    small = BUILTIN["a800-hdr"].for_cluster(ShardFactor(2, 2))
    # 90 GB/s of a node, for both of its GPUs: 3/4 of 9 GB take 75 ms; hops 5 + 2 * 1.5 us.
    assert small.time(Op.ALL_GATHER, 9e9, ShardFactor(2, 2)) == pytest.approx(75e-3 + 8e-6)
    assert ring_profile(CORNERS).for_cluster(ShardFactor(8, 2)).nodes == 2
    with pytest.raises(ProfileError, match="was measured with 8 GPUs a node, not 4"):
        ring_profile(CORNERS).for_cluster(ShardFactor(4, 2))


# ---- other links ------------------------------------------------------------------------------------------------


def test_scaling_a_measured_profile_divides_its_times() -> None:
    profile = ring_profile(CORNERS).scaled(inter=2.0, intra=4.0)
    assert profile.time(Op.ALL_REDUCE, 1e6, ShardFactor(8)) == pytest.approx(
        ring(Op.ALL_REDUCE, 1e6, ShardFactor(8)) / 4
    )
    across = ShardFactor(8, 2)
    assert profile.time(Op.ALL_REDUCE, 1e6, across) == pytest.approx(ring(Op.ALL_REDUCE, 1e6, across) / 2)


@settings(max_examples=100, deadline=None)
@given(
    inter=st.floats(1, 100),
    intra=st.floats(1, 100),
    size=st.floats(1, 1e10),
    op=st.sampled_from(list(Op)),
    mesh=st.sampled_from(meshes_needed(ShardFactor(8, 64))),
    profile=st.sampled_from([*BUILTIN.values(), ring_profile(CORNERS)]),
)
def test_a_faster_link_never_makes_a_time_longer(
    inter: float, intra: float, size: float, op: Op, mesh: ShardFactor, profile: Profile
) -> None:
    before = profile.time(op, size, mesh)
    assert profile.scaled(inter, intra).time(op, size, mesh) <= before * (1 + 1e-12)


@pytest.mark.parametrize("factor", [0.0, -1.0, float("nan"), float("inf")])
def test_impossible_scales_are_refused(factor: float) -> None:
    with pytest.raises(ProfileError, match="inter must be a number above 0"):
        BUILTIN["a800-hdr"].scaled(inter=factor)


def test_further_messages_have_times_of_their_own() -> None:
    """Interpolated as time is; where nobody measured, messages follow each other."""
    points = (Point(1000, 0.5, 0.0, each=0.25), Point(3000, 1.5, 0.0, each=0.75))
    node = ShardFactor(2)
    for profile in (found := Profile("full", 2, 1, (Entry(Op.ALL_REDUCE, node, points),)), found.scaled(intra=2.0)):
        speed = found.time(Op.ALL_REDUCE, 2000, node) / profile.time(Op.ALL_REDUCE, 2000, node)
        assert speed == pytest.approx(1.0 if profile is found else 2.0)
        assert profile.busy(Op.ALL_REDUCE, 2000, node) == pytest.approx(0.5 / speed)
    plain = Profile("plain", 2, 1, (Entry(Op.ALL_REDUCE, node, tuple(Point(*p[:2]) for p in points)),))
    for profile in (plain, BUILTIN["a800-hdr"]):
        asked = Op.ALL_REDUCE, 2000.0, node
        assert profile.busy(*asked) == profile.time(*asked)


# ---- files ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("profile", [ring_profile(CORNERS), BUILTIN["h100-ndr"]], ids=["measured", "analytic"])
def test_a_file_gives_the_profile_back(profile: Profile, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    profile.save(path)
    assert Profile.load(path) == profile and find_profile(path) == profile
    assert [entry.name for entry in tmp_path.iterdir()] == ["profile.json"]


def test_what_stands_in_a_file(tmp_path: Path) -> None:
    entry = Entry(Op.ALL_REDUCE, ShardFactor(2, 2), (Point(1000, 0.5, 0.125, each=0.25),))
    Profile("mine", 2, 2, (entry,), host="h", versions=(("torch", "2"),)).save(tmp_path / "p.json")
    assert json.loads((tmp_path / "p.json").read_text()) == {
        "version": 1,
        "name": "mine",
        "kind": "measured",
        "gpus_per_node": 2,
        "nodes": 2,
        "host": "h",
        "versions": {"torch": "2"},
        "entries": [
            {
                "op": "all_reduce",
                "mesh": [2, 2],
                "points": [{"bytes": 1000, "seconds": 0.5, "spread": 0.125, "each": 0.25}],
            }
        ],
    }


def changed(change: Callable[[dict[str, Any]], None]) -> str:
    values: Any = json.loads(json.dumps(ring_profile(CORNERS).as_dict()))
    change(values)
    return json.dumps(values)


def first_points(values: dict[str, Any]) -> list[dict[str, Any]]:
    """Of all_gather on 2x1: 1000, 1,000,000 and 64,000,000 bytes."""
    points: list[dict[str, Any]] = values["entries"][0]["points"]
    return points


GOOD = changed(lambda values: None)
REFUSED: dict[str, tuple[str, str]] = {
    "empty": (" \n", "is empty"),
    "cut off": (GOOD[:-20], "is no JSON, or was cut off"),
    "a list": ("[]", "must hold a JSON object, not list"),
    "version": (changed(lambda v: v.update(version=2)), "is version 2 of a profile; this package reads version 1"),
    "no version": (changed(lambda v: v.pop("version")), "is version None"),
    "kind": (changed(lambda v: v.update(kind="guessed")), "kind must be .* not 'guessed'"),
    "unknown key": (changed(lambda v: v.update(entrys=[])), "unknown key 'entrys'"),
    "key twice": (GOOD.replace('"nodes": 64', '"nodes": 64, "nodes": 64'), "'nodes' stands twice"),
    "nodes": (changed(lambda v: v.update(nodes=0)), "nodes must be a whole number of at least 1, not 0"),
    "no nodes": (changed(lambda v: v.pop("nodes")), "nodes must be a whole number of at least 1, not None"),
    "name": (changed(lambda v: v.update(name=3)), "name must be a str, not 3"),
    "peak": (changed(lambda v: v.update(peak_flops=-1)), "peak_flops must be a number above 0"),
    "no entries": (changed(lambda v: v.update(entries=[])), "has neither entries"),
    "entries": (changed(lambda v: v.update(entries={})), "entries must be a list"),
    "nan": (changed(lambda v: first_points(v)[0].update(seconds=float("nan"))), "holds NaN, which is no number"),
    "inf": (changed(lambda v: first_points(v)[0].update(seconds=float("inf"))), "holds Infinity"),
    "1e999": (GOOD.replace('"spread": 0.0', '"spread": 1e999', 1), "all_gather on 2x1, 1000 bytes: spread must be"),
    "zero": (changed(lambda v: first_points(v)[1].update(seconds=0)), "all_gather on 2x1, 1000000 bytes: seconds must"),
    "negative": (changed(lambda v: first_points(v)[1].update(seconds=-1e-3)), "seconds must be above 0"),
    "text": (changed(lambda v: first_points(v)[1].update(seconds="1")), "seconds must be a number, not '1'"),
    "true": (changed(lambda v: first_points(v)[1].update(bytes=True)), "bytes must be a whole number"),
    "unsorted": (
        changed(lambda v: first_points(v).reverse()),
        "all_gather on 2x1: 1000000 bytes stand there after 6400",
    ),
    "size twice": (changed(lambda v: first_points(v)[1].update(bytes=1000)), "1000 bytes stand there twice"),
    "no points": (changed(lambda v: first_points(v).clear()), "all_gather on 2x1: has no points"),
    "point": (changed(lambda v: first_points(v)[0].update(ms=3)), "a point has bytes, seconds, spread, each"),
    "each": (
        changed(lambda v: first_points(v)[0].update(each=1e3)),
        "each must be above 0 and at most seconds",
    ),
    "host": (changed(lambda v: v.update(host_seconds=0)), "host_seconds must be a number above 0"),
    "entry twice": (changed(lambda v: v["entries"].append(v["entries"][0])), "all_gather on 2x1 stands there twice"),
    "unknown op": (
        changed(lambda v: v["entries"][0].update(op="gossip")),
        "entry 0: unknown op 'gossip'; there are all",
    ),
    "mesh": (changed(lambda v: v["entries"][0].update(mesh=[2])), "entry 0 .all_gather.: mesh must be"),
    "mesh of one": (changed(lambda v: v["entries"][0].update(mesh=[1, 1])), "all_gather on 1x1: no group of several"),
    "mesh too big": (
        changed(lambda v: v["entries"][0].update(mesh=[16, 1])),
        "all_gather on 16x1: no group of several",
    ),
    "no broadcast": (
        changed(lambda v: v.update(entries=[e for e in v["entries"] if e["op"] != "broadcast"])),
        "has no measurement of broadcast",
    ),
    # 64 MB in 640 us, written as 640; and a time in units of 1e-12 s.
    "us as s": (changed(lambda v: first_points(v)[2].update(seconds=640.0)), "64000000 bytes: 640.0 s are 0.1 MB/s"),
    "too fast": (changed(lambda v: first_points(v)[2].update(seconds=64e-9)), "which no network has"),
    "links": (changed(lambda v: v.update(links={})), "a measured profile has no links"),
    "analytic": (changed(lambda v: v.update(kind="analytic")), "links: "),
}


@pytest.mark.parametrize(("text", "message"), REFUSED.values(), ids=REFUSED)
def test_a_bad_file_is_one_clear_line(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(ProfileError, match=message) as caught:
        find_profile(str(path))
    assert str(caught.value).startswith(str(path)) and "\n" not in str(caught.value)


def test_a_name_that_is_nothing_lists_what_there_is(tmp_path: Path) -> None:
    with pytest.raises(
        ProfileError, match="'a100' is neither a file nor built in; built in are a800-hdr, a100-hdr, h1"
    ):
        find_profile("a100")
    with pytest.raises(ProfileError, match=rf"{re.escape(str(tmp_path / 'p.json'))}: no such file"):
        Profile.load(tmp_path / "p.json")
    with pytest.raises(ProfileError, match=r"cannot be read: .*Is a directory"):
        find_profile(tmp_path)
