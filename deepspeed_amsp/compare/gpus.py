"""A comparison on GPUs: DeepSpeed's launcher, no emulation, memory of the device, MFU.

Strategies of one environment run in one launch, in the order of the rounds; a launch that dies or hangs is started
again without the strategy that was at work.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from deepspeed_amsp.compare import environments, fairness
from deepspeed_amsp.compare.config import CompareConfigError
from deepspeed_amsp.compare.harness import START_S, Harness, Hung
from deepspeed_amsp.compare.launch import RankCommand, RankFailed, free_port, run_ranks
from deepspeed_amsp.compare.ranks import RESULT, Order
from deepspeed_amsp.compare.results import Setup
from deepspeed_amsp.plan.specs import ModelSpec

PEAK_TFLOPS: dict[str, float] = {
    "B200": 2250, "H200": 989, "H100 PCIE": 756, "H100": 989, "H800": 989, "A100": 312, "A800": 312, "L40S": 362,
    "A10": 125, "V100": 125, "MI300X": 1307, "MI250X": 191.5,
}  # fmt: skip
"""Dense bf16 (V100: fp16) in 1e12 FLOP/s of one device, from the vendors' data sheets; the first name that fits."""


def on_gpus() -> bool:
    """Whether this machine has accelerators, and nobody has asked for the CPU."""
    if os.environ.get("DS_ACCELERATOR") == "cpu":
        return False
    import torch

    return torch.accelerator.is_available()


def device_name() -> str:
    """What the driver calls an accelerator of this machine."""
    import torch

    return str(torch.get_device_module().get_device_name())


def peak_flops(device: str) -> float | None:
    """Of one device by its name; None where the table does not know it."""
    return next((1e12 * peak for name, peak in PEAK_TFLOPS.items() if name in device.upper()), None)


def flops_per_token(model: ModelSpec, sequence: int) -> float:
    """Forward and backward, without recomputation: Megatron's formula (Narayanan et al. 2021, Eq. 3),

        72 B s l h^2 (1 + s / 6h + V / 12lh)

    of B s tokens, with 12 l h^2, which is the parameters of GPT's blocks, replaced by those of this model's.
    """
    inside = sum(unit.numel for unit in model.units if unit.layer is not None)
    return 6.0 * inside + 12.0 * model.layers * model.hidden * sequence + 6.0 * model.hidden * model.vocab


def launcher(python: Path, hostfile: Path | None, ranks: int, job: Path, port: int) -> list[str]:
    """DeepSpeed's launcher for one launch; nodes come from the hostfile, else this machine has ``ranks`` of them."""
    where = ["--num_gpus", str(ranks)] if hostfile is None else ["--hostfile", str(hostfile)]
    return [
        str(python), "-m", "deepspeed.launcher.runner", *where, "--master_port", str(port),
        "--module", "deepspeed_amsp.compare.ranks", str(job),
    ]  # fmt: skip


@dataclass
class GpuHarness(Harness):
    """Without a hostfile the cluster must be one node. peak_tflops: of one device, instead of the table's."""

    hostfile: Path | None = None
    peak_tflops: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        cluster = self.config.cluster
        if self.hostfile is None and cluster.nodes > 1:
            raise CompareConfigError(f"cluster.nodes is {cluster.nodes}: name them with --hostfile")
        if self.hostfile is not None and not self.hostfile.is_file():
            raise CompareConfigError(f"--hostfile: no such file: {self.hostfile}")
        if self.hostfile is not None:
            _check_slots(self.hostfile, cluster.nodes, cluster.ranks_per_node)

    def _check_release(self) -> None:
        return  # what older ones do wrong, they do on gloo

    def _can_emulate(self) -> bool:
        return False

    def run(self) -> Path:
        """As `Harness.run`; strategies of one environment are neighbours, MiCS comes after them."""
        self._begin()
        self._find_environments()
        orders = self._orders(None)
        self._total = len(orders)
        orders = list(self._possible(deque(orders)))
        for environment in self._pythons:
            pending = deque(order for order in orders if self.environment_of(order) == environment)
            while pending:
                launch = _Launch(self, environment, pending)
                try:
                    launch.run()
                except (RankFailed, Hung) as error:
                    if not pending:
                        break  # everything was measured: ranks failed as they left
                    if launch.running is None and environment == "mics":
                        self._blame_environment(environment, str(error))
                    else:
                        self.blame(launch.running, str(error))
                    pending = self._possible(pending)
        return self.results

    def _setup(self) -> Setup:
        from deepspeed_amsp.compare.scale import spec_of

        device = device_name()
        peak = peak_flops(device) if self.peak_tflops is None else 1e12 * self.peak_tflops
        flops = flops_per_token(spec_of(self.config.model), self.config.model.sequence)
        return Setup(**{**asdict(super()._setup()), "device": device, "peak_flops": peak, "flops_per_token": flops})

    def _fairness(self) -> list[str]:
        said = [*fairness.common(self.config), *fairness.on_gpus()]
        return [*said, fairness.of_mics()] if self._with_mics else said


class _Launch:
    """One run of the launcher; the job holds all its orders."""

    def __init__(self, harness: GpuHarness, environment: str, pending: deque[Order]) -> None:
        self._harness, self._environment, self._pending = harness, environment, pending
        self.running: Order | None = None
        self._deadline = time.monotonic() + START_S

    def run(self) -> None:
        """Raises RankFailed, Hung."""
        harness = self._harness
        with tempfile.TemporaryDirectory(prefix="amsp-compare-", dir=harness.out) as folder:
            job = Path(folder) / "job.json"  # below the results: other hosts read it, so that must be shared
            orders = [asdict(order) for order in self._pending]
            config = harness.config.as_json()
            job.write_text(
                json.dumps({"config": config, "environment": self._environment, "orders": orders}), encoding="utf-8"
            )
            env = {**os.environ, "PYTHONPATH": environments.search_path(Path(folder) / "source")}
            ranks = harness.config.cluster.ranks_per_node
            # A fresh port each time: a rank of the last launch may still hold its own.
            command = launcher(harness.python(self._environment), harness.hostfile, ranks, job.absolute(), free_port())
            run_ranks([RankCommand(command, env)], 1e9, self._heard, self._look)

    def _heard(self, rank: int, line: str) -> None:
        _, found, said = line.partition(RESULT)  # pdsh puts the host before it
        if not found:
            return
        values: Mapping[str, Any] = json.loads(said)
        if "ready" not in values:
            order = Order(**values["order"])
            self._pending.popleft()
            self._harness.obeyed(order, {name: value for name, value in values.items() if name != "order"})
        if self._pending:
            self.running = self._pending[0]
            self._harness.began(self.running)
        self._deadline = time.monotonic() + self._harness.config.row_timeout_s

    def _look(self) -> None:
        if time.monotonic() > self._deadline:
            name = "the start" if self.running is None else self.running.strategy
            raise Hung(f"{name} was not done in time; the launcher has been killed")


def _check_slots(hostfile: Path, nodes: int, ranks: int) -> None:
    """Raises CompareConfigError unless the hostfile has ``nodes`` lines of ``ranks`` slots."""
    from deepspeed.launcher.runner import fetch_hostfile

    hosts = fetch_hostfile(str(hostfile))
    if len(hosts) != nodes or set(hosts.values()) != {ranks}:
        raise CompareConfigError(
            f"--hostfile {hostfile} has {dict(hosts)}, and the comparison is for {nodes} nodes of {ranks} ranks"
        )
