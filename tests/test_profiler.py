"""The profiler on real gloo ranks: which groups, what is timed, when it stops, what it refuses."""

from __future__ import annotations

import contextlib
import io
import json
import os
import socket
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed_amsp.cli.app import app
from deepspeed_amsp.compare.cluster import ClusterSpec, ClusterUnavailable, emulated_cluster
from deepspeed_amsp.compare.launch import free_port
from deepspeed_amsp.plan.factors import ShardFactor
from deepspeed_amsp.plan.profile import Entry, Op, Point, Profile, meshes_needed
from deepspeed_amsp.profiler import Effort, full, measure, quick
from tests.support.pool import pool

ROOT = Path(__file__).resolve().parents[1]
TWO_BY_TWO = ShardFactor(2, 2)
NIGHTLY = os.environ.get("AMSP_NIGHTLY") == "1"


# ---- what is measured -------------------------------------------------------------------------------------------


def test_quick_takes_the_outermost_meshes_and_full_all() -> None:
    of_two = {ShardFactor(2), ShardFactor(1, 2), TWO_BY_TWO}
    assert set(quick(TWO_BY_TWO).meshes) == set(full(TWO_BY_TWO).meshes) == of_two
    corners = {(2, 1), (8, 1), (1, 2), (8, 2), (1, 128), (8, 128)}
    assert {(mesh.s0, mesh.s1) for mesh in quick(ShardFactor(8, 128)).meshes} == corners
    assert set(full(ShardFactor(8, 128)).meshes) == set(meshes_needed(ShardFactor(8, 128)))
    assert quick(ShardFactor(4, 1)).meshes == (ShardFactor(2), ShardFactor(4))
    assert quick(ShardFactor(1, 6)).meshes == (ShardFactor(1, 2), ShardFactor(1, 6))


@pytest.mark.parametrize(
    "cluster", [ShardFactor(8, 128), ShardFactor(6, 9), ShardFactor(1, 12), ShardFactor(4, 1)], ids=str
)
def test_a_quick_profile_answers_for_every_mesh(cluster: ShardFactor) -> None:
    points = (Point(1000, 1e-5), Point(10**6, 1e-3))
    entries = tuple(Entry(op, mesh, points) for op in Op for mesh in quick(cluster).meshes)
    profile = Profile("quick", cluster.s0, cluster.s1, entries)
    for mesh in meshes_needed(cluster):
        assert profile.time(Op.ALL_REDUCE, 1e5, mesh) > 0 and not profile.extrapolated(Op.ALL_REDUCE, 1e5, mesh)


def siblings_of(cluster: ShardFactor) -> dict[str, tuple[int, ...]]:
    from deepspeed_amsp.comm import from_every_rank
    from deepspeed_amsp.mesh import destroy_group, make_siblings

    found = {}
    for mesh in meshes_needed(cluster):
        group = make_siblings(mesh, cluster)
        found[str(mesh)] = group.ranks
        from_every_rank(None)  # gloo ranks may still be connecting
        destroy_group(group)
    return found


def test_groups_in_a_node_are_neighbours_and_those_across_take_one_of_each() -> None:
    found = pool(4).run(siblings_of, TWO_BY_TWO)
    assert [ranks["2x1"] for ranks in found] == [(0, 1), (0, 1), (2, 3), (2, 3)]
    assert [ranks["1x2"] for ranks in found] == [(0, 2), (1, 3), (0, 2), (1, 3)]
    assert [ranks["2x2"] for ranks in found] == [(0, 1, 2, 3)] * 4


# ---- what is timed ----------------------------------------------------------------------------------------------


def measured_slowly(effort: Effort, delay_s: float, known: list[Entry]) -> list[tuple[Entry, Point]]:
    """With a backend on which every collective lands ``delay_s`` after its issue, beside the others."""
    from deepspeed_amsp import mesh
    from tests.support import slow

    mesh.GROUP_BACKEND = slow.NAME
    slow.configure(delay_s)
    told: list[tuple[Entry, Point]] = []
    try:
        measure(TWO_BY_TWO, effort, torch.device("cpu"), known, lambda entry, point: told.append((entry, point)))
    finally:
        mesh.GROUP_BACKEND = None
        slow.configure()
    return told


