"""A save that goes on while the run trains: written by a thread of each rank, which calls no collective."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from deepspeed.utils import logger

from deepspeed_amsp.checkpoint.claim import Claim
from deepspeed_amsp.checkpoint.share import Share
from deepspeed_amsp.checkpoint.together import CheckpointError, alone, together

POLL_S = 0.02
PATIENCE_S, PATIENCE_AT_EXIT_S = 1800.0, 60.0
"""How long rank 0 waits for the shares of the others, while its run goes on and after that has ended."""


class Background:
    """The thread of one rank, from its start on. It is no daemon, so that the interpreter's exit waits for it.

    ``claim`` is rank 0's on the folder.

    Rank 0's thread is over when the checkpoint is complete, the others' when they have written their share. How it
    went is learnt by `check` and `settle`, which all ranks call together.
    """

    def __init__(self, share: Share, claim: Claim | None, what: str) -> None:
        self._share, self._claim, self._what = share, claim, f"{what}, in the background,"
        self._error: Exception | None = None
        self._cancelled = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"amsp checkpoint {share.tag}", daemon=False)
        self._thread.start()

    def check(self) -> bool:
        """Whether it is over. Collective, and does not wait.

        Raises:
            CheckpointError: on every rank, if it has failed on one; what was there before is as it was.
        """
        with self._undone_on_failure():
            return not together(self._what, self._running)[0]

    def settle(self) -> None:
        """Wait until it is over. Collective; raises as `check` does."""
        rank = self._share.rank
        with self._undone_on_failure():
            # The others first: rank 0 would wait in vain for the share of one that has failed.
            together(self._what, lambda: None if rank == 0 else self._joined())
            alone(self._what, rank, self._joined)

    def _run(self) -> None:
        try:
            self._share.write()
            if self._claim is not None:
                self._wait_for_the_others()
                self._share.finish(self._claim)
        except Exception as error:  # noqa: BLE001 - whatever it was, `check` and `settle` tell it to all ranks
            self._error = error
            logger.error(f"amsp: {self._what} failed: {error}")

    def _wait_for_the_others(self) -> None:
        start, ended = time.monotonic(), None
        missing: Sequence[int] = range(self._share.world)
        while missing := self._share.missing(missing):
            now = time.monotonic()
            if ended is None and not threading.main_thread().is_alive():
                ended = now
            if now > min(start + PATIENCE_S, PATIENCE_AT_EXIT_S + (now if ended is None else ended)):
                raise CheckpointError(f"nothing came from ranks {list(missing[:4])}")
            if self._cancelled.wait(POLL_S):
                raise CheckpointError("another rank has failed")

    def _running(self) -> bool:
        alive = self._thread.is_alive()  # before the error is looked at, which comes first
        if self._error is not None:
            raise self._error
        return alive

    def _joined(self) -> None:
        self._thread.join()
        self._running()

    @contextmanager
    def _undone_on_failure(self) -> Iterator[None]:
        try:
            yield
        except CheckpointError:
            self._cancelled.set()
            self._thread.join()
            with suppress(CheckpointError):
                together(self._what, lambda: None)  # else a rank that writes still would find its folder gone
            if self._claim is not None:
                self._claim.discard()
            raise
