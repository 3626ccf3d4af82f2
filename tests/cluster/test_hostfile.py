"""DeepSpeed's own launcher over two nodes of two slots with an amsp block: through pdsh and ssh, and without ssh.

`make test-cluster` installs what the first needs, and runs these tests.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deepspeed_amsp.compare.cluster import Cluster, ClusterSpec, ClusterUnavailable, emulated_cluster, host_name
from deepspeed_amsp.compare.launch import RankCommand, run_ranks
from tests.cluster import ssh
from tests.support import models

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).with_name("train.py")
NODES, SLOTS = 2, 2
STEPS, MICRO_BATCHES, CLIP = 3, 2, 0.4
SHARDING = {"parameters": [2, 1], "gradients": [2, 1], "optimizer_states": [2, 2]}
PATIENCE_S = 300
NIGHTLY = os.environ.get("AMSP_NIGHTLY") == "1"
ports = itertools.count(29500)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    try:
        with emulated_cluster(ClusterSpec(NODES, SLOTS, 1000)) as made:
            yield made
    except ClusterUnavailable as error:
        pytest.skip(str(error))


class Job:
    """The files of one launch."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.hostfile = folder / "hostfile"
        self.hostfile.write_text("".join(f"{host_name(node)} slots={SLOTS}\n" for node in range(NODES)), "utf-8")
        self.config = folder / "ds.json"
        self.config.write_text(json.dumps(ds_config()), encoding="utf-8")
        # Each rank's environment; a line without "=" would be an error, an empty one, too.
        self.env = {
            "DS_ACCELERATOR": "cpu",
            "GLOO_SOCKET_IFNAME": "e0",
            "OMP_NUM_THREADS": "1",
            "TORCH_EXTENSIONS_DIR": str(folder / "extensions"),
            "PYTHONPATH": str(ROOT),
        }
        self.ranks_env = folder / "env"
        self.ranks_env.write_text("\n".join(f"{key}={value}" for key, value in self.env.items()), encoding="utf-8")

    def launcher(self, *options: str) -> list[str]:
        """The command line of ``deepspeed``."""
        return [
            sys.executable, "-m", "deepspeed.launcher.runner", "--hostfile", str(self.hostfile), *options,
            str(SCRIPT), "--deepspeed_config", str(self.config), "--out", str(self.folder), "--steps", str(STEPS),
        ]  # fmt: skip

    def seen(self) -> list[dict[str, Any]]:
        """What the ranks wrote."""
        files = [self.folder / f"rank{rank}.json" for rank in range(NODES * SLOTS)]
        return [json.loads(file.read_text(encoding="utf-8")) for file in files]


def ds_config() -> dict[str, Any]:
    """Nothing about nodes: the launcher and the hosts say how many there are, and only two allow this sharding."""
    return {
        "train_micro_batch_size_per_gpu": models.SAMPLES,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "gradient_clipping": CLIP,
        "zero_optimization": {"stage": 3},
        "amsp": {"sharding": SHARDING},
    }


def meeting_point(cluster: Cluster) -> list[str]:
    """Options that say where the ranks of one launch find each other."""
    return ["--master_addr", cluster.address(0), "--master_port", str(next(ports))]


def check(ranks: list[dict[str, Any]]) -> None:
    """Every rank is where it belongs and has the losses of one process that trains on all the data."""
    assert [rank["host"] for rank in ranks] == ["node0", "node0", "node1", "node1"]
    assert [rank["local_rank"] for rank in ranks] == [0, 1, 0, 1]
    for rank in ranks:
        assert rank["launched_with"] == {"WORLD_SIZE": "4", "LOCAL_SIZE": "2", "MASTER_ADDR": "10.77.0.1"}
        assert rank["plan"] == ranks[0]["plan"]
        assert rank["losses"] == ranks[0]["losses"]
    want = models.reference("mlp", "adamw", NODES * SLOTS, MICRO_BATCHES, STEPS, CLIP)
    assert ranks[0]["losses"] == pytest.approx(want.losses, rel=1e-5)


@pytest.fixture(scope="module")
def without_ssh(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What ranks saw that a launcher in every node started, as a batch system would start those."""
    job, meeting = Job(tmp_path_factory.mktemp("without_ssh")), meeting_point(cluster)
    env = {**os.environ, **job.env}
    commands = [job.launcher(*meeting, "--no_ssh", "--node_rank", str(node)) for node in range(NODES)]
    run_ranks([RankCommand(cluster.on_node(node, one), env) for node, one in enumerate(commands)], PATIENCE_S)
    return job.seen()


def through_ssh(cluster: Cluster, folder: Path) -> list[dict[str, Any]]:
    """One launcher in the first node, which starts the others through pdsh.

    The ranks' environment comes from DS_ENV_FILE alone: what the launcher itself has, a new session does not.
    """
    job = Job(folder)
    with ssh.servers(cluster, folder) as settings:
        env = {
            **os.environ,
            "DS_ACCELERATOR": "cpu",
            "DS_ENV_FILE": str(job.ranks_env),
            "PDSH_SSH_ARGS_APPEND": f"-F {settings}",
        }
        launcher = job.launcher(*meeting_point(cluster), "--no_ssh_check")
        run_ranks([RankCommand(cluster.on_node(0, launcher), env)], PATIENCE_S)
    return job.seen()


def test_without_ssh(without_ssh: list[dict[str, Any]]) -> None:
    check(without_ssh)


@pytest.mark.skipif(not NIGHTLY, reason="the same job through another launcher: make test-cluster, or AMSP_NIGHTLY=1")
def test_through_pdsh_and_ssh(cluster: Cluster, without_ssh: list[dict[str, Any]], tmp_path: Path) -> None:
    if ssh.missing():
        pytest.skip(f"{', '.join(ssh.missing())} not installed (on Debian, make test-cluster does that)")
    ranks = through_ssh(cluster, tmp_path)
    check(ranks)
    assert [rank["losses"] for rank in ranks] == [rank["losses"] for rank in without_ssh]
