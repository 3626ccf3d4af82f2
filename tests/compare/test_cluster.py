"""The emulated cluster: true byte counts, and nothing left over however a run ends."""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from deepspeed_amsp.compare import cluster as module
from deepspeed_amsp.compare.cluster import (
    Bytes,
    Cluster,
    ClusterSpec,
    ClusterUnavailable,
    emulated_cluster,
    local_counters,
    loopback_cluster,
    remove_stale,
)
from deepspeed_amsp.compare.launch import RankFailed

PAIR = ClusterSpec(nodes=2, ranks_per_node=1, nic_mbit=1000)
SLEEP = ["sleep", "600"]
MIB = 1 << 20


@pytest.fixture(scope="module")
def root_and_iproute() -> None:
    """Skips, with the reason, where the machine cannot emulate a cluster."""
    try:
        with emulated_cluster(ClusterSpec(1, 1, 100)):
            pass
    except ClusterUnavailable as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def cluster(root_and_iproute: None) -> Iterator[Cluster]:
    with emulated_cluster(PAIR) as made:
        yield made


def python(source: str, *arguments: str) -> list[str]:
    return [sys.executable, "-c", source, *arguments]


def namespaces() -> set[str]:
    folder = Path("/run/netns")
    return set(os.listdir(folder)) if folder.is_dir() else set()


def is_running(pid: int) -> bool:
    return module._alive(str(pid))


def eventually(condition: Callable[[], bool], seconds: float = 10) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


# ---- bytes ------------------------------------------------------------------------------------------------------

EXCHANGE = """
import json, os, time, torch, torch.distributed as dist
def sent():
    line = [line for line in open("/proc/self/net/dev") if "e0:" in line][0]
    return int(line.split(":")[1].split()[8])
dist.init_process_group("gloo")
numbers = {}
for name, mib in (("broadcast", 4), ("all_reduce", 8)):
    data = torch.ones(mib << 18)
    dist.barrier()
    before, began = sent(), time.perf_counter()
    dist.broadcast(data, 0) if name == "broadcast" else dist.all_reduce(data)
    dist.barrier()
    numbers[name] = [sent() - before, time.perf_counter() - began]
print(json.dumps(numbers))
dist.destroy_process_group()
"""


def test_bytes_of_collectives_are_those_of_theory_and_take_their_time(cluster: Cluster) -> None:
    """Over two nodes a broadcast sends its message once from the root, an all-reduce its own once from each."""
    before = [cluster.counters(node) for node in range(2)]
    printed = cluster.run(python(EXCHANGE), timeout_s=60)
    after = [cluster.counters(node) for node in range(2)]
    numbers = [json.loads(text.splitlines()[-1]) for text in printed]
    assert numbers[0]["broadcast"][0] == pytest.approx(4 * MIB, rel=0.03)
    assert numbers[1]["broadcast"][0] < 0.1 * MIB
    for rank in range(2):
        assert numbers[rank]["all_reduce"][0] == pytest.approx(8 * MIB, rel=0.03)
    assert after[0]["e0"].sent - before[0]["e0"].sent == pytest.approx(12 * MIB, rel=0.05)
    assert after[1]["e0"].received - before[1]["e0"].received == pytest.approx(12 * MIB, rel=0.05)
    assert after[0]["lo"].sent - before[0]["lo"].sent < 0.1 * MIB
    # A busy machine can only make it slower; the bucket's burst may come on top of the rate.
    assert numbers[0]["all_reduce"][1] > 0.9 * 8 * MIB / PAIR.nic_bytes_per_s


SOCKET = """
import socket
with socket.socket() as made:
    print(made.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(bytes(1)).decode())
"""


def test_tcp_is_the_same_whatever_the_machine_has_as_default(cluster: Cluster) -> None:
    assert cluster.congestion_control == "reno"
    assert [printed.split() for printed in cluster.run(python(SOCKET), timeout_s=30)] == [["reno"], ["reno"]]


def test_a_kernel_that_lets_nobody_choose_is_no_error(root_and_iproute: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """In some containers /proc/sys cannot be written; whoever wants to know which TCP there is can ask."""
    monkeypatch.setattr(module, "CONGESTION_CONTROL", "none-of-the-kernel")
    own = Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
    with emulated_cluster(PAIR) as made:
        assert made.congestion_control == own


def count_inside(namespace: str, connection: Any) -> None:
    """In a forked process, which enters a node."""
    with open(f"/run/netns/{namespace}", "rb") as handle:
        assert ctypes.CDLL(None, use_errno=True).setns(handle.fileno(), 0x40000000) == 0  # CLONE_NEWNET
    connection.send(local_counters())


def test_a_rank_reads_the_counters_of_its_own_node(cluster: Cluster) -> None:
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=count_inside, args=(cluster.namespace(0), theirs))
    process.start()
    assert ours.poll(20)
    inside: dict[str, Bytes] = ours.recv()
    process.join()
    outside = cluster.counters(0)
    assert set(inside) == set(outside) == {"lo", "e0"}
    # Neighbour discovery may come in between.
    assert inside["e0"].sent == pytest.approx(outside["e0"].sent, abs=1000) and inside["e0"].sent > 0