@pytest.mark.alone
def test_times_are_those_of_the_collective_and_broadcasts_share_one() -> None:
    """40 ms each, beside each other: four broadcasts take 40 ms, which is 10 ms a broadcast, and so do four of any
    message that are issued together, the most that is looked at."""
    effort = Effort((TWO_BY_TWO,), (1 << 10,), repetitions=3, seconds=60)
    found = pool(4).run(measured_slowly, effort, 0.04, [])
    assert all(ranks == found[0] for ranks in found), "all ranks hear the same"
    assert [(entry.op, point.bytes) for entry, point in found[0]] == [
        (Op.ALL_GATHER, 1024),
        (Op.REDUCE_SCATTER, 1024),
        (Op.ALL_REDUCE, 1024),
        (Op.BROADCAST, 256),
    ]
    for entry, point in found[0]:
        expected = 0.01 if entry.op is Op.BROADCAST else 0.04
        assert expected <= point.seconds < 2 * expected, entry
        assert 0 <= point.spread < 3 * expected
        assert point.each is not None and point.each < point.seconds / 2


@pytest.mark.alone
def test_it_stops_where_messages_take_too_long_and_knows_that_when_resumed() -> None:
    """4 rounds of 40 ms and one of four messages for 1 KB leave 140 of 300 ms: not enough for 2 KB, which would take
    460. Nor is it a second time."""
    effort = Effort((ShardFactor(1, 2),), (1 << 10, 1 << 20), repetitions=3, seconds=0.3)
    found = pool(4).run(measured_slowly, effort, 0.04, [])[0]
    assert [entry.op for entry, _ in found] == list(Op)
    known = [entry for entry, _ in found]
    assert pool(4).run(measured_slowly, effort, 0.04, known)[0] == []
    gap = pool(4).run(measured_slowly, effort, 0.04, known[:2])[0]
    assert [entry.op for entry, _ in gap] == [Op.ALL_REDUCE, Op.BROADCAST]


@pytest.mark.alone
def test_a_slow_network_gets_smaller_messages_and_more_of_them_where_it_was_latency() -> None:
    """4 rounds of 40 ms and one of four messages take 320 of 1402 ms for 1 KB: 3462 bytes at that price, 3460 in
    elements. They turn out to take 10 ms, so much more fits, and so on."""
    effort = Effort((ShardFactor(1, 2),), (1 << 10, 1 << 20), repetitions=3, seconds=1.402)
    known = [Entry(op, ShardFactor(1, 2), (Point(1 << 10, 0.04),)) for op in (Op.ALL_GATHER, Op.REDUCE_SCATTER)]
    known += [Entry(op, ShardFactor(1, 2), (Point(1 << 20, 1.0),)) for op in (Op.ALL_REDUCE,)]
    found = pool(4).run(measured_slowly, effort, 0.01, known)[0]
    sizes = {op: [p.bytes for entry, p in found if entry.op is op] for op in Op}
    for op in (Op.ALL_GATHER, Op.REDUCE_SCATTER):
        assert sizes[op][0] == 3460 and 1 << 19 <= sizes[op][-1] <= 1 << 20
        assert all(2 * smaller <= larger for smaller, larger in pairwise(sizes[op]))
    assert sizes[Op.ALL_REDUCE] == [1 << 10], "what is smaller than what there is, is always measured"


# ---- the command ------------------------------------------------------------------------------------------------


def command(arguments: list[str], **environment: str) -> tuple[int, str, str]:
    """Exit code, output and errors of ``amsp`` in a process that has imported everything, in a group of ranks."""
    from deepspeed_amsp.cli import options

    os.environ |= environment
    before, options.GRACE_S = options.GRACE_S, 0.0
    out, err = io.StringIO(), io.StringIO()
    code = 0
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            app(["profile", *arguments])
    except SystemExit as end:
        code = int(end.code or 0)
    finally:
        options.GRACE_S = before
    return code, out.getvalue(), err.getvalue()


def small(arguments: list[str], **environment: str) -> tuple[int, str, str]:
    """The command with less to measure."""
    from deepspeed_amsp import profiler

    before = profiler.quick, profiler.UPDATED
    profiler.quick, profiler.UPDATED = lambda cluster: Effort((ShardFactor(1, 2),), (1 << 12,), 2, 1.0), 1 << 12
    try:
        return command(arguments, **environment)
    finally:
        profiler.quick, profiler.UPDATED = before


