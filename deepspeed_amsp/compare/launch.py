"""Starting the ranks of one run, and ending all of them when one fails."""

from __future__ import annotations

import os
import random
import selectors
import signal
import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

OnLine = Callable[[int, str], None]
OnTurn = Callable[[], None]

PORTS = range(20001, 32768)
"""Below the ephemeral ports, which the kernel hands out, and from which gloo takes its own."""
GRACE_S = 1.0
"""How long the others may go on once a rank has failed: the one that we see first may not have been the first."""
KEPT_LINES = 400
_TRACEBACK = "Traceback (most recent call last)"


class RankFailed(RuntimeError):
    """A run did not succeed. ``rank``: the first that failed, None when time was up for all.

    The message has what that rank printed from its first traceback on (else its last lines), and how the
    other ranks ended.
    """

    def __init__(self, rank: int | None, message: str) -> None:
        self.rank = rank
        super().__init__(message)


@dataclass(frozen=True)
class RankCommand:
    """What a rank executes, with its whole environment."""

    command: Sequence[str]
    env: Mapping[str, str]


@dataclass
class _Rank:
    """A started rank: its output, when its first traceback came, how it ended (by os.waitid)."""

    number: int
    process: subprocess.Popen[bytes]
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=KEPT_LINES))
    rest: bytes = b""
    traceback_at: float | None = None
    traceback: list[str] = field(default_factory=list)
    status: int | None = None
    ended_at: float = 0.0

    @property
    def failed(self) -> bool:
        return self.status not in (None, 0)

    def take(self, data: bytes, on_line: OnLine | None) -> None:
        *whole, self.rest = (self.rest + data).split(b"\n")
        for raw in whole:
            line = raw.decode(errors="replace")
            if self.traceback_at is None and _TRACEBACK in line:
                self.traceback_at = time.monotonic()
            if self.traceback_at is not None and len(self.traceback) < KEPT_LINES:
                self.traceback.append(line)
            self.lines.append(line)
            if on_line is not None:
                on_line(self.number, line)

    def look(self) -> None:
        """See whether it has ended, without reaping it: until then nobody else can get its process group's id."""
        if self.status is None:
            info = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if info is not None:
                self.status = info.si_status if info.si_code == os.CLD_EXITED else -info.si_status
                self.ended_at = time.monotonic()

    def how(self) -> str:
        if self.status is None:
            return "was still running"
        return f"ended with exit code {self.status}" if self.status >= 0 else f"died of signal {self.signal}"

    @property
    def signal(self) -> str:
        number = -(self.status or 0)
        with suppress(ValueError):
            return signal.Signals(number).name
        return str(number)


def free_port() -> int:
    """One for the ranks' rendezvous. It is used seconds later: an ephemeral one would be somebody's by then."""
    while True:
        port = random.SystemRandom().choice(PORTS)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def run_ranks(
    commands: Sequence[RankCommand],
    timeout_s: float,
    on_line: OnLine | None = None,
    on_turn: OnTurn | None = None,
) -> list[str]:
    """Run all commands at the same time, each in a session of its own; their last lines of output, in order.

    on_turn is called every 20 ms or so; what it raises ends the run, as does what on_line raises.

    However this function ends, by return or by any exception (a signal's, too), no rank is left, nor what
    ranks have started in their process groups.

    Raises:
        RankFailed: a rank failed, or ``timeout_s`` seconds were over.
    """
    if not timeout_s > 0:
        raise ValueError(f"timeout_s must be above 0 seconds, not {timeout_s!r}")
    ranks: list[_Rank] = []
    with selectors.DefaultSelector() as selector:
        try:
            for number, command in enumerate(commands):
                with undisturbed():  # else a signal between start and entry in the list would lose a rank
                    ranks.append(_start(number, command))
                stdout = ranks[-1].process.stdout
                assert stdout is not None
                os.set_blocking(stdout.fileno(), False)
                selector.register(stdout, selectors.EVENT_READ, ranks[-1])
            late = _watch(ranks, selector, timeout_s, on_line, on_turn or (lambda: None))
        finally:
            _end(ranks)
    if late or any(rank.failed for rank in ranks):
        raise _failure(ranks, timeout_s)
    return ["\n".join(rank.lines) for rank in ranks]


def _start(number: int, command: RankCommand) -> _Rank:
    process = subprocess.Popen(
        list(command.command),
        env=dict(command.env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    return _Rank(number, process)


def _watch(
    ranks: Sequence[_Rank],
    selector: selectors.BaseSelector,
    timeout_s: float,
    on_line: OnLine | None,
    on_turn: OnTurn,
) -> bool:
    """Read output until all ranks have ended, one failed, or time is up; True for the last."""
    deadline = time.monotonic() + timeout_s
    failing = False
    while time.monotonic() < deadline:
        # Reads that are ready come at once; the time only bounds how late an end is seen.
        for key, _ in selector.select(0.02):
            if not _read(key.data, on_line):
                selector.unregister(key.fileobj)
        on_turn()
        for rank in ranks:
            rank.look()
        if all(rank.status is not None for rank in ranks):
            break
        if not failing and any(rank.failed for rank in ranks):
            failing, deadline = True, min(deadline, time.monotonic() + GRACE_S)
    for rank in ranks:
        _read(rank, on_line)
    return not failing and any(rank.status is None for rank in ranks)


def _read(rank: _Rank, on_line: OnLine | None) -> bool:
    """Take what a rank has printed; False at the end of its output."""
    assert rank.process.stdout is not None
    while True:
        try:
            data = os.read(rank.process.stdout.fileno(), 1 << 16)
        except BlockingIOError:
            return True
        if not data:
            rank.take(b"\n" if rank.rest else b"", on_line)
            return False
        rank.take(data, on_line)


def _end(ranks: Sequence[_Rank]) -> None:
    """Kill what still runs, process group by process group, then reap."""
    with undisturbed():
        for rank in ranks:
            rank.look()
            with suppress(ProcessLookupError):
                os.killpg(rank.process.pid, signal.SIGKILL)
        for rank in ranks:
            rank.process.wait()
            if rank.process.stdout is not None:
                rank.process.stdout.close()


@contextmanager
def undisturbed() -> Iterator[None]:
    """SIGINT and SIGTERM that come meanwhile are delivered afterwards: they must not leave half of it undone.

    Handlers rather than a signal mask: a mask is a thread's, and children would inherit it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread runs Python's handlers
        return
    came: list[int] = []
    before = {
        number: signal.signal(number, lambda number, frame: came.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
        if signal.getsignal(number) not in (None, signal.SIG_IGN)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for late in came:
            signal.raise_signal(late)


def _failure(ranks: Sequence[_Rank], timeout_s: float) -> RankFailed:
    failed = [rank for rank in ranks if rank.failed]
    # The first traceback is the cause; ranks that lost their partner print theirs later.
    failed.sort(key=lambda rank: (rank.traceback_at is None, rank.traceback_at or rank.ended_at))
    if not failed:
        tails = "".join(f"\n--- rank {rank.number} {rank.how()}\n" + "\n".join([*rank.lines][-5:]) for rank in ranks)
        return RankFailed(None, f"the ranks were not done after {timeout_s:g} s and have been killed{tails}")
    first = failed[0]
    story = "\n".join(first.traceback or [*first.lines][-40:])
    others = "".join(f"\nrank {rank.number} {rank.how()}" for rank in ranks if rank is not first)
    return RankFailed(first.number, f"rank {first.number} {first.how()}\n{story}{others}")
