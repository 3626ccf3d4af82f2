"""The order in which units are used: recorded once, replayed for prefetching, verified every time."""

from __future__ import annotations

from typing import NamedTuple

from deepspeed.utils import logger


class Use(NamedTuple):
    """A unit is needed. ``recomputed``: by a forward inside the backward (activation checkpointing)."""

    unit: int
    recomputed: bool = False


class UseOrder:
    """Order of unit uses in one direction (forward or backward).

    The first pass records. Later passes follow the record; a pass that leaves it makes prefetching pause
    until the pass ends, warns once, and records itself anew. Nothing but prefetching depends on it: whoever
    needs a unit gathers it itself.
    """

    def __init__(self, direction: str, log_every_change: bool = False) -> None:
        self._direction = direction
        self._log_every_change = log_every_change
        self._record: list[Use] = []
        self._current: list[Use] = []
        self._following = False
        self._warned = False

    def start(self) -> None:
        """A pass begins; the one before, if it was whole or differed, becomes the record."""
        if self._current and not (self._following and len(self._current) <= len(self._record)):
            self._record = self._current
        self._current = []
        self._following = bool(self._record)

    def use(self, use: Use) -> None:
        """A unit is needed now."""
        position = len(self._current)
        self._current.append(use)
        if self._following and (position >= len(self._record) or self._record[position] != use):
            self._following = False
            if not self._warned or self._log_every_change:
                self._warned = True
                logger.warning(
                    f"amsp: the {self._direction} pass used its modules in another order than before; "
                    f"parameters are gathered on demand until the order repeats"
                )

    def upcoming(self) -> list[Use]:
        """What follows in the record, nearest first; empty while recording or off the record."""
        return self._record[len(self._current) :] if self._following else []

    def next_layer(self) -> list[Use]:
        """What follows until the end of the next recomputation; this one's own rest included.

        A layer's recomputation is a run of recomputed uses; its gradients are the uses up to the next run.
        """
        coming = self.upcoming()
        end, runs = 0, 0
        for position, use in enumerate(coming):
            if use.recomputed and (position > 0 and not coming[position - 1].recomputed):
                runs += 1
            if runs > 1:
                break
            if use.recomputed:
                end = position + 1
        return coming[:end]