def test_the_file_and_what_is_said(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    arguments = ["--out", str(path), "--gpus-per-node", "2"]
    ended = pool(4).run(small, arguments)
    assert [code for code, _, _ in ended] == [0] * 4, ended
    assert [out for _, out, _ in ended[1:]] == [""] * 3, "rank 0 speaks"
    lines = ended[0][1].splitlines()
    assert len(lines) == 5 and lines[0].startswith("all_gather on 1x2: 4096 bytes ")
    assert lines[-1].startswith("amsp profile: 4 measurements in ") and str(path) in lines[-1]
    profile = Profile.load(path)
    assert (profile.name, profile.kind, profile.data_parallel) == ("mine", "measured", TWO_BY_TWO)
    assert profile.backend == "gloo" and socket.gethostname() in profile.host and "CPU" in profile.host
    assert profile.memory_bandwidth and profile.host_seconds, "what is no collective is measured, too"
    assert dict(profile.versions)["torch"] == torch.__version__ and profile.date.startswith("20")
    assert {(e.op, e.mesh, e.points[0].bytes) for e in profile.entries} == {
        (op, ShardFactor(1, 2), 2048 if op is Op.BROADCAST else 4096) for op in Op
    }
    values = json.loads(path.read_text())
    values["entries"] = [entry for entry in values["entries"] if entry["op"] != "all_reduce"]
    path.write_text(json.dumps(values))
    ended = pool(4).run(small, [*arguments, "--resume"])
    assert ended[0][1].splitlines()[0].startswith("all_reduce on 1x2: 4096 bytes ")
    assert "amsp profile: 1 measurements in" in ended[0][1]
    resumed = {entry.op: entry for entry in Profile.load(path).entries}
    assert all(resumed[entry.op] == entry for entry in profile.entries if entry.op is not Op.ALL_REDUCE)


def test_in_a_terminal_there_is_a_bar(tmp_path: Path) -> None:
    ended = pool(4).run(small, ["--out", str(tmp_path / "p.json"), "--gpus-per-node", "2"], FORCE_COLOR="1")
    out = ended[0][1]
    assert "\x1b[" in out and "broadcast on 1x2: 2048 bytes" in out and "amsp profile: 4 measurements" in out
    assert [out for _, out, _ in ended[1:]] == [""] * 3


def other_cluster(path: Path) -> None:
    entries = tuple(Entry(op, ShardFactor(2), (Point(1000, 1e-5),)) for op in Op)
    Profile("other", 8, 4, entries, host="gpu1, gpu2", backend="nccl").save(path)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--out", "{folder}/none/p.json"], "--out must be a file in a folder that exists, got {folder}/none/p.json"),
        (["--out", "{folder}"], "--out must be a file in a folder that exists"),
        (["--out", "/proc/p.json"], "--out: cannot write to /proc: "),
        (
            ["--out", "{folder}/other.json", "--resume"],
            "is of another cluster (8 GPUs x 4 nodes, nccl, gpu1, gpu2); th",
        ),
        (["--out", "{folder}/cut.json", "--resume"], "--resume: {folder}/cut.json: is no JSON, or was cut off"),
        (["--gpus-per-node", "3"], "amsp.topology.gpus_per_node = 3 does not divide every host"),
    ],
)
def test_bad_input_is_one_error_a_host_and_fails_every_rank(arguments: list[str], error: str, tmp_path: Path) -> None:
    other_cluster(tmp_path / "other.json")
    (tmp_path / "cut.json").write_text('{"version": 1, "entries": [')
    ended = pool(4).run(small, [part.format(folder=tmp_path) for part in arguments])
    assert [code for code, _, _ in ended] == [2] * 4
    said = [line for _, out, err in ended for line in (out + err).splitlines()]
    assert len(said) == 1 and said[0].startswith("amsp profile: error: "), said
    assert error.format(folder=tmp_path) in said[0]


