"""One clear error on every rank, nothing half loaded, nothing lost."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from deepspeed_amsp.checkpoint import folder as folders
from deepspeed_amsp.checkpoint.manifest import read_manifest
from deepspeed_amsp.checkpoint.together import CheckpointError
from tests.checkpoint import runs
from tests.checkpoint.runs import Held, Net, Spec, held_by, make_engine, train_step
from tests.support.pool import RankError, pool

WRITER = Spec(2, 2, "zero1")
READER = Spec(2, 1, "zero3")


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good")
    pool(2).run(save, WRITER, str(folder))
    return folder


def save(spec: Spec, folder: str, tag: str | None = "here", **kwargs: Any) -> list[str]:
    engine = make_engine(spec)
    train_step(engine, 0)
    engine.save_checkpoint(folder, tag, **kwargs)
    engine.destroy()
    return sorted(os.listdir(folder))


def flat(held: Held) -> dict[str, torch.Tensor]:
    """Everything of it that a load may change."""
    pieces = {f"{piece} {key}": value for piece, values in held.pieces.items() for key, value in values.items()}
    return {**pieces, **held.working, **{f"buffer {name}": value for name, value in held.buffers.items()}}


def refused_load(spec: Spec, folder: str, tag: str | None = "here", **kwargs: Any) -> str:
    """The error; nothing in the engine may have changed, and it must still train."""
    return refused_loads(spec, [folder], tag, **kwargs)[0]


def refused_loads(spec: Spec, folders: list[str], tag: str | None = "here", **kwargs: Any) -> list[str]:
    """The same for one engine that tries each folder."""
    engine = make_engine(spec, seed=99)
    train_step(engine, 50)
    before, steps = held_by(engine), engine.global_steps
    texts = []
    for folder in folders:
        with pytest.raises(RuntimeError) as caught:
            engine.load_checkpoint(folder, tag, **kwargs)
        assert type(caught.value).__name__ == "CheckpointError"
        texts.append(str(caught.value))
        after = held_by(engine)
        assert flat(before).keys() == flat(after).keys() and before.groups == after.groups
        assert steps == engine.global_steps
        for name, value in flat(before).items():
            assert torch.equal(value, flat(after)[name]), name
    train_step(engine, 51)
    engine.destroy()
    return texts


def everywhere(*words: str, texts: list[str]) -> None:
    for text in texts:
        assert all(word in text for word in words), text


def copied(good: Path, tmp_path: Path) -> Path:
    shutil.copytree(good, tmp_path / "copy")
    return tmp_path / "copy"


def _largest(folder: Path) -> Path:
    return max((folder / "here").glob("*.distcp"), key=lambda path: path.stat().st_size)


def _cut(folder: Path) -> None:
    path = _largest(folder)
    path.write_bytes(path.read_bytes()[:-100])


def _flip(name: str | None = None) -> Callable[[Path], None]:
    def flip(folder: Path) -> None:
        path = folder / "here" / name if name else _largest(folder)
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(bytes(content))

    return flip


def _remove(folder: Path) -> None:
    _largest(folder).unlink()


def _older_format(folder: Path) -> None:
    path = folder / "here" / "amsp_checkpoint.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 1}))


DAMAGE: dict[str, tuple[Callable[[Path], None], tuple[str, ...]]] = {
    "truncated": (_cut, ("bytes instead of", "cut short", ".distcp")),
    "flipped": (_flip(), ("damaged", "checksum", ".distcp")),
    "flipped state": (_flip("amsp_state.pt"), ("damaged", "amsp_state.pt")),
    "flipped index": (_flip(".metadata"), ("damaged", ".metadata")),
    "flipped manifest": (_flip("amsp_checkpoint.json"), ("amsp_checkpoint.json", "damaged")),
    "removed": (_remove, ("is missing", ".distcp")),
    "format": (_older_format, ("has format 1",)),
}


def test_damage(good: Path, tmp_path: Path) -> None:
    for name, (damage, _) in DAMAGE.items():
        shutil.copytree(good, tmp_path / name)
        damage(tmp_path / name)
    by_rank = pool(2).run(refused_loads, READER, [str(tmp_path / name) for name in DAMAGE])
    for number, (_, words) in enumerate(DAMAGE.values()):
        everywhere(*words, texts=[texts[number] for texts in by_rank])


def test_every_byte_is_protected(good: Path, tmp_path: Path) -> None:
    """Wherever one bit of any file is flipped, the files no longer pass."""
    folder = copied(good, tmp_path) / "here"
    generator = torch.Generator().manual_seed(3)
    for path in sorted(folder.iterdir()):
        content = path.read_bytes()
        for _ in range(10):
            at = int(torch.randint(len(content), (1,), generator=generator))
            path.write_bytes(content[:at] + bytes([content[at] ^ 16]) + content[at + 1 :])
            with pytest.raises(CheckpointError):
                _check(folder)
        path.write_bytes(content)
    _check(folder)


def _check(folder: Path) -> None:
    for name, info in read_manifest(folder).files.items():
        folders.check_file(folder / name, info)


class Wider(Net):
    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Linear(26, 12, bias=True)


class Narrower(Net):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(26, bias=False)
        del self.calls
        self.register_buffer("calls", torch.tensor(0), persistent=False)


class Reshaped(Net):
    def __init__(self) -> None:
        super().__init__()
        self.fixed = nn.Linear(26, 26, bias=False).requires_grad_(False)
        self.second = nn.Linear(13, 24, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.head(self.second(self.first(self.embed(tokens))[..., :13])[..., :12] * self.scale)


def with_model(model: type[nn.Module], job: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with mock.patch.object(runs, "Net", model):
        return job(*args, **kwargs)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (Wider, ("of another model", "missing in the checkpoint: second.bias")),
        (Narrower, ("of another model", "not in this model: calls, norm.bias")),
        (Reshaped, ("second.weight has shape (24, 13) here and (12, 26) there", "not in this model")),
    ],
    ids=["missing", "extra", "shape"],
)
def test_another_model(model: type[nn.Module], words: tuple[str, ...], good: Path) -> None:
    everywhere(*words, texts=pool(2).run(with_model, model, refused_load, READER, str(good)))


def _loose(spec: Spec, folder: str) -> tuple[list[str], int]:
    engine = make_engine(spec, seed=99)
    before = flat(held_by(engine))
    engine.load_checkpoint(folder, "here", load_module_strict=False)
    after = flat(held_by(engine))
    same = [name for name, value in before.items() if name in after and torch.equal(value, after[name])]
    train_step(engine, 51)
    engine.destroy()
    return [name for name in same if not name.startswith("(")], engine.global_steps


def test_what_fits_is_loaded_when_not_strict(good: Path) -> None:
    for kept, steps in pool(2).run(with_model, Wider, _loose, READER, str(good)):
        assert kept == ["second.bias"] and steps == 2


def _refusing_scheduler(spec: Spec, folder: str) -> str:
    """One that has begun to change itself and the rates when it refuses, and on one rank only."""
    plain = torch.optim.lr_scheduler.StepLR.load_state_dict

    def refuse(self: Any, state: Any) -> None:
        plain(self, state)
        self.last_epoch = 1000
        self.optimizer.param_groups[0]["lr"] = 123.0
        if dist.get_rank() == 1:
            raise ValueError("this schedule is another")

    engine = make_engine(spec, seed=99)
    train_step(engine, 50)
    before, schedule = held_by(engine), dict(vars(engine.lr_scheduler))
    with (
        mock.patch.object(torch.optim.lr_scheduler.StepLR, "load_state_dict", refuse),
        pytest.raises(RuntimeError) as caught,
    ):
        engine.load_checkpoint(folder, "here")
    after = held_by(engine)
    assert before.groups == after.groups and flat(before).keys() == flat(after).keys()
    assert all(torch.equal(value, flat(after)[name]) for name, value in flat(before).items())
    assert vars(engine.lr_scheduler) == schedule and engine.global_steps == 1
    train_step(engine, 51)
    engine.destroy()
    return str(caught.value)


@pytest.mark.parametrize("spec", [WRITER, READER], ids=str)
def test_a_scheduler_that_refuses_its_state(spec: Spec, good: Path) -> None:
    everywhere(
        "rank 1", "ValueError: this schedule is another", texts=pool(2).run(_refusing_scheduler, spec, str(good))
    )


def _failing_custom(spec: Spec, folder: str) -> str:
    def half(src: dict[str, torch.Tensor], dst: nn.Module) -> None:
        with torch.no_grad():
            for name, param in dst.named_parameters():
                param.copy_(src[name])
            dst.get_buffer("calls").fill_(1000)
        if dist.get_rank() == 1:
            raise KeyError("no such layer")

    return refused_load(spec, folder, custom_load_fn=half)


@pytest.mark.parametrize("spec", [WRITER, WRITER.but(bf16=True)], ids=str)
def test_a_custom_load_fn_that_fails_half_way(spec: Spec, good: Path) -> None:
    everywhere("rank 1", "KeyError: 'no such layer'", texts=pool(2).run(_failing_custom, spec, str(good)))


def test_groups_that_were_mixed_are_refused(good: Path) -> None:
    texts = pool(2).run(_regrouped, READER, str(good))
    everywhere("param_groups[0]", "different groups", "load_optimizer_states=False", texts=texts)


def _regrouped(spec: Spec, folder: str) -> str:
    with mock.patch.object(runs, "groups_of", lambda model: [{"params": list(model.parameters())}]):
        return refused_load(spec, folder)


def test_there_is_none(good: Path, tmp_path: Path) -> None:
    everywhere("no such checkpoint", str(good / "there"), texts=pool(2).run(refused_load, READER, str(good), "there"))
    (tmp_path / "old").mkdir()
    texts = pool(2).run(refused_load, READER, str(tmp_path), "old")
    everywhere("holds no amsp_checkpoint.json", texts=texts)
    (tmp_path / "latest").write_text("gone")
    everywhere("no such checkpoint", "gone", texts=pool(2).run(refused_load, READER, str(tmp_path), None))


def test_an_incomplete_folder_is_known_by_its_name(good: Path, tmp_path: Path) -> None:
    folder = copied(good, tmp_path)
    (folder / "here").rename(folder / "here.incomplete")
    texts = pool(2).run(refused_load, READER, str(folder))
    everywhere("here.incomplete", "interrupted", texts=texts)
    texts = pool(2).run(refused_load, READER, str(folder), "here.incomplete")
    everywhere("no ending for a tag", texts=texts)


# ---- saves that cannot be ----------------------------------------------------------------------------------


def refused_save(spec: Spec, folder: str, **kwargs: Any) -> str:
    engine = make_engine(spec)
    train_step(engine, 0)
    with pytest.raises(RuntimeError) as caught:
        engine.save_checkpoint(folder, "here", **kwargs)
    train_step(engine, 1)
    engine.destroy()
    assert type(caught.value).__name__ == "CheckpointError"
    return str(caught.value)


def _tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    texts = pool(2).run(refused_save, WRITER, str(tmp_path / "file"))
    everywhere("save_checkpoint to", "rank 0", "NotADirectoryError", texts=texts)


def _full_disk(spec: Spec, folder: str, rank: int, name: str) -> str:
    """Writing a file whose name has ``name`` in it fails on ``rank``."""
    from torch.distributed.checkpoint import filesystem

    plain = filesystem.FileSystem.create_stream
    real_open = Path.open

    def full(path: object) -> bool:
        return dist.get_rank() == rank and name in str(path)

    def create_stream(self: Any, path: Any, mode: str) -> Any:
        if full(path) and "w" in mode:
            raise OSError(28, "No space left on device", str(path))
        return plain(self, path, mode)

    def open_path(self: Path, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if full(self) and "w" in mode:
            raise OSError(28, "No space left on device", str(self))
        return real_open(self, mode, *args, **kwargs)

    with (
        mock.patch.object(filesystem.FileSystem, "create_stream", create_stream),
        mock.patch.object(Path, "open", open_path),
    ):
        return refused_save(spec, folder)


@pytest.mark.parametrize(("rank", "name"), [(1, ".distcp"), (0, "amsp_state.pt"), (0, "amsp_checkpoint.json")])
def test_a_full_disk(rank: int, name: str, good: Path, tmp_path: Path) -> None:
    """The checkpoint of the same tag that is there stays, byte for byte, and nothing beside it."""
    folder = copied(good, tmp_path)
    before = _tree(folder)
    texts = pool(2).run(_full_disk, WRITER, str(folder), rank, name)
    everywhere("No space left on device", f"rank {rank}", texts=texts)
    assert _tree(folder) == before


def test_a_state_that_cannot_be_pickled(tmp_path: Path) -> None:
    texts = pool(2).run(_unpicklable, WRITER, str(tmp_path))
    everywhere("rank 0", "pickle", texts=texts)
    assert _tree(tmp_path) == {}


def _unpicklable(spec: Spec, folder: str) -> str:
    return refused_save(spec, folder, client_state={"a": lambda: None})


def _save_to_own_folder(spec: Spec, folder: str) -> str:
    return refused_save(spec, f"{folder}/node{dist.get_rank()}")


def test_folders_that_are_not_shared(tmp_path: Path) -> None:
    """Node-local ones, as of DeepSpeed's use_node_local_storage, are refused; nothing is left in them."""
    texts = pool(2).run(_save_to_own_folder, WRITER, str(tmp_path))
    everywhere("rank 1", "node1/here.incomplete", "the folder must be one that all hosts share", texts=texts)
    assert _tree(tmp_path) == {}


