"""Killed at any moment of a save, a run finds a checkpoint that is whole, and never older than the last completed."""

from __future__ import annotations

import errno
import os
import signal
import stat
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from deepspeed_amsp.checkpoint import folder as folders
from deepspeed_amsp.checkpoint.claim import LOCK
from deepspeed_amsp.checkpoint.together import CheckpointError
from tests.checkpoint.runs import Spec, held_by, make_engine, train_step
from tests.semantics.harness import NIGHTLY
from tests.support.pool import RankError, pool

SPEC = Spec(2, 2, "zero1")
KILLS = 50 if NIGHTLY else 4
OPERATIONS = {False: 24, True: 38}
"""About as many file operations as rank 0 makes in a save of a new tag, and in one that replaces a checkpoint."""
FEWEST = 15
"""It makes more than these in any case, so that a kill that never comes is seen."""
_WATCHED = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree"}


class _Killer:
    """Kills at the n-th operation on files of a folder, counted by the interpreter's own audit events."""

    def __init__(self, folder: str, victims: list[int], countdown: int) -> None:
        self._folder, self._victims, self._countdown = folder, victims, countdown
        self.armed = False

    def __call__(self, event: str, args: Any) -> None:
        if self.armed and event in _WATCHED and self._folder in str(args[0]):
            self._countdown -= 1
            if self._countdown == 0:
                for pid in [p for p in self._victims if p != os.getpid()] + [os.getpid()]:
                    os.kill(pid, signal.SIGKILL)


def _saves(folder: str, always: bool, background: bool, victims: list[list[int]], countdown: int) -> str:
    """Two saves that complete, and one that does not: of another tag, or of the second's (``always`` the same)."""
    engine = make_engine(SPEC.but(amsp={"checkpoint": {"async_save": background}}))
    rank = int(os.environ["RANK"])
    killer = _Killer(folder, victims[rank], countdown)
    sys.addaudithook(killer)
    for step in range(3):
        train_step(engine, step)
        killer.armed = step == 2 and bool(victims[rank])
        engine.save_checkpoint(folder, "same" if always else None, client_state={"step": step})
        engine.wait_for_checkpoint()
    killer.armed = False
    return "not killed"


def _loads(folder: str) -> tuple[int, Any]:
    engine = make_engine(SPEC, seed=99)
    path, client_state = engine.load_checkpoint(folder)
    assert path is not None
    held = held_by(engine)
    # The engine must be able to save over whatever was left behind.
    engine.save_checkpoint(folder, "same", client_state=client_state)
    engine.load_checkpoint(folder, "same")
    engine.destroy()
    return client_state["step"], held.working


def _straight() -> list[Any]:
    engine = make_engine(SPEC)
    found = []
    for step in range(3):
        train_step(engine, step)
        found.append(held_by(engine).working)
    engine.destroy()
    return found


@pytest.mark.parametrize("kill", range(KILLS))
def test_killed_in_a_save(kill: int, tmp_path: Path, fresh_pool: Any) -> None:
    """All ranks at once (the host dies), or one of them (rank 0 writes most); every third save in the background."""
    generator = torch.Generator().manual_seed(kill)
    always = bool(kill % 2)
    countdown = 1 + int(torch.randint(OPERATIONS[always], (1,), generator=generator))
    workers = fresh_pool(2)
    alone = kill % 4 == 3
    rank = 1 if kill % 8 == 7 else 0
    if rank == 1:
        countdown = 1 + countdown % 3
    victims = [[], []]  # type: list[list[int]]
    victims[rank] = [workers.pids[rank]] if alone else list(workers.pids)
    killed = False
    try:
        workers.run(_saves, str(tmp_path), always, kill % 3 == 2, victims, countdown, timeout=60)
    except RankError:
        killed = True
    assert killed or countdown > FEWEST, "a save makes more operations than that"
    straight = pool(2).run(_straight)[0]
    for step, working in pool(2).run(_loads, str(tmp_path)):
        assert step in (1, 2) if killed else step == 2
        for name, value in working.items():
            assert torch.equal(value, straight[step][name]), name
    left = {path.name for path in tmp_path.iterdir()}
    assert "same" in left and not [name for name in left if name.endswith((folders.INCOMPLETE, folders.REPLACED))]


