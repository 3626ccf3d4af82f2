"""What a user hears of skipped steps: a run that skips them all trains nothing and looks healthy."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from deepspeed.utils import logger


class SkipReport:
    """One line on rank 0 for a skipped step: the first ten, then every hundredth (DeepSpeed issue 8415)."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._skipped = 0

    def report(self, overflow: bool, loss_scale: float) -> None:
        if not overflow:
            return
        self._skipped += 1
        if self._rank == 0 and (self._skipped <= 10 or self._skipped % 100 == 0):
            logger.warning(
                f"amsp: a gradient is not finite, so this step is skipped on all ranks ({self._skipped} so far, "
                f"loss scale {loss_scale:g})"
            )

    @contextmanager
    def one_line(self, overflow: bool) -> Iterator[None]:
        """Silence around DeepSpeed's loss scalers, which have an unlimited line of the same contents."""
        if not overflow:
            yield
            return
        level = logger.level
        logger.setLevel(max(level, logging.ERROR))
        try:
            yield
        finally:
            logger.setLevel(level)
