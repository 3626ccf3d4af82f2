"""What can be said about GPUs without one: the launcher's command, FLOPs and peaks."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed_amsp.compare import gpus
from deepspeed_amsp.compare.config import CompareConfigError, check
from deepspeed_amsp.compare.gpus import GpuHarness, flops_per_token, launcher, peak_flops
from deepspeed_amsp.compare.ranks import Order
from deepspeed_amsp.compare.results import Run, read
from deepspeed_amsp.compare.strategies.base import Work
from deepspeed_amsp.plan.layout import ParamSpec
from deepspeed_amsp.plan.specs import ModelSpec, UnitSpec


class Silent:
    def note(self, text: str) -> None: ...

    def began(self, order: Order, done: int, total: int) -> None: ...

    def ended(self, run: Run) -> None: ...


def config(nodes: int) -> Any:
    return check({"strategies": ["ddp"], "cluster": {"nodes": nodes, "ranks_per_node": 8}}, "test")


def test_the_launchers_command() -> None:
    job = Path("/shared/job.json")
    alone = launcher(Path("python"), None, 8, job, 29500)
    assert alone[:6] == ["python", "-m", "deepspeed.launcher.runner", "--num_gpus", "8", "--master_port"]
    assert alone[-3:] == ["--module", "deepspeed_amsp.compare.ranks", str(job)]
    cluster = launcher(Path("python"), Path("hosts"), 8, job, 29500)
    assert cluster[3:5] == ["--hostfile", "hosts"] and "--num_gpus" not in cluster


def test_flops_are_megatrons() -> None:
    """72 B s l h^2 (1 + s/6h + V/12lh), for a model whose blocks have 12 h^2 parameters, as GPT's have."""
    hidden, layers, sequence, vocab = 1024, 24, 2048, 50_000
    block = tuple(
        UnitSpec(f"block{n}", (ParamSpec(f"block{n}.weight", (12 * hidden, hidden)),), n) for n in range(layers)
    )
    model = ModelSpec("gpt", block, hidden=hidden, vocab=vocab)
    factor = 1 + sequence / (6 * hidden) + vocab / (12 * layers * hidden)
    assert flops_per_token(model, sequence) == pytest.approx(72 * layers * hidden**2 * factor)


def test_peaks() -> None:
    assert peak_flops("NVIDIA A100-SXM4-80GB") == 312e12
    assert peak_flops("NVIDIA H100 PCIe") == 756e12 and peak_flops("NVIDIA H100 80GB HBM3") == 989e12
    assert peak_flops("Something else") is None


def test_launches_go_on_without_what_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a launcher that starts one fake rank, as pdsh would show it: the host before every line."""

    def local(python: Path, hostfile: Path | None, ranks: int, job: Path, port: int) -> list[str]:
        start = (
            f"{sys.executable} -m tests.compare.fake_ranks {job} 2>&1 | sed 's/^/worker-1: /'; exit ${{PIPESTATUS[0]}}"
        )
        return ["bash", "-c", start]

    monkeypatch.setattr(gpus, "launcher", local)
    monkeypatch.setattr(gpus, "device_name", lambda: "NVIDIA A100-SXM4-80GB")
    monkeypatch.setenv("AMSP_FAKE", json.dumps({"zero1": "die"}))
    monkeypatch.setenv("RANK", "0")
    values = {"strategies": ["ddp", "zero1", "zero2"], "cluster": {"nodes": 1, "ranks_per_node": 8}, "rounds": 2}
    found = read(GpuHarness(check(values, "test"), tmp_path / "out", Silent()).run())
    done = [(run.strategy, run.round) for run in found.runs if run.error is None]
    assert done == [("ddp", 0), ("zero2", 0), ("zero2", 1), ("ddp", 1)]
    assert [run.strategy for run in found.runs if run.error is not None] == ["zero1"]
    assert found.setup.peak_flops == 312e12 and found.setup.device.startswith("NVIDIA") and not found.setup.emulated
    assert all(run.nic_mbit is None for run in found.runs)


def test_zero_1_and_2_overlap_where_there_are_streams() -> None:
    from deepspeed_amsp.compare.strategies.zero import ds_config

    found = check({"strategies": ["zero1", "zero2", "zero3"]}, "test")
    for device, expected in (("cuda", [True, True, None]), ("cpu", [None] * 3)):
        works = [Work(one, found, 1, torch.device(device), None) for one in found.resolved()]
        assert [ds_config(work)["zero_optimization"].get("overlap_comm") for work in works] == expected


def test_hostfiles_must_be_those_of_the_comparison(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("worker-1 slots=8\nworker-2 slots=8\n", encoding="utf-8")
    with pytest.raises(CompareConfigError, match="name them with --hostfile"):
        GpuHarness(config(2), tmp_path, Silent())
    with pytest.raises(CompareConfigError, match="no such file"):
        GpuHarness(config(2), tmp_path, Silent(), hostfile=tmp_path / "absent")
    with pytest.raises(CompareConfigError, match="4 nodes of 8 ranks"):
        GpuHarness(config(4), tmp_path, Silent(), hostfile=hosts)
    GpuHarness(config(2), tmp_path, Silent(), hostfile=hosts)


def test_mics_that_does_not_start_is_its_own_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its interpreter may be missing on other hosts; what was measured before it stays."""

    def local(python: Path, hostfile: Path | None, ranks: int, job: Path, port: int) -> list[str]:
        return [str(python), "-m", "tests.compare.fake_ranks", str(job)]

    monkeypatch.setattr(gpus, "launcher", local)
    monkeypatch.setattr(gpus, "device_name", lambda: "NVIDIA A100-SXM4-80GB")
    monkeypatch.setattr(gpus, "_check_slots", lambda *given: None)
    monkeypatch.setattr(gpus.environments, "mics_python", lambda note: Path(sys.executable))
    monkeypatch.setenv("AMSP_FAKE", json.dumps({"mics": "absent"}))
    monkeypatch.setenv("RANK", "0")
    (tmp_path / "hosts").touch()
    values = {"strategies": ["mics", "ddp"], "cluster": {"nodes": 2, "ranks_per_node": 8}, "rounds": 1}
    harness = GpuHarness(check(values, "test"), tmp_path / "out", Silent(), hostfile=tmp_path / "hosts")
    found = read(harness.run())
    assert [run.strategy for run in found.runs if run.error is None] == ["ddp"]
    assert [run.strategy for run in found.runs if "no such release" in str(run.error)] == ["mics"]