def test_links_within_a_node_can_be_slow_too(root_and_iproute: None) -> None:
    with emulated_cluster(ClusterSpec(1, 2, 500, lo_mbit=4000)) as made:
        queues = subprocess.run(
            ["tc", "-n", made.namespace(0), "qdisc", "show"], capture_output=True, text=True, check=True
        ).stdout
    assert "tbf" in queues and "dev lo root" in queues and "4Gbit" in queues and "500Mbit" in queues


# ---- launching --------------------------------------------------------------------------------------------------

ENVIRONMENT = """
import json, os, socket
print(json.dumps({**os.environ, "host": socket.gethostname(), "group": os.getpgrp() == os.getpid()}))
"""


def environments(texts: list[str]) -> list[dict[str, Any]]:
    return [json.loads(text.splitlines()[-1]) for text in texts]


def test_ranks_know_their_place(root_and_iproute: None) -> None:
    with emulated_cluster(ClusterSpec(2, 2, 500)) as made:
        ranks = environments(made.run(python(ENVIRONMENT), timeout_s=30, env={"MINE": "yes"}))
        again = environments(made.run(python(ENVIRONMENT), timeout_s=30))
    for rank, env in enumerate(ranks):
        assert env["RANK"] == str(rank) and env["WORLD_SIZE"] == "4"
        assert env["LOCAL_RANK"] == str(rank % 2) and env["LOCAL_WORLD_SIZE"] == "2"
        assert env["MASTER_ADDR"] == "10.77.0.1" and env["GLOO_SOCKET_IFNAME"] == "e0"
        assert env["OMP_NUM_THREADS"] == "1" and env["DS_ACCELERATOR"] == "cpu" and env["MINE"] == "yes"
        assert env["host"] == f"node{rank // 2}" and env["group"]
        assert env["TORCH_EXTENSIONS_DIR"] == ranks[0]["TORCH_EXTENSIONS_DIR"] != os.environ.get("TORCH_EXTENSIONS_DIR")
    assert len({env["MASTER_PORT"] for env in ranks}) == 1
    assert again[0]["MASTER_PORT"] != ranks[0]["MASTER_PORT"], "a fresh port for each run"


def test_loopback_needs_nothing() -> None:
    source = (
        "import torch, torch.distributed as dist; dist.init_process_group('gloo'); value = torch.ones(1);"
        "dist.all_reduce(value); print(value.item()); dist.destroy_process_group()"
    )
    with loopback_cluster(PAIR) as ranks:
        assert not ranks.emulated and ranks.counters(0) == {}
        assert [text.splitlines()[-1] for text in ranks.run(python(source), timeout_s=60)] == ["2.0", "2.0"]
        env = environments(ranks.run(python(ENVIRONMENT), timeout_s=30))[1]
        assert env["MASTER_ADDR"] == "127.0.0.1" and env["LOCAL_RANK"] == "0"


# ---- failing ----------------------------------------------------------------------------------------------------

ONE_DIES = """
import os, subprocess, sys, time
print("pid", os.getpid(), subprocess.Popen(["sleep", "600"]).pid, flush=True)
if os.environ["RANK"] == "1":
    time.sleep(0.5)
    raise ValueError("planted")
time.sleep(600)
"""


def test_a_rank_that_dies_ends_the_others(cluster: Cluster) -> None:
    pids: list[int] = []

    def note(rank: int, line: str) -> None:
        if line.startswith("pid"):
            pids.extend(map(int, line.split()[1:]))

    began = time.monotonic()
    with pytest.raises(RankFailed, match="ValueError: planted") as caught:
        cluster.run(python(ONE_DIES), timeout_s=60, on_line=note)
    assert caught.value.rank == 1
    assert "rank 1 ended with exit code 1\nTraceback" in str(caught.value)
    assert "rank 0 was still running" in str(caught.value)
    assert time.monotonic() - began < 20
    assert len(pids) == 4 and eventually(lambda: not any(map(is_running, pids)))


CAUSE_ENDS_LAST = """
import os, time, traceback
if os.environ["RANK"] == "0":
    try:
        raise ValueError("the cause")
    except ValueError:
        traceback.print_exc()
    time.sleep(0.6)
    raise SystemExit(1)
time.sleep(0.3)
raise RuntimeError("connection lost")
"""


def test_the_first_traceback_is_reported_even_if_its_rank_ends_last() -> None:
    with loopback_cluster(PAIR) as ranks, pytest.raises(RankFailed, match="the cause") as caught:
        ranks.run(python(CAUSE_ENDS_LAST), timeout_s=30)
    assert caught.value.rank == 0 and "rank 1 ended with exit code 1" in str(caught.value)