@pytest.mark.parametrize(
    ("environment", "why"),
    [
        ({}, "RANK is not set"),
        ({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, "WORLD_SIZE is 1"),
    ],
)
def test_one_rank_has_nobody_to_talk_to(environment: dict[str, str], why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    code, _, err = command([], **environment)
    for name in environment:
        os.environ.pop(name)
    (line,) = err.splitlines()
    assert code == 2 and line.startswith("amsp profile: error: it takes several ranks") and why in line
    assert "deepspeed --hostfile" in line


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf"])
def test_impossible_budgets_are_refused(seconds: str) -> None:
    environment = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        patch.delenv("LOCAL_RANK", raising=False)
        code, _, err = command(["--seconds", seconds])
    assert code == 2 and err.startswith("amsp profile: error: --seconds must be above 0, got ")


def test_unknown_options_are_refused() -> None:
    code, _, err = command(["--quik"])
    assert code == 2 and "No such option: --quik" in err and "Traceback" not in err


# ---- under a launcher -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_under_the_launcher(tmp_path: Path) -> None:
    port = str(free_port())
    launched = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    env = {name: value for name, value in os.environ.items() if name not in launched}
    env |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"
    options = ["--num_gpus", "2", "--master_port", port, "--module", "deepspeed_amsp.profiler", "--out", "p.json"]
    options += ["--seconds", "0.2"]
    done = subprocess.run(
        ["deepspeed", *options], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "amsp profile: " in done.stdout and "Traceback" not in done.stderr
    profile = Profile.load(tmp_path / "p.json")
    assert profile.data_parallel == ShardFactor(2, 1) and {entry.mesh for entry in profile.entries} == {ShardFactor(2)}
    assert profile.time(Op.ALL_GATHER, 1e6, ShardFactor(2)) > 0


def theory(op: Op, mesh: ShardFactor, size: float, rate: float) -> float:
    """Seconds in which a node's NIC sends what gloo sends over it, with two siblings where the mesh is 1x2.

    Rings send (p - 1) / p of the message from each rank to the next, an AllReduce twice, and one of them leaves each
    node. An all-to-all (the reduce-scatter) sends from every rank the half of its message that belongs to the other
    node. A broadcast leaves the node of its source once, and half of the sources are there.
    """
    siblings, p = 2 // mesh.s0, mesh.size
    sent = {
        Op.ALL_GATHER: siblings * (p - 1) / p,
        Op.REDUCE_SCATTER: 2 / 2,
        Op.ALL_REDUCE: siblings * 2 * (p - 1) / p,
        Op.BROADCAST: siblings / 2,
    }
    return sent[op] * size / rate


@pytest.mark.slow
@pytest.mark.skipif(not NIGHTLY, reason="a minute on a quiet machine: AMSP_NIGHTLY=1")
def test_a_quick_profile_of_an_emulated_cluster_is_that_of_its_links(tmp_path: Path) -> None:
    """Nothing is faster than its links. gloo's AllReduce uses them fully; its other collectives take up to twice as
    long, since they send in one direction after the other."""
    spec = ClusterSpec(nodes=2, ranks_per_node=2, nic_mbit=500)
    path = tmp_path / "p.json"
    run: Any = [sys.executable, "-m", "deepspeed_amsp.profiler", "--out", str(path)]
    try:
        with emulated_cluster(spec) as cluster:
            said = cluster.run(run, timeout_s=300, env={"PYTHONPATH": str(ROOT), "TORCH_CPP_LOG_LEVEL": "ERROR"})
    except ClusterUnavailable as error:
        pytest.skip(str(error))
    assert "amsp profile: " in said[0]
    large = [(e.op, e.mesh, p) for e in Profile.load(path).entries if e.mesh.s1 > 1 for p in e.points if p.bytes >= 4e6]
    assert {op for op, _, _ in large} >= set(Op) - {Op.BROADCAST}
    off = []
    for op, mesh, point in large:
        ratio = point.seconds / theory(op, mesh, point.bytes, spec.nic_bytes_per_s)
        took = f"{point.seconds:.3f} s +-{point.spread:.3f}"
        text = f"{op.value} on {mesh}: {point.bytes} bytes {took}, {ratio:.2f} of theory"
        print(text)
        most = 1.25 if op is Op.ALL_REDUCE and mesh.s0 == 1 else 2.0
        off += [text] if not 0.95 <= ratio <= most else []
    assert not off, "\n".join(off)
