"""The order in which units are used: recorded once, replayed for prefetching, verified every time."""

from __future__ import annotations

from deepspeed.utils import logger


class UseOrder:
    """Order of unit uses in one direction (forward or backward).

    The first pass records. Later passes follow the record; a pass that leaves it makes prefetching pause
    until the pass ends, warns once, and records itself anew. Nothing but prefetching depends on it: whoever
    needs a unit gathers it itself.
    """

    def __init__(self, direction: str, log_every_change: bool = False) -> None:
        self._direction = direction
        self._log_every_change = log_every_change
        self._record: list[int] = []
        self._current: list[int] = []
        self._following = False
        self._warned = False

    def start(self) -> None:
        """A pass begins; the one before, if it was whole or differed, becomes the record."""
        if self._current and not (self._following and len(self._current) <= len(self._record)):
            self._record = self._current
        self._current = []
        self._following = bool(self._record)

    def use(self, unit: int) -> None:
        """Unit ``unit`` is needed now."""
        position = len(self._current)
        self._current.append(unit)
        if self._following and (position >= len(self._record) or self._record[position] != unit):
            self._following = False
            if not self._warned or self._log_every_change:
                self._warned = True
                logger.warning(
                    f"amsp: the {self._direction} pass used its modules in another order than before; "
                    f"parameters are gathered on demand until the order repeats"
                )

    def upcoming(self) -> list[int]:
        """Units that follow in the record, nearest first; empty while recording or off the record."""
        return self._record[len(self._current) :] if self._following else []
