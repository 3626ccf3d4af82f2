"""A cluster of several nodes with slow links, emulated on one Linux machine.

A node is a network namespace with one NIC, ``e0`` (10.77.0.<node + 1>); a bridge in a namespace of its own joins
them, so nothing is added to the machine's own network. Both ends of a NIC are limited by a token bucket, and TCP is
Reno's everywhere. Ranks of one node talk over its ``lo``. Waiting for a slow link costs no CPU time, so ratios of
step times repeat within a few percent even when the ranks share two cores.

    with emulated_cluster(ClusterSpec(nodes=2, ranks_per_node=2, nic_mbit=500)) as cluster:
        cluster.run([sys.executable, "train.py"], timeout_s=300)
        print(cluster.counters(0)["e0"].sent)
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NamedTuple, NoReturn

from deepspeed_amsp.compare.launch import PORTS, OnLine, RankCommand, free_port, run_ranks, undisturbed

PAYLOAD_SHARE = 0.955
"""Of a NIC's rate, what is left for the payload of TCP over Ethernet frames of 1500 bytes."""

CONGESTION_CONTROL = "reno"
"""Of the nodes' TCP where the kernel lets us choose, whatever the machine's own is; every kernel has it. With BBR, the
default of some hosts, a connection goes on for a while at the rate that it had beside others, and a link stands half
idle meanwhile."""

_PREFIX = "amsp-"
_OWNED = re.compile(rf"{_PREFIX}(\d+)-\d+-(?:sw|n\d+)")
_NAMESPACES = Path("/run/netns")
_CONGESTION = "/proc/sys/net/ipv4/tcp_congestion_control"
_numbers = itertools.count()


class ClusterUnavailable(RuntimeError):
    """This machine cannot emulate a cluster; the message says what is missing and what to do instead."""


@dataclass(frozen=True)
class ClusterSpec:
    """nodes of ranks_per_node ranks; rates in Mbit/s (1e6 bits), each direction by itself.

    lo_mbit: rate between the ranks of a node; None for as fast as memory. spine_mbit: rate of the link between the
    two halves of the nodes, each on a switch of its own; None for one switch.
    """

    nodes: int
    ranks_per_node: int
    nic_mbit: float
    lo_mbit: float | None = None
    spine_mbit: float | None = None

    def __post_init__(self) -> None:
        """Raises ValueError, naming the field."""
        for name, value, most in (("nodes", self.nodes, 250), ("ranks_per_node", self.ranks_per_node, 1024)):
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
                raise ValueError(f"{name} must be a whole number from 1 to {most}, not {value!r}")
        rates = (("nic_mbit", self.nic_mbit), ("lo_mbit", self.lo_mbit), ("spine_mbit", self.spine_mbit))
        for name, rate in rates:
            if rate is not None and not 1 <= rate <= 1e6:
                raise ValueError(f"{name} must be from 1 to 1e6 Mbit/s, not {rate!r}")

    @property
    def world_size(self) -> int:
        """Ranks of all nodes."""
        return self.nodes * self.ranks_per_node

    @property
    def nic_bytes_per_s(self) -> float:
        """Payload that a NIC carries in one direction, in bytes a second."""
        return self.nic_mbit * 1e6 / 8 * PAYLOAD_SHARE


class Bytes(NamedTuple):
    """What an interface has sent and received since its node was made, in bytes, headers included."""

    sent: int
    received: int


def local_counters() -> dict[str, Bytes]:
    """The counters of this process's own node, by interface: for use in a rank."""
    found = {}
    for line in Path("/proc/self/net/dev").read_text(encoding="ascii").splitlines()[2:]:
        name, _, numbers = line.partition(":")
        columns = numbers.split()
        found[name.strip()] = Bytes(sent=int(columns[8]), received=int(columns[0]))
    return found


class Loopback:
    """Ranks without namespaces: the same environment, all on 127.0.0.1, no limits and no counters.

    Ranks still see ``ranks_per_node`` of them in a node, and one host name, that of the machine.
    """

    emulated = False

    def __init__(self, spec: ClusterSpec, folder: Path) -> None:
        self.spec = spec
        self._folder = folder

    def run(
        self,
        command: Sequence[str],
        *,
        timeout_s: float,
        env: Mapping[str, str] | None = None,
        on_line: OnLine | None = None,
    ) -> list[str]:
        """Start ``command`` once a rank and wait for all; what each printed (its last lines), by rank.

        Args:
            timeout_s: seconds for the whole run.
            env: further environment of every rank; it wins over the launcher's own.
            on_line: told (rank, line) as ranks print.

        Raises:
            RankFailed: a rank failed (the first one's traceback) or time is up; the others have been killed.
        """
        return run_ranks(self.commands(command, env), timeout_s, on_line)

    def commands(self, command: Sequence[str], env: Mapping[str, str] | None = None) -> list[RankCommand]:
        """What `run` starts, by rank: one world with a port of its own. Several worlds can share a `run_ranks`."""
        port = str(self._port())
        ranks = []
        for rank in range(self.spec.world_size):
            node, local = divmod(rank, self.spec.ranks_per_node)
            variables = {
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(local),
                "WORLD_SIZE": str(self.spec.world_size),
                "LOCAL_WORLD_SIZE": str(self.spec.ranks_per_node),
                "MASTER_PORT": port,
                "OMP_NUM_THREADS": "1",
                "DS_ACCELERATOR": "cpu",
                # A build that was killed leaves a lock on which every later start of that folder hangs.
                "TORCH_EXTENSIONS_DIR": str(self._folder / "extensions"),
                **self._network(),
                **(env or {}),
            }
            ranks.append(RankCommand([*self._enter(node), *command], variables))
        return ranks

    def counters(self, node: int) -> dict[str, Bytes]:
        """Bytes of a node's interfaces; empty here, because all nodes share the machine's loopback."""
        return {}

    def _port(self) -> int:
        return free_port()

    def _network(self) -> dict[str, str]:
        return {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}

    def _enter(self, node: int) -> list[str]:
        return []


