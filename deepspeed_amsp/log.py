"""DeepSpeed's log, whose level is WARNING until a ds_config says otherwise."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from deepspeed.utils import logger


@contextmanager
def start_is_shown(log_level: str | None) -> Iterator[None]:
    """Let INFO through in the block, unless ``log_level`` of the ds_config is set or a program wants less than WARNING.

    Whoever adds a block has to see that an engine obeys it: without the plugin DeepSpeed ignores it in silence.
    """
    if log_level is not None or logger.level > logging.WARNING:
        yield
        return
    doors = [logger, *logger.handlers]
    levels = [door.level for door in doors]
    for door in doors:
        door.setLevel(min(door.level, logging.INFO))
    try:
        yield
    finally:
        for door, level in zip(doors, levels, strict=True):
            door.setLevel(level)
