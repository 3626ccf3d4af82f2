"""`amsp checkpoint show` and `amsp export`: without ranks, what the ranks have saved."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from typer.testing import CliRunner

from deepspeed_amsp.checkpoint import zero_to_fp32
from deepspeed_amsp.checkpoint.export import export as write
from deepspeed_amsp.checkpoint.manifest import Manifest, TensorInfo
from deepspeed_amsp.checkpoint.offline import Archive
from deepspeed_amsp.checkpoint.together import CheckpointError
from deepspeed_amsp.cli.app import app
from tests.checkpoint.runs import Spec, held_by, make_engine, make_model, train_step
from tests.support.pool import pool

SPEC = Spec(4, 2, ((2, 1), (2, 1), (2, 2)), bf16=True)
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "I8": torch.int8, "I64": torch.int64}


def _saved(folder: str) -> tuple[dict[str, torch.Tensor], dict[str, dict[str, torch.Tensor]]]:
    engine = make_engine(SPEC)
    train_step(engine, 0)
    engine.save_checkpoint(folder, "whole")
    engine.save_checkpoint(folder, "part", exclude_frozen_parameters=True, save_latest=False)
    held = held_by(engine)
    engine.destroy()
    return held  # type: ignore[return-value]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor], dict]:
    from tests.checkpoint.runs import merged

    folder = tmp_path_factory.mktemp("saved")
    held = pool(4).run(_saved, str(folder))
    return folder, {**held[0].working, **held[0].buffers}, merged(held)  # type: ignore[attr-defined]


def run(*arguments: object, code: int = 0) -> str:
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert done.exit_code == code, done.output
    return done.output


def read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    """By the format's own description, since the package may be absent."""
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    assert header.pop("__metadata__") == {"format": "pt"} and (8 + length) % 8 == 0
    found = {}
    for name, info in header.items():
        start, stop = (8 + length + at for at in info["data_offsets"])
        found[name] = torch.frombuffer(bytearray(content[start:stop]), dtype=DTYPES[info["dtype"]]).view(info["shape"])
    return found


def _expected(saved: tuple, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    _, working, states = saved
    return {
        name: states[name]["master"].to(dtype)
        if name in states
        else value.to(dtype)
        if name.startswith("fixed")
        else value
        for name, value in working.items()
    }


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("fp32", torch.float32)])
def test_safetensors(name: str, dtype: torch.dtype, saved: tuple, tmp_path: Path) -> None:
    text = run("export", saved[0], tmp_path / "out", "--dtype", name)
    assert "model.safetensors" in text
    found = read_safetensors(tmp_path / "out" / "model.safetensors")
    want = _expected(saved, dtype)
    assert found.keys() == want.keys() and "head.weight" not in found, "tied weights once"
    for key, value in want.items():
        assert found[key].dtype == value.dtype and torch.equal(found[key], value), key


def test_safetensors_own_reader(saved: tuple, tmp_path: Path) -> None:
    reader = pytest.importorskip("safetensors.torch")
    run("export", saved[0], tmp_path / "out", "--dtype", "fp32")
    found = reader.load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(found[key], value) for key, value in _expected(saved, torch.float32).items())


