"""Who writes into a folder: a lock that ends with its process, however that ends.

So two saves never mix, in one process or in several, and what an interrupted one has left is told from what is being
written.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import IO

from deepspeed_amsp.checkpoint.together import CheckpointError

LOCK = "in_use"
"""The file that is locked while its folder is written."""
_NO_LOCKS = {errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK}
"""What a file system without locks answers. Saves go on there, and nothing but their own tag's remains is removed."""


class Claim:
    """The right to write ``folder``, until `release`."""

    def __init__(self, folder: Path, file: IO[bytes]) -> None:
        self.folder = folder
        self._file = file

    def discard(self) -> None:
        """Remove the folder, as far as that is possible, and give it up.

        If it has another name by now, it stays: what is there may be another save's.
        """
        with suppress(OSError):
            if not self._file.closed and _is(self._file, self.folder / LOCK):
                _empty(self.folder)
                (self.folder / LOCK).unlink(missing_ok=True)
                self.folder.rmdir()
        self.release()

    def release(self) -> None:
        """Give it up; may be called again."""
        if not self._file.closed:
            with suppress(OSError):
                # Processes that were forked meanwhile hold the same lock.
                fcntl.flock(self._file, fcntl.LOCK_UN)
            self._file.close()


def take(folder: Path) -> Claim:
    """Make ``folder``, or take over and empty the one that an interrupted save has left.

    Raises:
        CheckpointError: another save is writing it.
        OSError: of the file system.
    """
    while True:
        with suppress(FileNotFoundError):  # another save has just given the folder its name
            _make(folder)
            claim, alive = _tried(folder)
            if alive:
                raise CheckpointError(
                    f"another save is writing {folder}: wait for it (engine.wait_for_checkpoint), or choose another tag"
                )
            if claim is not None:
                break
    _empty(folder)
    return claim


def in_use(folder: Path) -> bool:
    """Whether a live save writes ``folder``, as far as its file system knows locks."""
    if not (folder / LOCK).is_file():
        return False
    with suppress(OSError):
        claim, alive = _tried(folder, certain=True)
        if claim is not None:
            claim.release()
        return alive
    return False


def remove_abandoned(folder: Path) -> bool:
    """Remove ``folder`` if a save that is dead has left it; False if it is something else, or a live one's."""
    with suppress(OSError):
        if not any(folder.iterdir()):
            folder.rmdir()  # a save that makes it just now makes it again
        elif (folder / LOCK).is_file():
            claim, _ = _tried(folder, certain=True)
            if claim is not None:
                claim.discard()
    return not folder.exists()


def _make(folder: Path) -> None:
    """Raises FileNotFoundError: it was there, and is gone."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        if os.path.lexists(folder) and not folder.is_dir():
            raise
        raise FileNotFoundError(error.errno, error.strerror, str(folder)) from error


def _empty(folder: Path) -> None:
    """Remove all but the lock, which goes last, so that the rest of what is removed is known for what it is."""
    for path in folder.iterdir():
        if path.name != LOCK:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def _tried(folder: Path, certain: bool = False) -> tuple[Claim | None, bool]:
    """A claim, or None and whether a live save has it; neither, if the folder has gone meanwhile.

    Args:
        certain: no claim where the file system has no locks.
    """
    file = (folder / LOCK).open("ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None, True
    except OSError as error:
        if certain or error.errno not in _NO_LOCKS:
            file.close()
            raise
    with suppress(FileNotFoundError):
        if _is(file, folder / LOCK):
            return Claim(folder, file), False
    file.close()
    return None, False


def _is(file: IO[bytes], path: Path) -> bool:
    return os.path.samestat(os.fstat(file.fileno()), path.stat())
