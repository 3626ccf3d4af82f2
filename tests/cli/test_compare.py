"""``amsp compare``: what it refuses, in one line, before it starts anything."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from deepspeed_amsp.cli.app import app

AB = str(Path(__file__).resolve().parents[2] / "configs" / "ab.yaml")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "name what is to be compared"),
        (["--config", "absent.yaml"], "absent.yaml: no such file"),
        (["--config", AB, "--only", "zero4"], "--only zero4: not in this comparison"),
        (["--config", AB, "--rounds", "0"], "--rounds must be at least 1"),
        (["--config", AB, "--from", "results.jsonl"], "--from draws what was measured"),
        (["--config", AB, "--hostfile", "hosts"], "--hostfile is for GPUs"),
        (["--config", AB, "--peak-tflops", "-1"], "--peak-tflops must be above 0"),
        (["--from", "results.jsonl", "--peak-tflops", "300"], "takes no other option than --out"),
        (["--config", AB, "--peak-tflops", "300"], "--peak-tflops is for GPUs"),
        (["--from", "absent.jsonl"], "absent.jsonl: no such file"),
    ],
)
def test_wrong_input_is_one_line(arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    done = CliRunner().invoke(app, ["compare", *arguments])
    assert done.exit_code == 1
    assert said in done.output and done.output.count("\n") == 1
