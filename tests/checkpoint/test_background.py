"""Saves that go on while the run trains ("checkpoint": {"async_save": true}), and random states."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import numpy
import pytest
import torch
import torch.distributed as dist

from deepspeed_amsp.checkpoint.contents import Contents
from deepspeed_amsp.checkpoint.flat import FlatTensor, Part
from deepspeed_amsp.checkpoint.folder import check_file
from deepspeed_amsp.checkpoint.share import Share
from deepspeed_amsp.checkpoint.storage import FLUSH_BYTES, write_blocks
from tests.checkpoint import runs
from tests.checkpoint.runs import Spec, held_by, make_engine, merged, train_step
from tests.checkpoint.test_bad_input import everywhere
from tests.support.pool import pool

SPEC = Spec(2, 2, "zero1", amsp={"checkpoint": {"async_save": True}})
READER = Spec(2, 1, "zero3")


def _beside_training(folder: str) -> Any:
    """A save that cannot write before it is let; two steps meanwhile; then a second save, which waits for it."""
    engine = make_engine(SPEC)
    train_step(engine, 0)
    gate, plain, running = threading.Event(), Share.write, []

    def held_back(share: Share) -> None:
        running.append(share.tag)
        assert gate.wait(30)
        assert running == [share.tag], "two saves at a time"
        plain(share)
        running.clear()

    with mock.patch.object(Share, "write", held_back):
        then = held_by(engine)
        engine.save_checkpoint(folder, "first", client_state={"position": runs.HALF})
        losses = [train_step(engine, step) for step in (1, 2)]
        dist.barrier()
        unfinished = sorted(path.name for path in Path(folder).iterdir())
        dist.barrier()
        threading.Timer(0.2, gate.set).start()
        engine.save_checkpoint(folder, "second", client_state={"position": runs.HALF})
        finished = sorted(path.name for path in Path(folder).iterdir() if not path.name.startswith("second"))
        latest = (Path(folder) / "latest").read_text()
        engine.wait_for_checkpoint()
        later = held_by(engine)
        engine.destroy()
    return then, losses, unfinished, finished, latest, later


def test_training_goes_on_while_it_is_written(tmp_path: Path) -> None:
    """What is stored is what was there when save_checkpoint was called; there is one save at a time."""
    told = pool(2).run(_beside_training, str(tmp_path))
    straight = pool(2).run(_plain_losses)
    loaded = {tag: pool(2).run(_loaded, str(tmp_path), tag) for tag in ("first", "second")}
    for _, losses, unfinished, finished, latest, _ in told:
        assert losses == straight[0][1:], "the save has disturbed the training"
        assert unfinished == ["first.incomplete"] and finished == ["first", "latest", "zero_to_fp32.py"]
        assert latest == "first"
    for tag, number in (("first", 0), ("second", 5)):
        want, found = merged([one[number] for one in told]), merged(loaded[tag])
        for name, values in want.items():
            assert all(torch.equal(value, found[name][key]) for key, value in values.items()), f"{tag}: {name}"


def _plain_losses() -> list[float]:
    engine = make_engine(SPEC)
    losses = [train_step(engine, step) for step in range(3)]
    engine.destroy()
    return losses


def _loaded(folder: str, tag: str) -> Any:
    engine = make_engine(READER, seed=99)
    engine.load_checkpoint(folder, tag)
    held = held_by(engine)
    engine.destroy()
    return held


def test_the_copy_shares_nothing_with_the_run(tmp_path: Path) -> None:
    """Also what an optimizer keeps in lists and the like, which it may change while the save goes on."""
    history, weights = [1.0], torch.ones(3)
    contents = Contents(scalars={"a": {"history": history}}, objects={"b": history})
    share = Share(tmp_path, "t", 0, 1, contents, {"c": FlatTensor(3, torch.float32, (Part(0, weights),))}, None, None)
    copy = share.own_copy()
    history.append(2.0)
    weights.zero_()
    assert copy.contents.scalars == {"a": {"history": [1.0]}} and copy.contents.objects == {"b": [1.0]}
    assert copy.blocks["c"].parts[0].values.tolist() == [1.0, 1.0, 1.0]


def _two_at_a_time(folder: str) -> tuple[str, list[str]]:
    """Another engine saves to the same folder while the first one's save cannot end."""
    first, second = make_engine(SPEC), make_engine(SPEC.but(amsp={}), seed=99)
    gate, plain = threading.Event(), Share.write

    def held_back(share: Share) -> None:
        assert share.tag != "same" or gate.wait(30)
        plain(share)

    with mock.patch.object(Share, "write", held_back):
        first.save_checkpoint(folder, "same", client_state={"position": runs.HALF})
        with pytest.raises(RuntimeError) as caught:
            second.save_checkpoint(folder, "same")
        second.save_checkpoint(folder, "other")
        gate.set()
        first.wait_for_checkpoint()
        second.save_checkpoint(folder, "same")
    for engine in (first, second):
        engine.load_checkpoint(folder, "same")
        engine.destroy()
    return str(caught.value), sorted(path.name for path in Path(folder).iterdir())


