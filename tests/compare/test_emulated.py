"""`amsp compare` from end to end: real ranks on slow links, and every byte that leaves a node.

Two nodes of one rank in the suite; AMSP_NIGHTLY=1 takes configs/ab.yaml's strategies on 2x2, MiCS included, with M = 2.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from deepspeed_amsp.cli.app import app
from deepspeed_amsp.compare import charts
from deepspeed_amsp.compare.cluster import ClusterSpec, ClusterUnavailable, emulated_cluster
from deepspeed_amsp.compare.results import LIMIT, Results, read

ROOT = Path(__file__).resolve().parents[2]
NIGHTLY = os.environ.get("AMSP_NIGHTLY") == "1"
MODEL = {"llama": {"dim": 128, "heads": 4, "ffn": 512, "layers": 4}, "sequence": 16}
LARGER = {"llama": {"dim": 192, "heads": 6, "ffn": 768, "layers": 4}, "sequence": 16}
"""For strategies that send many small messages, whose headers would be 5 % of what they carry."""
OURS = {"name": "amsp", "amsp": {"sharding": {"optimizer_states": [1, 2]}}}


@pytest.fixture(scope="module", autouse=True)
def root_and_iproute() -> None:
    try:
        with emulated_cluster(ClusterSpec(2, 1, 100, spine_mbit=50)):
            pass
    except ClusterUnavailable as error:
        pytest.skip(str(error))


def compared(folder: Path, **values: Any) -> tuple[Results, str]:
    file = folder / "ab.yaml"
    everywhere = {"model": MODEL, "compute": {"forward_ms": 1}, "rounds": 1, "steps": 2, "bucket_bytes": 300_000}
    file.write_text(yaml.safe_dump({**everywhere, **values}), encoding="utf-8")
    done = CliRunner().invoke(app, ["compare", "--config", str(file), "--out", str(folder / "out")])
    assert done.exit_code == 0, done.output
    return read(folder / "out" / "results.jsonl"), done.output


def check(results: Results) -> None:
    losses = {run.strategy: run.losses for run in results.runs}
    for run in results.runs:
        assert run.error is None
        if run.strategy == LIMIT:
            assert run.sent_bytes_per_node is not None and run.sent_bytes_per_node < 50_000
            continue
        assert run.sent_bytes_per_node == pytest.approx(run.theory_bytes_per_node, rel=0.05), run.strategy
        assert run.losses == pytest.approx(losses["ddp"], abs=5e-3), run.strategy


def test_bytes_losses_and_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(charts, "available", lambda: False)  # they have their own tests
    cluster = {"nodes": 2, "ranks_per_node": 1, "nic_mbit": [1000], "emulate": "always"}
    results, output = compared(tmp_path, cluster=cluster, strategies=[LIMIT, "ddp", "zero1", OURS])
    check(results)
    assert results.setup.emulated and [run.strategy for run in results.runs] == [LIMIT, "ddp", "zero1", "amsp"]
    assert "report.html" in output and (tmp_path / "out" / "report.md").is_file()


@pytest.mark.skipif(not NIGHTLY, reason="every strategy, MiCS included: AMSP_NIGHTLY=1")
@pytest.mark.parametrize("count", [1, 2])
def test_every_strategy(tmp_path: Path, count: int) -> None:
    listed = yaml.safe_load((ROOT / "configs" / "ab.yaml").read_text(encoding="utf-8"))["strategies"]
    cluster = {"nodes": 2, "ranks_per_node": 2, "nic_mbit": [2000], "emulate": "always"}
    check(compared(tmp_path, model=LARGER, cluster=cluster, strategies=listed, micro_batches=[count])[0])
