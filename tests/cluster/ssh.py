"""SSH between the nodes of an emulated cluster: a server in each, with keys and settings of its own."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from deepspeed_amsp.compare.cluster import Cluster, host_name

PORT = 2222
SERVER = "/usr/sbin/sshd"  # which only starts by its absolute path, and which PATH often lacks

_SERVER_CONFIG = """\
Port {port}
ListenAddress {address}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/user_key.pub
StrictModes no
UsePAM no
PidFile none
LogLevel ERROR
"""
_CLIENT_CONFIG = """\
Host {host}
  HostName {address}
  Port {port}
  User root
  IdentityFile {folder}/user_key
  IdentitiesOnly yes
  StrictHostKeyChecking no
  UserKnownHostsFile /dev/null
  LogLevel ERROR
"""


def missing() -> list[str]:
    """Programs that are not installed."""
    programs = {"sshd": SERVER, "ssh": "ssh", "ssh-keygen": "ssh-keygen", "pdsh": "pdsh"}
    return [name for name, program in programs.items() if shutil.which(program) is None]


@contextmanager
def servers(cluster: Cluster, folder: Path) -> Iterator[Path]:
    """A server in each node while the block runs; the ssh_config with which ``ssh node0`` works from any node."""
    for name in ("host_key", "user_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
    Path("/run/sshd").mkdir(exist_ok=True)  # a package's service would make it
    started: list[subprocess.Popen[bytes]] = []
    client = []
    try:
        for node in range(cluster.spec.nodes):
            facts = {"port": PORT, "address": cluster.address(node), "folder": folder, "host": host_name(node)}
            config = folder / f"sshd_config_{node}"
            config.write_text(_SERVER_CONFIG.format(**facts), encoding="utf-8")
            client.append(_CLIENT_CONFIG.format(**facts))
            command = cluster.on_node(node, [SERVER, "-D", "-e", "-f", str(config)])
            started.append(subprocess.Popen(command, stdin=subprocess.DEVNULL))
        settings = folder / "ssh_config"
        settings.write_text("".join(client), encoding="utf-8")
        for node in range(cluster.spec.nodes):
            _await(cluster, node)
        yield settings
    finally:
        for server in started:
            server.terminate()
            server.wait()


def _await(cluster: Cluster, node: int) -> None:
    """Wait until the server of a node answers."""
    knock = f"import socket; socket.create_connection(({cluster.address(node)!r}, {PORT}), 1).close()"
    for _ in range(100):
        done = subprocess.run(
            cluster.on_node(0, [sys.executable, "-S", "-c", knock]), capture_output=True, text=True, check=False
        )
        if done.returncode == 0:
            return
        time.sleep(0.1)
    raise RuntimeError(f"the ssh server of {host_name(node)} does not answer: {done.stderr.strip()}")