def test_every_moment_of_an_exchange(tmp_path: Path) -> None:
    """Between the renames there is no folder of that name; the old one is found, and comes back."""
    for moment in range(4):
        at = tmp_path / str(moment)
        (at / "t").mkdir(parents=True)
        (at / "t" / "old").touch()
        (folders.begin(at, "t").folder / "new").touch()
        if moment >= 1:
            (at / "t").rename(at / "t.replaced")
        if moment >= 2:
            (at / "t.incomplete").rename(at / "t")
        if moment >= 3:
            (at / "t.replaced" / "old").unlink()  # its removal was interrupted
        found = folders.find(at, "t")
        assert [path.name for path in found.iterdir() if path.name != LOCK] == ["new" if moment >= 2 else "old"]
        folders.settle(at, "t")
        assert folders.find(at, "t") == at / "t"
        left = {path.name for path in (at / "t").iterdir()}
        assert left - {LOCK} == {"new" if moment >= 2 else "old"}
        claim = folders.begin(at, "t")
        (claim.folder / "newer").touch()
        folders.commit(claim, at, "t", latest=False)
        assert [str(path.relative_to(at)) for path in sorted(at.rglob("*"))] == ["t", "t/newer"]


def test_a_disk_that_is_full_for_latest(tmp_path: Path) -> None:
    """The checkpoint that would have been replaced, and what names it, are as they were."""
    claim = folders.begin(tmp_path, "t")
    (claim.folder / "old").touch()
    folders.commit(claim, tmp_path, "t", latest=True)
    claim = folders.begin(tmp_path, "t")
    (claim.folder / "new").touch()
    plain = Path.open

    def full(self: Path, *args: Any, **kwargs: Any) -> Any:
        if self.name.startswith("latest"):
            raise OSError(28, "No space left on device")
        return plain(self, *args, **kwargs)

    with mock.patch.object(Path, "open", full), pytest.raises(OSError, match="No space"):
        folders.commit(claim, tmp_path, "t", latest=True)
    claim.discard()
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")) == ["latest", "t", "t/old"]
    assert folders.latest(tmp_path) == "t"


def test_a_rename_that_fails(tmp_path: Path) -> None:
    """Between the two: the old one gets its name back."""
    claim = folders.begin(tmp_path, "t")
    (claim.folder / "old").touch()
    folders.commit(claim, tmp_path, "t", latest=True)
    claim = folders.begin(tmp_path, "t")
    plain = Path.rename

    def full(self: Path, target: Path) -> Path:
        if self.name == "t.incomplete":
            raise OSError(28, "No space left on device")
        return plain(self, target)

    with mock.patch.object(Path, "rename", full), pytest.raises(OSError, match="No space"):
        folders.commit(claim, tmp_path, "t", latest=True)
    claim.discard()
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")) == ["latest", "t", "t/old"]


def test_a_save_that_is_being_completed_is_left_alone(tmp_path: Path) -> None:
    """It has its name already, and `latest` and its lock have to follow: another of the tag neither begins, nor loses
    its folder when the first fails then."""
    first = folders.begin(tmp_path, "t")
    first.folder.rename(tmp_path / "t")
    with pytest.raises(CheckpointError, match="another save is completing"):
        folders.begin(tmp_path, "t")
    (tmp_path / "t.incomplete").mkdir()
    (tmp_path / "t.incomplete" / LOCK).touch()
    first.discard()
    assert (tmp_path / "t" / LOCK).exists() and (tmp_path / "t.incomplete" / LOCK).exists()
    folders.commit(folders.begin(tmp_path, "t"), tmp_path, "t", latest=False)
    assert [path.name for path in tmp_path.iterdir()] == ["t"] and not list((tmp_path / "t").iterdir())