def _scheduler_that_fails(spec: Spec, folder: str) -> str:
    def fail(self: Any) -> Any:
        raise KeyError("a schedule without a state")

    with mock.patch.object(torch.optim.lr_scheduler.StepLR, "state_dict", fail):
        return refused_save(spec, folder)


def test_a_scheduler_that_tells_no_state(tmp_path: Path) -> None:
    """Only rank 0 asks it; the others hear of the failure and do not wait for rank 0."""
    texts = pool(2).run(_scheduler_that_fails, WRITER, str(tmp_path), timeout=30)
    everywhere("rank 0", "KeyError: 'a schedule without a state'", texts=texts)
    assert _tree(tmp_path) == {}


def _only_rank_0(spec: Spec, folder: str, note: str) -> None:
    engine = make_engine(spec)
    train_step(engine, 0)
    if dist.get_rank() != 0:
        return
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=2), dist.group.WORLD)
    with pytest.raises(RuntimeError) as caught:
        engine.save_checkpoint(folder)
    Path(note).write_text(str(caught.value))


def test_a_save_on_rank_0_only(tmp_path: Path, fresh_pool: Any) -> None:
    with pytest.raises(RankError):  # the default group is broken afterwards, which the pool notices
        fresh_pool(2).run(_only_rank_0, WRITER, str(tmp_path / "folder"), str(tmp_path / "note"), timeout=30)
    text = (tmp_path / "note").read_text()
    assert "all ranks must call save_checkpoint" in text and "within the timeout" in text
    assert not (tmp_path / "folder").exists()