def test_a_rank_killed_by_a_signal_is_named() -> None:
    source = "import os; print('last words', flush=True); os.kill(os.getpid(), 9)"
    with loopback_cluster(PAIR) as ranks, pytest.raises(RankFailed, match="died of signal SIGKILL\nlast words"):
        ranks.run(python(source), timeout_s=30)


def test_time_is_up() -> None:
    source = "import time; print('waiting', flush=True); time.sleep(600)"
    with loopback_cluster(PAIR) as ranks, pytest.raises(RankFailed, match=r"not done after 1 s[^$]*waiting") as caught:
        ranks.run(python(source), timeout_s=1)
    assert caught.value.rank is None


def test_an_exception_in_the_block_removes_the_cluster(root_and_iproute: None) -> None:
    names: list[str] = []

    def use() -> None:
        with emulated_cluster(PAIR) as made:
            names.extend(made.namespaces)
            assert set(names) <= namespaces()
            raise KeyError("user code")

    with pytest.raises(KeyError):
        use()
    assert names and not set(names) & namespaces()


# ---- signals ----------------------------------------------------------------------------------------------------


def run_until_killed(connection: Any) -> None:
    """In a forked process: a cluster whose ranks sleep; tells namespaces and pids of the ranks."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    with emulated_cluster(PAIR) as made:
        connection.send(made.namespaces)
        made.run(
            ["sh", "-c", 'echo $$; exec "$@"', "sh", *SLEEP],
            timeout_s=60,
            on_line=lambda rank, line: connection.send(int(line)),
        )


@pytest.fixture
def running(root_and_iproute: None) -> Iterator[tuple[Any, list[str], list[int]]]:
    """(process, its namespaces, its ranks), all running."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=run_until_killed, args=(theirs,))
    process.start()
    received = []
    for _ in range(3):
        assert ours.poll(30), "the cluster did not start"
        received.append(ours.recv())
    assert set(received[0]) <= namespaces() and all(map(is_running, received[1:]))
    yield process, received[0], received[1:]
    process.kill()
    process.join()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_a_signal_leaves_nothing(running: tuple[Any, list[str], list[int]], number: signal.Signals) -> None:
    process, names, ranks = running
    os.kill(process.pid, number)
    process.join(20)
    assert process.exitcode == (143 if number == signal.SIGTERM else 1)
    assert not set(names) & namespaces()
    assert not any(map(is_running, ranks))


def test_what_a_killed_process_left_is_removed_at_the_next_start(running: tuple[Any, list[str], list[int]]) -> None:
    process, names, ranks = running
    process.kill()  # nobody can clean up after this
    assert eventually(lambda: not is_running(process.pid))
    assert set(names) <= namespaces()
    with emulated_cluster(PAIR):
        assert not set(names) & namespaces()
    assert eventually(lambda: not any(map(is_running, ranks)))


def test_namespaces_of_the_living_and_of_others_stay(root_and_iproute: None) -> None:
    stay = [f"amsp-{os.getpid()}-999-n0", f"foreign-{os.getpid()}-0-n0"]
    for name in stay:
        subprocess.run(["ip", "netns", "add", name], check=True)
    try:
        assert not set(remove_stale()) & set(stay)
        assert set(stay) <= namespaces()
    finally:
        for name in stay:
            subprocess.run(["ip", "netns", "delete", name], check=True)


# ---- refusing ---------------------------------------------------------------------------------------------------


def test_without_root_or_tools_the_error_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("PATH", str(tmp_path))
    message = r"needs root \(this is uid 1000\), and ip and tc \(.*install iproute2\).*loopback_cluster"
    with pytest.raises(ClusterUnavailable, match=message), emulated_cluster(PAIR):
        pass


def test_a_kernel_that_refuses_is_an_error_with_its_words(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("ip", "tc"):
        tool = tmp_path / name
        tool.write_text("#!/bin/sh\necho 'mount failed: Operation not permitted' >&2; exit 1\n")
        tool.chmod(0o755)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with (
        pytest.raises(ClusterUnavailable, match=r"netns add .* failed: mount failed.*NET_ADMIN"),
        emulated_cluster(PAIR),
    ):
        pass


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ((0, 1, 500), "nodes"),
        ((251, 1, 500), "nodes"),
        ((2, True, 500), "ranks_per_node"),
        ((2, 2, 0), "nic_mbit"),
        ((2, 2, float("nan")), "nic_mbit"),
        ((2, 2, 500, 0.5), "lo_mbit"),
    ],
)
def test_impossible_clusters_are_refused(arguments: tuple[Any, ...], field: str) -> None:
    with pytest.raises(ValueError, match=field):
        ClusterSpec(*arguments)
