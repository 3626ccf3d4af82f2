"""The adversarial process group catches each kind of planted race."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.pool import WorkerPool
from tests.tooling.ops import ALL_OPS, WORLD, issue, new_group, same

Pool = Callable[[int], WorkerPool]


def caught_by(step: Callable[[], Any]) -> tuple[str, str] | None:
    """Runs ``step`` and returns the kind and text of its RaceError."""

    from tests.support import adversarial

    try:
        step()
    except adversarial.RaceError as error:
        return error.kind, str(pickle.loads(pickle.dumps(error)))
    return None


def read_before_wait(op: str) -> bool:
    """True if the sum of what a hasty reader sees is NaN."""

    import torch

    group = new_group()
    ticket, _, outputs, expected = issue(op, group)
    seen = [output.clone() for output in outputs]
    ticket.wait()
    assert all(same(output, wanted) for output, wanted in zip(outputs, expected, strict=True))
    return all(bool(torch.isnan(one.sum())) for one in seen)


def write_in_flight(op: str, side: str, value: float) -> tuple[str, str] | None:
    """Writes one element of an input or output, then waits. None where this rank has no such tensor."""
    group = new_group()
    ticket, inputs, outputs, _ = issue(op, group)
    touched = inputs if side == "input" else outputs
    if not touched:
        ticket.wait()
        return None
    touched[-1][-1] = value
    caught = caught_by(ticket.wait)
    assert caught is not None
    return caught


def free_in_flight(op: str, side: str, refill: bool) -> tuple[str, str] | None:
    """Frees the storage of an input or output, as engines do; with ``refill`` it comes back elsewhere."""

    import torch

    group = new_group()
    ticket, inputs, outputs, _ = issue(op, group)
    touched = inputs if side == "input" else outputs
    if not touched:
        ticket.wait()
        return None
    storage, content = touched[-1].untyped_storage(), touched[-1].clone()
    size, address = storage.nbytes(), storage.data_ptr()
    storage.resize_(0)
    blockers = []
    while refill and storage.nbytes() == 0:
        # One of the blockers takes the freed address, so that the refill gets another.
        blockers.append(torch.empty(size, dtype=torch.uint8))
        storage.resize_(size)
        if storage.data_ptr() == address:
            storage.resize_(0)
    if refill:
        touched[-1].copy_(content)
    caught = caught_by(ticket.wait)
    assert caught is not None
    return caught


def reuse_in_flight(first: str) -> tuple[str, str] | None:
    """Issues a second operation on a buffer that the first one owns."""

    import torch.distributed as dist

    group = new_group()
    ticket, inputs, outputs, _ = issue(first, group)
    buffer = (outputs or inputs)[0]
    caught = caught_by(lambda: dist.all_reduce(buffer[:2], group=group, async_op=True))
    ticket.wait()
    return caught


def reuse_across_groups() -> tuple[str, str] | None:
    """The gather's output is still in flight when another group reads it."""

    import torch
    import torch.distributed as dist

    groups = [new_group(), new_group()]
    flat = torch.zeros(2 * groups[0].size())
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    ticket = gather(flat, torch.ones(2), group=groups[0], async_op=True)
    outputs = [torch.zeros(2) for _ in range(groups[1].size())]
    caught = caught_by(lambda: dist.all_gather(outputs, flat[1:3], group=groups[1], async_op=True))
    ticket.wait()
    return caught


def never_wait() -> tuple[tuple[str, str] | None, list[str]]:
    """Issues two, waits for one."""

    from tests.support import adversarial

    group = new_group()
    waited, *_ = issue("all_reduce", group)
    issue("all_gather", group)
    waited.wait()
    return caught_by(adversarial.assert_all_waited), adversarial.unwaited()


def poll_until_done() -> bool:
    """A loop that polls: True if it saw completion within 0.2 s."""
    group = new_group()
    ticket, *_ = issue("all_reduce", group)
    deadline = time.monotonic() + 0.2
    while time.monotonic() < deadline and not ticket.is_completed():
        time.sleep(0.01)
    done = ticket.is_completed()
    ticket.wait()
    return done


def freed_before_issue() -> None:
    """Communicating a freed buffer is refused (it would be a segmentation fault)."""

    import torch
    import torch.distributed as dist

    group = new_group()
    value = torch.ones(4)
    value.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="is freed"):
        dist.all_reduce(value, group=group)
    with pytest.raises(ValueError, match="contiguous"):
        dist.all_reduce(torch.ones(4, 4).t()[:2], group=group)


@pytest.mark.parametrize("op", ALL_OPS)
def test_reading_before_the_wait_shows(pool: Pool, op: str) -> None:
    """As NaN, on every rank."""
    assert pool(WORLD).run(read_before_wait, op) == [True] * WORLD


@pytest.mark.parametrize("side", ["input", "output"])
@pytest.mark.parametrize("op", ALL_OPS)
def test_writing_in_flight_is_caught(pool: Pool, op: str, side: str) -> None:
    """Into an input (which others would receive) and into an output (which the delivery would undo)."""
    caught = [one for one in pool(WORLD).run(write_in_flight, op, side, 7.5) if one is not None]
    assert len(caught) == expected_count(op, side)
    for kind, text in caught:
        assert kind == "written in flight"
        assert op in text
        assert "(8,) float32" in text or "(2,) float32" in text or "(32,) float32" in text


@pytest.mark.parametrize("refill", [False, True])
@pytest.mark.parametrize("side", ["input", "output"])
@pytest.mark.parametrize("op", ALL_OPS)
def test_freeing_in_flight_is_caught(pool: Pool, op: str, side: str, refill: bool) -> None:
    """Also when the storage is back, with its content, by the time of the wait."""
    caught = [one for one in pool(WORLD).run(free_in_flight, op, side, refill) if one is not None]
    assert [kind for kind, _ in caught] == ["freed in flight"] * expected_count(op, side)


def expected_count(op: str, side: str) -> int:
    """On how many ranks ``op`` has a buffer on that side: a broadcast has one input, half of all ranks send."""
    inputs = {"broadcast": 1, "message": WORLD // 2}
    if op not in inputs:
        return WORLD
    return inputs[op] if side == "input" else WORLD - inputs[op]


@pytest.mark.parametrize("op", ALL_OPS)
def test_reusing_a_buffer_in_flight_is_caught(pool: Pool, op: str) -> None:
    """At the issue of the second operation, and no rank hangs."""
    for caught in pool(WORLD).run(reuse_in_flight, op):
        assert caught is not None
        assert caught[0] == "reused in flight"
        assert op in caught[1]
        assert "of all_reduce" in caught[1]


def test_reuse_is_seen_across_groups(pool: Pool) -> None:
    """Two groups are two queues: nothing orders them."""
    for caught in pool(WORLD).run(reuse_across_groups):
        assert caught is not None
        assert caught[0] == "reused in flight"


def test_a_missing_wait_is_listed(pool: Pool) -> None:
    """By name, and only that one."""
    for caught, left in pool(WORLD).run(never_wait):
        assert caught is not None
        assert caught[0] == "never waited"
        assert "all_gather [input (8,) float32" in caught[1]
        assert "all_reduce" not in caught[1]
        assert left == [], "reported once"


def test_polling_never_sees_completion(pool: Pool) -> None:
    """On a slow network it would not, either."""
    assert pool(WORLD).run(poll_until_done) == [False] * WORLD


def test_buffers_that_cannot_be_communicated_are_refused(pool: Pool) -> None:
    """With a message that says why."""
    pool(2).run(freed_before_issue)
