"""All ranks or none: work whose failure on one rank is an error on every rank, with that rank's reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from deepspeed_amsp.comm import from_every_rank

T = TypeVar("T")
SHOWN = 3
"""Ranks whose reasons an error prints; the others are counted."""


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; raised on every rank, and nothing was changed."""


class TagsDiffer(CheckpointError, AssertionError):
    """Ranks named different tags; DeepSpeed raises an AssertionError."""


def together(what: str, work: Callable[[], T]) -> list[T]:
    """``work`` on every rank; returns every rank's picklable result, in rank order.

    Raises:
        CheckpointError: on every rank, if ``work`` failed on one, or if not all ranks came here within the
            timeout of the default process group.
    """
    reason, result, cause = None, None, None
    try:
        result = work()
    except Exception as error:  # noqa: BLE001 - whatever went wrong, the other ranks must hear of it
        cause = error
        reason = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
    answers = _exchanged(what, (reason, result))
    failed = {rank: text for rank, (text, _) in enumerate(answers) if text is not None}
    if failed:
        raise CheckpointError(f"{what} failed: {_reasons(failed)}") from cause
    return [value for _, value in answers]  # type: ignore[misc]  # a rank without a reason has a result


def alone(what: str, rank: int, work: Callable[[], T]) -> T:
    """``work`` on rank 0 only; every rank gets its result. Raises as `together` does."""
    # The others' None is not what is returned.
    return together(what, lambda: work() if rank == 0 else None)[0]  # type: ignore[return-value]


def _exchanged(what: str, value: T) -> list[T]:
    try:
        return from_every_rank(value)
    except RuntimeError as error:
        raise CheckpointError(f"{what} did not complete: {_not_all(error)}") from error


def _not_all(error: Exception) -> str:
    return (
        f"all ranks must call save_checkpoint and load_checkpoint, not only rank 0, and one of them did not get here "
        f"within the timeout, or has died ({error})"
    )


def _reasons(failed: dict[int, str]) -> str:
    """Each reason once, with its ranks."""
    ranks: dict[str, list[int]] = {}
    for rank, reason in sorted(failed.items()):
        ranks.setdefault(reason, []).append(rank)
    shown = [
        reason if len(on) == len(failed) > 1 else f"rank {on[0]}: {reason}"
        for reason, on in list(ranks.items())[:SHOWN]
    ]
    more = len(ranks) - SHOWN
    return "; ".join(shown) + (f"; and {more} other reasons" if more > 0 else "")