def test_two_saves_of_one_tag_never_mix(tmp_path: Path) -> None:
    for text, names in pool(2).run(_two_at_a_time, str(tmp_path)):
        everywhere("another save is writing", "same.incomplete", "wait_for_checkpoint", texts=[text])
        assert names == ["latest", "other", "same", "zero_to_fp32.py"]


def _fails_on_rank_1(folder: str) -> list[str]:
    """Saves of which one rank's share fails: told by the next step, the next save, or destroy."""
    engine = make_engine(SPEC)
    train_step(engine, 0)
    engine.save_checkpoint(folder, "good", client_state={"position": runs.HALF})
    engine.wait_for_checkpoint()
    plain, texts = Share.write, []

    def full(share: Share) -> None:
        if share.rank == 1:
            raise OSError(28, "No space left on device")
        plain(share)

    def until_it_is_told() -> None:
        for step in range(1, 100):
            train_step(engine, step)

    with mock.patch.object(Share, "write", full):
        for ask in (until_it_is_told, lambda: engine.save_checkpoint(folder, "other"), engine.destroy):
            engine.save_checkpoint(folder, "bad")
            with pytest.raises(RuntimeError) as caught:
                ask()
            texts.append(str(caught.value))
            if ask != engine.destroy:
                train_step(engine, 1)
    return texts


def test_a_failure_is_told_to_every_rank(tmp_path: Path) -> None:
    for texts in pool(2).run(_fails_on_rank_1, str(tmp_path)):
        assert len(texts) == 3
        everywhere("bad, in the background, failed", "rank 1", "No space left on device", texts=texts)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["good", "latest", "zero_to_fp32.py"]
    assert (tmp_path / "latest").read_text() == "good"
    pool(2).run(_loaded, str(tmp_path), None)


def _unpicklable(folder: str) -> str:
    engine = make_engine(SPEC)
    with pytest.raises(RuntimeError) as caught:
        engine.save_checkpoint(folder, client_state={"a": lambda: None})
    engine.destroy()
    return str(caught.value)


def test_what_cannot_be_pickled_is_found_at_once(tmp_path: Path) -> None:
    everywhere("rank 0", "pickle", texts=pool(2).run(_unpicklable, str(tmp_path)))
    assert not list(tmp_path.iterdir())


def _left_running(folder: str) -> list[bool]:
    engine = make_engine(SPEC)
    train_step(engine, 0)
    plain = Share.write

    def slowly(share: Share) -> None:
        time.sleep(0.3)
        plain(share)

    latest = Path(folder) / "latest"
    with mock.patch.object(Share, "write", slowly):
        engine.save_checkpoint(folder, "last", client_state={"position": 1})
        before = latest.exists()
        threading._shutdown()  # what the interpreter does first when it ends; the pool's workers leave without
    return [before, latest.exists()]


def test_the_end_of_the_process_waits(tmp_path: Path, fresh_pool: Any) -> None:
    """Without destroy, or anything else that waits: the interpreter ends when the checkpoint is complete."""
    before, after = fresh_pool(2).run(_left_running, str(tmp_path))[0]
    assert not before and after
    assert (tmp_path / "latest").read_text() == "last"
    pool(2).run(_loaded, str(tmp_path), "last")


def test_blocks_are_written_while_the_interpreter_ends(tmp_path: Path) -> None:
    """More than `FLUSH_BYTES`, in the moment from which thread pools refuse work: threads that run still go on."""
    values = torch.arange(2 * FLUSH_BYTES // 4, dtype=torch.float32)
    with mock.patch("concurrent.futures.thread._shutdown", True):
        _, info = write_blocks(tmp_path / "file", {"a": FlatTensor(values.numel(), values.dtype, (Part(0, values),))})
    check_file(tmp_path / "file", info)


# ---- random states -----------------------------------------------------------------------------------------


def _drawn() -> list[float]:
    return [random.random(), float(numpy.random.rand()), float(torch.rand(()))]


def _random(spec: Spec, folder: str, load: bool) -> list[float]:
    engine = make_engine(spec, seed=99 if load else 7)
    for seed in (random.seed, numpy.random.seed, torch.manual_seed):
        seed(100 * load + dist.get_rank())
    if load:
        engine.load_checkpoint(folder)
    else:
        _drawn()
        engine.save_checkpoint(folder)
    drawn = _drawn()
    engine.destroy()
    return drawn


def test_random_states_go_on_where_they_were(tmp_path: Path) -> None:
    """Rank by rank; on another number of ranks, or if nobody asked, they stay as they are."""
    asks = {"checkpoint": {"save_rng": True}}
    straight = pool(2).run(_random, Spec(2, 2, "zero1", amsp=asks), str(tmp_path), False)
    assert straight[0] != straight[1]
    assert pool(2).run(_random, Spec(2, 1, "zero3", amsp=asks), str(tmp_path), True) == straight
    unasked = pool(2).run(_random, Spec(2, 1, "zero3"), str(tmp_path), True)
    alone = pool(1).run(_random, Spec(1, 1, "ddp", amsp=asks), str(tmp_path), True)
    assert alone[0] == unasked[0] not in straight
