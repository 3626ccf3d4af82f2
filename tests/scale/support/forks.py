"""Calls in processes of their own, forked from this one once it has imported what they need."""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import pickle
import time
import warnings
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn, TypeVar

from tests.support.pool import RankError, prepare_parent
from tests.support.worker import ErrorReport

PARALLEL = 2
TIMEOUT_S = 900.0
"""Long past every budget: it is for what hangs, also beside much other work."""
Result = TypeVar("Result")


def in_a_process(fn: Callable[..., Result], *args: Any, timeout: float = TIMEOUT_S) -> Result:
    """``fn(*args)``, its value or what it raised."""
    (value,) = in_processes(fn, [args], timeout)
    if isinstance(value, BaseException):
        raise value
    return value


def in_processes(
    fn: Callable[..., Result], calls: Sequence[tuple[Any, ...]], timeout: float = TIMEOUT_S
) -> list[Result | BaseException]:
    """``fn(*args)`` for each of ``calls``, `PARALLEL` at a time; values or exceptions, by call.

    A call that takes longer than ``timeout`` seconds, or dies, gives a RankError.
    """
    prepare_parent()
    context = multiprocessing.get_context("fork")
    results: list[Any] = [None] * len(calls)
    waiting = list(enumerate(calls))[::-1]
    running: dict[Connection, tuple[int, Any, float]] = {}
    while waiting or running:
        while waiting and len(running) < PARALLEL:
            number, args = waiting.pop()
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_child, args=(theirs, fn, args), daemon=True)
            process.start()
            theirs.close()
            running[ours] = number, process, time.monotonic() + timeout
        ready = wait(list(running), timeout=max(0.0, min(end for _, _, end in running.values()) - time.monotonic()))
        for connection in list(running):
            number, process, end = running[connection]
            if connection in ready or time.monotonic() >= end:
                results[number] = _outcome(connection, connection in ready, number)
                process.kill()
                process.join()
                connection.close()
                del running[connection]
    return results


def _outcome(connection: Connection, ready: bool, number: int) -> Any:
    if not ready:
        return RankError(number, "hung", "the call took too long", "")
    try:
        value = pickle.loads(connection.recv_bytes())
    except EOFError:
        return RankError(number, "died", "the process ended without an answer", "")
    if not isinstance(value, ErrorReport):
        return value
    if value.pickled is not None:
        error = pickle.loads(value.pickled)
        if hasattr(error, "add_note"):  # Python 3.11
            error.add_note(value.traceback)
        return error
    return RankError(number, value.type_name, value.message, value.traceback)


def _child(connection: Connection, fn: Callable[..., Any], args: tuple[Any, ...]) -> NoReturn:
    import torch
    from deepspeed.utils import logger

    faulthandler.enable()
    torch.set_num_threads(1)
    logger.setLevel("ERROR")
    warnings.simplefilter("ignore")
    gc.disable()  # a call is short, and collections would touch, so copy, the pages of what was imported
    try:
        answer: Any = fn(*args)
    except BaseException as error:  # noqa: BLE001 - whatever it is, it belongs to the caller
        answer = ErrorReport.of(error)
    connection.send_bytes(pickle.dumps(answer))
    os._exit(0)  # not sys.exit: what the parent registered to run at its exit is not for a child