class Cluster(Loopback):
    """Nodes in namespaces. Made by `emulated_cluster`, which also removes it."""

    emulated = True

    def __init__(self, spec: ClusterSpec, folder: Path) -> None:
        super().__init__(spec, folder)
        self._name = f"{_PREFIX}{os.getpid()}-{next(_numbers)}"
        self._ports = itertools.count(PORTS.start)  # the namespaces are ours alone, so a fresh number is free
        self._made: list[str] = []

    @property
    def namespaces(self) -> list[str]:
        """Names of the nodes' namespaces, by node."""
        return [self.namespace(node) for node in range(self.spec.nodes)]

    def namespace(self, node: int) -> str:
        """The network namespace of a node, as ``ip netns`` knows it."""
        if not 0 <= node < self.spec.nodes:
            raise ValueError(f"node must be from 0 to {self.spec.nodes - 1}, not {node}")
        return f"{self._name}-n{node}"

    def on_node(self, node: int, command: Sequence[str]) -> list[str]:
        """``command`` as it runs on a node, for whoever starts it himself: a server, a launcher of its own."""
        return [*self._enter(node), *command]

    def address(self, node: int) -> str:
        """Where the others reach a node."""
        return _address(node)

    @property
    def congestion_control(self) -> str:
        """Of TCP between the nodes: `CONGESTION_CONTROL`, or the machine's own where that cannot be changed."""
        return _tool("ip", "netns", "exec", self.namespace(0), "cat", _CONGESTION).strip()

    def counters(self, node: int) -> dict[str, Bytes]:
        """Bytes of a node's ``e0`` (to other nodes) and ``lo`` (between its ranks)."""
        links = json.loads(_tool("ip", "-n", self.namespace(node), "-s", "-j", "link", "show"))
        return {link["ifname"]: Bytes(link["stats64"]["tx"]["bytes"], link["stats64"]["rx"]["bytes"]) for link in links}

    def make(self) -> None:
        """Build it. Raises ClusterUnavailable; `remove` takes down what had been built until then."""
        switch = f"{self._name}-sw"
        self._add(switch)
        bridges = ["br0"] if self.spec.spine_mbit is None else ["br0", "br1"]
        for bridge in bridges:
            _tool("ip", "-n", switch, "link", "add", bridge, "type", "bridge")
            _tool("ip", "-n", switch, "link", "set", bridge, "up")
        if self.spec.spine_mbit is not None:
            self._join(switch, bridges, self.spec.spine_mbit)
        for node, name in enumerate(self.namespaces):
            self._add(name)
            _set_congestion_control(name)
            port = f"p{node}"
            _tool("ip", "-n", switch, "link", "add", port, "type", "veth", "peer", "name", "e0", "netns", name)
            _tool("ip", "-n", switch, "link", "set", port, "master", bridges[node * len(bridges) // self.spec.nodes])
            for where, link in ((switch, port), (name, "e0")):
                _shape(where, link, self.spec.nic_mbit)
            _tool("ip", "-n", name, "addr", "add", f"{_address(node)}/24", "dev", "e0")
            _tool("ip", "-n", name, "link", "set", "lo", "up")
            if self.spec.lo_mbit is not None:
                _limit(name, "lo", self.spec.lo_mbit, "burst", "256kb", "limit", "8mb")

    def remove(self) -> None:
        """Delete the namespaces, and with them bridge and links. May be called twice."""
        while self._made:
            _delete(self._made.pop())

    def _join(self, switch: str, bridges: Sequence[str], mbit: float) -> None:
        """A link between two bridges."""
        ends = ("spine0", "spine1")
        _tool("ip", "-n", switch, "link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for end, bridge in zip(ends, bridges, strict=True):
            _tool("ip", "-n", switch, "link", "set", end, "master", bridge)
            _shape(switch, end, mbit)

    def _add(self, name: str) -> None:
        self._made.append(name)  # first: an interrupted command may have done its work
        _tool("ip", "netns", "add", name)

    def _port(self) -> int:
        return next(self._ports)

    def _network(self) -> dict[str, str]:
        # Left to itself gloo takes 127.0.0.1, and finds nobody there.
        return {"MASTER_ADDR": _address(0), "GLOO_SOCKET_IFNAME": "e0"}

    def _enter(self, node: int) -> list[str]:
        # A host name of its own makes it a node for whoever groups ranks by host. All of this ends in exec, so
        # the process that was started is the rank.
        named = f'echo {host_name(node)} > /proc/sys/kernel/hostname; exec "$@"'
        return ["ip", "netns", "exec", self.namespace(node), "unshare", "--uts", "sh", "-c", named, "sh"]


@contextmanager
def emulated_cluster(spec: ClusterSpec) -> Iterator[Cluster]:
    """A cluster that is gone when the block ends, also by an exception, SIGINT or SIGTERM.

    In the main thread SIGTERM raises SystemExit(143) meanwhile, as SIGINT raises KeyboardInterrupt; both
    unwind through the block. What an earlier process left behind because it was killed is removed first.

    Raises:
        ClusterUnavailable: no root, no iproute2, or the kernel refuses namespaces.
    """
    check_available()
    remove_stale()
    owner = os.getpid()
    with _interruptible(), _private_folder() as folder:
        cluster = Cluster(spec, folder)
        try:
            cluster.make()
            yield cluster
        finally:
            if os.getpid() == owner:  # not in a fork of this process
                with undisturbed():
                    cluster.remove()


@contextmanager
def loopback_cluster(spec: ClusterSpec) -> Iterator[Loopback]:
    """The stand-in for a machine that cannot emulate one; its times say nothing about slow links."""
    with _interruptible(), _private_folder() as folder:
        yield Loopback(spec, folder)


def check_available() -> None:
    """Raises ClusterUnavailable with everything that is missing."""
    missing = []
    if not sys.platform.startswith("linux"):
        missing.append("Linux (network namespaces)")
    elif os.geteuid() != 0:
        missing.append(f"root (this is uid {os.geteuid()})")
    absent = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if absent:
        missing.append(f"{' and '.join(absent)} (Debian, Ubuntu: apt-get install iproute2)")
    if shutil.which("unshare") is None:
        missing.append("unshare (package util-linux)")
    if missing:
        raise ClusterUnavailable(f"emulating a cluster needs {', and '.join(missing)}. {_INSTEAD}")


def remove_stale() -> list[str]:
    """Remove clusters whose process is dead, with the ranks that it left in them; the namespaces removed."""
    removed = []
    for name in sorted(os.listdir(_NAMESPACES)) if _NAMESPACES.is_dir() else []:
        match = _OWNED.fullmatch(name)
        if match and not _alive(match[1]):
            _delete(name)
            removed.append(name)
    return removed


_INSTEAD = "Without it, ranks can run on the plain loopback interface (loopback_cluster): same results, no slow links."


def _alive(pid: str) -> bool:
    """Whether a process runs; a zombie, which nobody has reaped yet, does not."""
    try:
        stat = Path("/proc", pid, "stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def host_name(node: int) -> str:
    """What the ranks of a node in a namespace see as their host."""
    return f"node{node}"


def _address(node: int) -> str:
    return f"10.77.0.{node + 1}"


def _shape(namespace: str, link: str, mbit: float) -> None:
    """Limit a link of the network and bring it up."""
    # Frames of 64 KB would exceed the bucket's burst; these are cut into ones that fit.
    _tool("ip", "-n", namespace, "link", "set", link, "gso_max_size", "16384", "gso_max_segs", "8")
    _limit(namespace, link, mbit, "burst", "64kb", "limit", "4mb")
    _tool("ip", "-n", namespace, "link", "set", link, "up")


def _set_congestion_control(namespace: str) -> None:
    """Where the kernel allows it: some containers have /proc/sys read-only. See `Cluster.congestion_control`."""
    attempt = f"(echo {CONGESTION_CONTROL} > {_CONGESTION}) 2>/dev/null || true"
    _tool("ip", "netns", "exec", namespace, "sh", "-c", attempt)


def _limit(namespace: str, link: str, mbit: float, *bucket: str) -> None:
    rate = f"{round(mbit * 1e6)}bit"
    _tool("tc", "-n", namespace, "qdisc", "add", "dev", link, "root", "tbf", "rate", rate, *bucket)


def _delete(name: str) -> None:
    """Delete a namespace and whatever still runs in it; another process may be doing the same."""
    pids = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False).stdout
    for pid in pids.split():
        with suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def _tool(*command: str) -> str:
    # A session of its own: Ctrl-C in the terminal must not interrupt it halfway.
    done = subprocess.run(command, capture_output=True, text=True, check=False, start_new_session=True)
    if done.returncode != 0:
        raise ClusterUnavailable(
            f"`{' '.join(command)}` failed: {done.stderr.strip()}. The kernel must allow network namespaces, veth, "
            f"bridges and the tbf queue (in a container: capabilities NET_ADMIN and SYS_ADMIN). {_INSTEAD}"
        )
    return done.stdout


@contextmanager
def _private_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="amsp-cluster-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


@contextmanager
def _interruptible() -> Iterator[None]:
    """SIGTERM unwinds the stack, as SIGINT does, instead of ending the process at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