def test_torch_in_several_files(saved: tuple, tmp_path: Path) -> None:
    run("export", saved[0] / "whole", tmp_path, "--format", "torch", "--dtype", "fp32", "--shard-gb", 2e-6)
    index = json.loads((tmp_path / "pytorch_model.bin.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 1 and files[-1] == f"pytorch_model-{len(files):05d}-of-{len(files):05d}.bin"
    state = {}
    for name in files:
        part = torch.load(tmp_path / name, weights_only=True)
        assert all(index["weight_map"][key] == name for key in part)
        state.update(part)
    model = make_model(seed=99)
    model.load_state_dict(state)
    for key, value in _expected(saved, torch.float32).items():
        assert torch.equal(model.state_dict()[key], value), key
    assert index["metadata"]["total_size"] == sum(v.nbytes for k, v in state.items() if k != "head.weight")


def test_zero_to_fp32_script(saved: tuple, tmp_path: Path) -> None:
    """The file beside the checkpoints, run as DeepSpeed's is, by an interpreter that has nothing loaded."""
    options = [".", str(tmp_path / "out"), "--tag", "whole", "--safe_serialization", "--max_shard_size", "3KB"]
    subprocess.run(
        [sys.executable, "zero_to_fp32.py", *options],
        cwd=saved[0],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        check=True,
        timeout=60,
    )
    found = {}
    for path in (tmp_path / "out").glob("*.safetensors"):
        found.update(read_safetensors(path))
    want = _expected(saved, torch.float32)
    assert found.keys() == want.keys() and len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    assert all(torch.equal(found[key], value) for key, value in want.items())


def test_zero_to_fp32_options(saved: tuple, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, want = str(saved[0]), _expected(saved, torch.float32)
    zero_to_fp32.main([folder, str(tmp_path / "a"), "--exclude_frozen_parameters"])
    state = torch.load(tmp_path / "a" / "pytorch_model.bin", weights_only=True)
    frozen = {"fixed.weight", "fixed.bias", "codes"}
    assert state.keys() == (want.keys() | {"head.weight"}) - frozen
    state = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(folder)
    assert all(torch.equal(state[key], value) for key, value in want.items())
    assert torch.equal(state["head.weight"], want["embed.weight"])
    for options, words in (
        (["--tag", "gone"], "no such checkpoint"),
        (["--max_shard_size", "big"], "--max_shard_size must be a number with a unit"),
    ):
        with pytest.raises(SystemExit):
            zero_to_fp32.main([folder, str(tmp_path / "b"), *options])
        assert words in capsys.readouterr().err


def test_left_out_parameters_are_named(saved: tuple, tmp_path: Path) -> None:
    text = run("export", saved[0] / "part", tmp_path / "out")
    assert "3 frozen parameters are not in the checkpoint: codes, fixed.bias, fixed.weight" in text
    assert "3 frozen parameters were left out" in run("checkpoint", "show", saved[0] / "part")


def test_show(saved: tuple) -> None:
    text = run("checkpoint", "show", saved[0])
    assert "tag whole, step 1" in text and "written by 4 ranks [2, 2]: parameters [2, 1]" in text
    numel = sum(p.numel() for p in make_model().parameters() if p.requires_grad)
    for what in ("masters", "exp_avg", "exp_avg_sq"):
        line = next(line for line in text.splitlines() if line.split()[:1] == [what])
        assert line.split() == [what, "float32", "7", f"{4 * numel:,}"]
    assert "all files have their checksums" in text


def test_damage_and_wrong_folders(saved: tuple, tmp_path: Path) -> None:
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(saved[0] / "whole", copy)
    data = next(copy.glob("*.distcp"))
    data.write_bytes(data.read_bytes()[:-1])
    assert "cut short" in run("checkpoint", "show", copy, code=1)
    assert "cut short" in run("export", copy, tmp_path / "out", code=2)
    assert not (tmp_path / "out").exists()
    assert "holds neither" in run("checkpoint", "show", tmp_path, code=2)
    assert "is not empty" in run("export", saved[0], copy, code=2)
    copy.rename(tmp_path / "y.replaced")
    assert "tag whole" in run("checkpoint", "show", tmp_path / "y", code=1), "found in the moment of an exchange"
    (tmp_path / "y.replaced").rename(tmp_path / "x.incomplete")
    assert "interrupted" in run("checkpoint", "show", tmp_path / "x", code=2)
    assert "no such checkpoint" in run("checkpoint", "show", tmp_path / "gone", code=2)
    assert "interrupted" in run("checkpoint", "show", tmp_path / "x.incomplete", code=2)


@pytest.mark.parametrize("form", ["safetensors", "torch"])
def test_values_that_fp16_cannot_hold(form: str, tmp_path: Path) -> None:
    """They would be infinite in the file. 65504 is the largest value of fp16; infinities of one's own stay."""
    manifest = Manifest("t", {}, 0, {"master/big": TensorInfo((3,), "float32")}, {}, (), (), {}, {})
    values = torch.tensor([1.0, float("inf"), 7e4])
    with mock.patch.object(Archive, "read", side_effect=lambda *_: {"master/big": values.clone()}):
        with pytest.raises(CheckpointError, match=r"big has values up to 70000, and torch\.float16 ends at 65504"):
            write(Archive(tmp_path, manifest), tmp_path / "out", form, "fp16")
        assert not list((tmp_path / "out").iterdir())
        write(Archive(tmp_path, manifest), tmp_path / "out", form, "bf16")
        values[2] = 65504.0
        write(Archive(tmp_path, manifest), tmp_path / "again", form, "fp16")


def test_readers_of_what_is_no_folder_of_checkpoints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    read = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint
    for folder, tag, words in (
        (tmp_path, None, "holds neither amsp_checkpoint.json nor a file latest"),
        (tmp_path, "x", f"no such checkpoint: {tmp_path / 'x'}"),
        (tmp_path / "gone", None, f"no such checkpoint: {tmp_path / 'gone'}"),
        (tmp_path / "gone", "x", "no such checkpoint"),
    ):
        with pytest.raises(CheckpointError, match=words):
            read(str(folder), tag)
        with pytest.raises(SystemExit):
            zero_to_fp32.main([str(folder), str(tmp_path / "out"), *(["--tag", tag] if tag else [])])
        assert words in capsys.readouterr().err


def test_a_dtype_that_safetensors_does_not_know(tmp_path: Path) -> None:
    """Said before anything is written, so that the same folder can be taken for another format."""
    manifest = Manifest("t", {}, 0, {"module/turns": TensorInfo((2,), "complex64")}, {}, (), ("turns",), {}, {})
    with pytest.raises(CheckpointError, match=r"turns is torch\.complex64"):
        write(Archive(tmp_path, manifest), tmp_path / "out", "safetensors", "fp32")
    assert not (tmp_path / "out").exists()