def test_a_file_system_that_knows_less(tmp_path: Path) -> None:
    """Without locks, and without a way to make names durable: saves go on, and remove their own tag's remains only."""
    for tag in ("dead", "mine"):
        (folders.begin(tmp_path, tag).folder / "content").touch()
    fsync = os.fsync

    def only_files(handle: int) -> None:
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        fsync(handle)

    unlockable = OSError(errno.ENOLCK, "No locks available")
    with mock.patch("fcntl.flock", side_effect=unlockable), mock.patch("os.fsync", only_files):
        claim = folders.begin(tmp_path, "mine")
        assert [path.name for path in claim.folder.iterdir()] == [LOCK]
        assert folders.sweep(tmp_path, claim) == []
        folders.commit(claim, tmp_path, "mine", latest=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dead.incomplete", "latest", "mine"]


def test_what_dead_saves_have_left_is_removed(tmp_path: Path) -> None:
    """And nothing else: neither what a live one writes, nor what is not known to be a save's."""
    for tag in ("dead", "alive", "done"):
        (folders.begin(tmp_path, tag).folder / "content").touch()  # the claim ends here, as that of one that was killed
    alive = folders.begin(tmp_path, "alive")
    folders.commit(folders.begin(tmp_path, "done"), tmp_path, "done", latest=False)
    (tmp_path / "done" / folders.MANIFEST).touch()
    for other in ("done.replaced", "unknown.replaced", "yours.incomplete", "empty.incomplete"):
        (tmp_path / other).mkdir()
    (tmp_path / "yours.incomplete" / "content").touch()
    mine = folders.begin(tmp_path, "mine")
    removed = folders.sweep(tmp_path, mine)
    assert removed == ["dead.incomplete", "done.replaced", "empty.incomplete"]
    kept = ["alive.incomplete", "done", "mine.incomplete", "unknown.replaced", "yours.incomplete"]
    assert sorted(path.name for path in tmp_path.iterdir()) == kept
    with pytest.raises(CheckpointError, match=r"another save is writing .*alive\.incomplete"):
        folders.begin(tmp_path, "alive")
    alive.release()
    assert folders.sweep(tmp_path, mine) == ["alive.incomplete"]


@pytest.mark.parametrize("tag", ["latest", "zero_to_fp32.py", "", ".", "a/../..", "/a", "a/", " a", "a\n"])
def test_a_name_that_is_no_tag(tag: str, tmp_path: Path) -> None:
    """It would take the place of something else, or ``latest`` could not name it. Nothing is touched."""
    (tmp_path / "latest").write_text("good")
    with pytest.raises(CheckpointError, match="is no tag"):
        folders.begin(tmp_path, tag)
    assert [path.name for path in tmp_path.iterdir()] == ["latest"]


@pytest.mark.parametrize("tag", ["a.incomplete/b", "a.replaced/b"])
def test_a_tag_within_what_is_removed(tag: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is no ending for a tag"):
        folders.begin(tmp_path, tag)
    assert not list(tmp_path.iterdir())


def test_a_tag_that_is_a_file(tmp_path: Path) -> None:
    """A save would take its place; so with a link, whose other end is not ours."""
    (tmp_path / "notes").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path)
    for tag in ("notes", "link"):
        with pytest.raises(CheckpointError, match="is no folder"):
            folders.begin(tmp_path, tag)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "notes"]


def test_a_tag_within_another(tmp_path: Path) -> None:
    """A save replaces the folder of its tag, and must not take another checkpoint away with it."""
    folders.commit(folders.begin(tmp_path, "a/b"), tmp_path, "a/b", latest=True)
    with pytest.raises(CheckpointError, match="holds the folder b"):
        folders.begin(tmp_path, "a")
    assert folders.find(tmp_path, folders.latest(tmp_path) or "") == tmp_path / "a" / "b"
