"""`amsp trace` from the outside: under the launcher, alone, and with bad input."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from deepspeed_amsp.compare.launch import free_port
from tests.support.pool import pool
from tests.trace.checks import load, row_names, slices

ROOT = Path(__file__).resolve().parents[2]

TRAINING = """
import argparse, os, sys
assert "deepspeed" not in sys.modules and "torch" not in sys.modules, "the script may still choose its accelerator"
os.environ["DS_ACCELERATOR"] = "cpu"
import torch, deepspeed
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
import helper  # next to the script
parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("--steps", type=int)
args = parser.parse_args()
assert __name__ == "__main__" and args.local_rank in helper.RANKS, args
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4))
config = {
    "train_micro_batch_size_per_gpu": 2, "gradient_clipping": 1.0, "zero_optimization": {"stage": 1},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}, "steps_per_print": 1000000,
    "amsp": {"sharding": "zero1"},
}
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
try:
    for step in range(args.steps):
        engine.backward(engine(torch.ones(2, 8)).sum())
        engine.step()
        print("STEP", step + 1, flush=True)
finally:
    print("CLEANED UP", flush=True)
"""


def run(command: list[str], folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    launched = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    env = {name: value for name, value in os.environ.items() if name not in launched}
    env |= {
        "PYTHONPATH": str(ROOT),
        "TORCH_EXTENSIONS_DIR": str(folder / "extensions"),
        "OMP_NUM_THREADS": "1",
    } | variables
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"
    return subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, timeout=120, check=False)


def script(folder: Path, text: str, ranks: tuple[int, ...] = (-1,)) -> Path:
    folder.joinpath("scripts").mkdir()
    folder.joinpath("scripts", "helper.py").write_text(f"RANKS = {ranks}")
    path = folder / "scripts" / "train.py"
    path.write_text(text)
    return path


@pytest.mark.slow
def test_under_the_launcher(tmp_path: Path) -> None:
    """Two ranks; the script would take 50 steps and is ended after the fourth, cleanly."""
    port = str(free_port())
    launcher = ["deepspeed", "--num_gpus", "2", "--master_port", port, "--module", "deepspeed_amsp.cli.trace"]
    options = ["--steps", "2", "--skip", "1", "--out", "t.json"]
    train = script(tmp_path, TRAINING, ranks=(0, 1))
    done = run([*launcher, *options, str(train.relative_to(tmp_path)), "--steps", "50"], tmp_path)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert done.stdout.count("STEP") == 2 * 3 and done.stdout.count("CLEANED UP") == 2, said
    lines = [line for line in done.stdout.splitlines() if line.startswith("amsp trace: ")]
    assert [line.split(":")[1] for line in lines[:2]] == [" step 2", " step 3"] and len(lines) == 3, said
    assert "2 steps of 2 ranks" in lines[2] and str(tmp_path / "t.json") in lines[2]
    document = load(tmp_path / "t.json")
    assert {pid for pid, _ in row_names(document)} == {0, 1}
    assert slices(document, 1, "publish") and slices(document, 0, "compute")


NO_ENGINE = "import sys; print('ARGS', sys.argv[1:]); sys.exit(int(sys.argv[-1]))"


@pytest.mark.parametrize(
    ("arguments", "code", "error"),
    [
        (["trace", "missing.py"], 2, "no such script: {folder}/missing.py"),
        (["trace", "--steps", "0", "{script}"], 2, "--steps must be at least 1, got 0"),
        (["trace", "--skip", "-1", "{script}"], 2, "--skip must be at least 0, got -1"),
        (["trace", "--out", "no/t.json", "{script}"], 2, "--out must be a file in a folder that exists"),
        (["trace", "{script}", "0"], 1, "made no amsp engine, so there is nothing to record"),
    ],
)
def test_bad_input_is_one_clear_error(arguments: list[str], code: int, error: str, tmp_path: Path) -> None:
    train = script(tmp_path, NO_ENGINE)
    filled = [part.format(script=train) for part in arguments]
    done = run([sys.executable, "-m", "deepspeed_amsp.cli", *filled], tmp_path)
    assert done.returncode == code, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("amsp trace: error: ") and error.format(folder=tmp_path) in line


def in_a_worker(arguments: list[str], folder: str) -> tuple[int, str]:
    """The exit code and the output of ``amsp``, where everything is imported already."""
    from deepspeed_amsp.cli.app import app
    from deepspeed_amsp.trace.session import requests

    before, said = (sys.argv, sys.path[:], os.getcwd()), io.StringIO()
    os.chdir(folder)
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            app(arguments)
    except SystemExit as end:
        return int(end.code or 0), said.getvalue()
    finally:
        sys.argv, sys.path[:] = before[:2]
        os.chdir(before[2])
        sys.modules.pop("helper", None)
        requests.clear()
    return 0, said.getvalue()


@pytest.mark.parametrize(
    ("skip", "code", "says"),
    [
        # It ends before the steps that were asked for: what there is, is written.
        ("1", 0, "amsp trace: 2 steps of 1 rank in"),
        ("3", 1, "took 3 steps, and --skip 3 leaves none of them to record"),
    ],
)
def test_a_script_that_ends_early(skip: str, code: int, says: str, tmp_path: Path) -> None:
    train = script(tmp_path, TRAINING.replace("assert", "assert True or", 1))
    command = ["trace", "--skip", skip, str(train), "--steps", "3"]
    ((ended, said),) = pool(1).run(in_a_worker, command, str(tmp_path))
    assert ended == code and says in said, said
    if code == 0:
        assert [event["name"] for event in slices(load(tmp_path / "trace.json"), 0, "step")] == ["step 2", "step 3"]


@pytest.mark.parametrize("before", [["--local_rank=1", "trace"], ["trace", "--local_rank=1"]])
def test_the_script_gets_its_arguments_and_keeps_its_exit_code(before: list[str], tmp_path: Path) -> None:
    """Where the launcher puts --local_rank depends on --module or --no_python; the script gets it first."""
    train = script(tmp_path, NO_ENGINE)
    done = run([sys.executable, "-m", "deepspeed_amsp.cli", *before, str(train), "--steps", "7", "--", "5"], tmp_path)
    assert "ARGS ['--local_rank=1', '--steps', '7', '--', '5']" in done.stdout, done.stdout + done.stderr
    assert done.returncode == 5


def test_importing_the_commands_loads_no_torch(tmp_path: Path) -> None:
    check = "import sys, deepspeed_amsp.cli.app; sys.exit(bool({'torch', 'deepspeed'} & set(sys.modules)))"
    assert run([sys.executable, "-c", check], tmp_path).returncode == 0


@pytest.mark.parametrize("first", ["deepspeed_amsp", "deepspeed_amsp.optimizer"])
def test_the_engine_is_installed_whatever_is_imported_first(first: str, tmp_path: Path) -> None:
    check = f"import {first}, deepspeed, deepspeed_amsp; assert deepspeed.DeepSpeedEngine._amsp_installed"
    done = run([sys.executable, "-c", check], tmp_path)
    assert done.returncode == 0, done.stderr