def _load_own_folder(spec: Spec, folder: str) -> str:
    return refused_load(spec, f"{folder}/node{dist.get_rank()}")


def test_ranks_that_find_different_checkpoints(good: Path, tmp_path: Path) -> None:
    """Each is whole: node-local folders with another run's, or a save that takes the place of one while it is read."""
    shutil.copytree(good, tmp_path / "node0")
    pool(2).run(save, WRITER, str(tmp_path / "node1"))
    texts = pool(2).run(_load_own_folder, READER, str(tmp_path))
    everywhere("ranks found different checkpoints", "one that all hosts share", texts=texts)


def _16bit_to_a_file(spec: Spec, folder: str) -> str:
    engine = make_engine(spec)
    with pytest.raises(RuntimeError) as caught:
        engine.save_16bit_model(folder)
    train_step(engine, 0)
    engine.destroy()
    return str(caught.value)


def test_16bit_weights_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    texts = pool(2).run(_16bit_to_a_file, WRITER, str(tmp_path / "file"))
    everywhere("save_16bit_model failed: rank 0", "FileExistsError", texts=texts)


def _16bit_without_gathering(spec: Spec, folder: str) -> str:
    stage3 = {"zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": False}}
    engine = make_engine(spec.but(extra=stage3))
    with pytest.raises(ValueError, match="save_16bit_model") as caught:
        engine.save_16bit_model(folder)
    train_step(engine, 0)
    engine.destroy()
    return str(caught.value)


