"""`deepspeed_amsp.launch` and `amsp launch`: scripts that do not import the plugin get it; bad input is one line."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from deepspeed_amsp import launch
from deepspeed_amsp.compare.launch import free_port
from deepspeed_amsp.config_preflight import ConfigError
from deepspeed_amsp.launch import Command, LaunchError, config_file, has_block, parse
from tests.cli.test_trace import run
from tests.engine.test_seam import config

SCRIPT = """
import argparse, os, sys
assert not any(name.startswith("torch") for name in sys.modules), "the script may still choose its accelerator"
os.environ["DS_ACCELERATOR"] = "cpu"
import deepspeed, torch
import helper  # next to the script
from deepspeed import initialize
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
assert __name__ == "__main__"
parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
parser.add_argument("--local_rank", type=int, default=-1)
args = parser.parse_args()
if not args.deepspeed_config:
    raise SystemExit()
model = torch.nn.Linear(4, 4)
engine, *_ = initialize(args=args, model=model, model_parameters=model.parameters())
engine.backward(engine(torch.ones(2, 4)).sum())
engine.step()
line = f"ENGINE {type(engine).__name__} {torch.distributed.get_world_size()} {args.local_rank}\\n"
sys.stdout.write(line)  # in one piece: both ranks write to one pipe
sys.stdout.flush()
torch.distributed.destroy_process_group()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A script, a module beside it, and a ds_config with a block for any number of ranks."""
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "helper.py").write_text("")
    (tmp_path / "ds.json").write_text(json.dumps(config()))
    return tmp_path


def test_two_ranks_under_deepspeeds_launcher(folder: Path) -> None:
    """`amsp launch` is `deepspeed --module deepspeed_amsp.launch`; the script knows nothing of the plugin."""
    line = [sys.executable, "-m", "deepspeed_amsp.cli", "launch", "--num_gpus", "2", "--master_port", str(free_port())]
    done = run([*line, "train.py", "--deepspeed", "--deepspeed_config", "ds.json"], folder)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    engines = sorted(line for line in done.stdout.splitlines() if line.startswith("ENGINE"))
    assert engines == ["ENGINE AMSPEngine 2 0", "ENGINE AMSPEngine 2 1"], said
    assert "deepspeed_amsp.launch:" not in said


def test_the_launchers_local_rank_goes_behind_the_script(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    assert parse(["--local_rank=1", "train.py", "--lr", "1"]) == Command("train.py", ("--local_rank=1", "--lr", "1"))
    assert parse(["-m", "package.train", "-x"]) == Command("package.train", ("-x",), module=True)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["a script"]),
        (["--lr", "1", "train.py"], ["a script", "not --lr"]),
        (["missing.py"], ["no such script", "missing.py"]),
        (["-m", "accelerate.commands.launch", "train.py"], ["accelerate launch -m deepspeed_amsp.launch train.py"]),
        (["-m", "torch.distributed.run", "train.py"], ["write the launcher first"]),
        (["/usr/bin/deepspeed", "train.py"], ["deepspeed --module deepspeed_amsp.launch train.py"]),
    ],
)
def test_command_lines_that_cannot_be_run(arguments: list[str], words: list[str]) -> None:
    with pytest.raises(LaunchError) as error:
        parse(arguments)
    assert "\n" not in str(error.value)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "env", "found"),
    [
        (["--deepspeed", "--deepspeed_config", "a.json"], {}, "a.json"),
        (["--deepspeed", "a.json", "--lr", "1"], {}, "a.json"),
        (["--deepspeed_config=a.json"], {}, "a.json"),
        (["--lr", "1", "--deepspeed"], {}, None),
        ([], {"ACCELERATE_DEEPSPEED_CONFIG_FILE": "a.json"}, "a.json"),
        ([], {"ACCELERATE_DEEPSPEED_CONFIG_FILE": "none"}, None),
    ],
)
def test_the_ds_config_of_a_command_line(arguments: list[str], env: dict[str, str], found: str | None) -> None:
    assert config_file(arguments, env) == found


def written(folder: Path, ds_config: dict[str, Any]) -> str:
    path = folder / "written.json"
    path.write_text(json.dumps(ds_config))
    return str(path)


def test_what_the_trainer_will_fill_in_is_no_error(tmp_path: Path) -> None:
    auto = {"train_micro_batch_size_per_gpu": "auto", "gradient_clipping": "auto", "bf16": {"enabled": "auto"}}
    assert has_block(written(tmp_path, config(**auto)))
    assert not has_block(written(tmp_path, config(amsp={"enabled": False})))
    assert not has_block(written(tmp_path, config(amsp=None)))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"amsp": {"sharding": "auto"}}, ["amsp.sharding", '"sharding": "search"']),
        ({"amsp": {"shardin": "zero1"}}, ["amsp.shardin", "sharding"]),
        ({"amsp": None, "amps": {"sharding": "zero1"}}, ["amps", 'did you mean "amsp"']),
        ({"zero_optimization": {"stage": 1, "zero_hpz_partition_size": 8}}, ["zero_hpz_partition_size", "set it to 1"]),
    ],
)
def test_a_wrong_block_is_found_before_the_script_starts(
    tmp_path: Path, changes: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as error:
        has_block(written(tmp_path, config(**changes)))
    for word in words:
        assert word in str(error.value)


def test_a_ds_config_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"no such file: .*missing\.json"):
        has_block(str(tmp_path / "missing.json"))


@pytest.mark.parametrize(
    ("made", "block", "words"),
    [
        ({"AMSPEngine": 1}, True, None),
        ({"AMSPEngine": 1, "DeepSpeedEngine": 1}, True, None),
        ({"DeepSpeedEngine": 1}, True, ["ds.json has an amsp block", "another config"]),
        ({"DeepSpeedEngine": 1}, False, ['no ds_config had an enabled "amsp" block', "amsp plan"]),
        ({}, True, ["no DeepSpeed engine in this process", "-m deepspeed_amsp.launch"]),
    ],
)
def test_who_asked_for_a_block_and_got_none_is_told(
    made: dict[str, int], block: bool, words: list[str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "engines_made", type(launch.engines_made)(made))
    said = launch.afterword("ds.json", block)
    if words is None:
        assert said is None
        return
    assert said is not None and "\n" not in said
    for word in words:
        assert word in said


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (["--hostfile", "hosts", "train.py"], ["no such hostfile", "hosts", "--num_gpus"]),
        (["--num_gpus", "2", "missing.py"], ["no such script", "missing.py"]),
        (["train.py", "--deepspeed_config", "missing.json"], ["no such file", "missing.json"]),
        (["--num_gpus", "2"], ["a script"]),
    ],
)
def test_amsp_launch_refuses_in_one_line(folder: Path, line: list[str], words: list[str], capfd: Any) -> None:
    from typer.testing import CliRunner

    from deepspeed_amsp.cli.app import app

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        result = CliRunner().invoke(app, ["launch", *line])
    said = result.output + (result.stderr or "")
    assert result.exit_code == 2, said
    for word in words:
        assert word in said