def test_16bit_weights_that_may_not_be_gathered(tmp_path: Path) -> None:
    """Case F9: an error, where DeepSpeed writes nothing and returns False."""
    texts = pool(2).run(_16bit_without_gathering, READER, str(tmp_path))
    everywhere("stage3_gather_16bit_weights_on_model_save is false", "Set it to true", texts=texts)
    assert not list(tmp_path.iterdir())


# ---- tags --------------------------------------------------------------------------------------------------


def _tagged(spec: Spec, folder: str, mode: str) -> str:
    engine = make_engine(spec.but(extra={"checkpoint": {"tag_validation": mode}}))
    train_step(engine, 0)
    error = ""
    try:
        engine.save_checkpoint(folder, f"rank{dist.get_rank()}")
    except AssertionError as caught:
        error = str(caught)
    engine.destroy()
    return error


def test_tags_that_differ_between_ranks(tmp_path: Path) -> None:
    words = "is not consistent across all ranks: rank 0: 'rank0', rank 1: 'rank1'"
    everywhere(words, texts=pool(2).run(_tagged, WRITER, str(tmp_path), "Fail"))
    assert not list(tmp_path.iterdir())
    assert pool(2).run(_tagged, WRITER, str(tmp_path), "Ignore") == ["", ""]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "rank0", "zero_to_fp32.py"]


def test_names_and_latest(tmp_path: Path) -> None:
    assert pool(2).run(save, WRITER, str(tmp_path), None)[0] == ["global_step1", "latest", "zero_to_fp32.py"]
    assert (tmp_path / "latest").read_text() == "global_step1"
    assert pool(2).run(save, WRITER, str(tmp_path), 17)[0] == ["17", "global_step1", "latest", "zero_to_fp32.py"]
    names = pool(2).run(save, WRITER, str(tmp_path), "z", save_latest=False)[0]
    assert names == ["17", "global_step1", "latest", "z", "zero_to_fp32.py"]
    assert (tmp_path / "latest").read_text() == "17"
