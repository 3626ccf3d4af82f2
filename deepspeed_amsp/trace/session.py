"""One trace from begin to end: who records, where the files go, when the script is stopped.

Every rank writes a file of its own, which is a whole trace; rank 0 joins those that it can see. So nothing
depends on process groups that a script may have destroyed, and no rank needs another's memory.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from deepspeed_amsp.trace.chrome import rank_events
from deepspeed_amsp.trace.clock import clock_for
from deepspeed_amsp.trace.reading import StepSummary, mean_of_ranks, read_trips, summarise
from deepspeed_amsp.trace.recorder import Recorder

if TYPE_CHECKING:
    from torch import nn

    from deepspeed_amsp.runtime import Runtime

PATIENCE_S = 60.0
"""How long rank 0 waits for the files of its own host's ranks, which are writing them, too."""
PATIENCE_OTHER_HOSTS_S = 5.0
"""And then for the others', which it only sees when the folder is shared."""


class TraceComplete(SystemExit):
    """Ends a script whose steps have been recorded. ``except Exception`` does not stop it, ``finally`` runs."""

    def __init__(self) -> None:
        super().__init__(0)


@dataclass(frozen=True)
class Member:
    """A rank that takes part: its host, the trace that it belongs to, and the Unix time of its clock's zero."""

    host: str
    token: str
    started: float


@dataclass(frozen=True)
class Outcome:
    """What came of a trace, on this rank.

    steps: summaries, on rank 0 the means over the ``joined`` ranks, else this rank's own.
    elsewhere: files of ranks that could not be joined, as "host:path".
    """

    file: Path
    steps: list[StepSummary]
    joined: int
    elsewhere: list[str] = field(default_factory=list)

    @property
    def lines(self) -> list[str]:
        return [step.line() for step in self.steps]


class Session:
    """Records an engine from now on. Made and closed by all its ranks.

    Args:
        first, last: see `Recorder`.
        forwards: record the forward of modules (not of compiled ones).
    """

    def __init__(
        self, runtime: Runtime, model: nn.Module, out: Path, first: int, last: int | None, forwards: bool
    ) -> None:
        from deepspeed_amsp.trace.modules import ModuleWatch  # it needs torch, and this file must do without

        if runtime.comm.recorder is not None:
            raise RuntimeError("this engine is being traced already; end that trace first")
        self.outcome: Outcome | None = None
        self._out = out
        self._comm = runtime.comm
        self._rank = runtime.mesh.rank
        self._plan = runtime.plan.describe()
        device = next((str(param.device.type) for unit in runtime.units for param in unit.parameters), "cpu")
        clock = clock_for(device)
        me = Member(socket.gethostname(), uuid4().hex, clock.started)
        world = runtime.mesh.world
        members = dict(zip(world.ranks, self._comm.all_gather_objects(world, me), strict=True))
        self._members: list[Member] = [members[rank] for rank in sorted(members)]
        self.recorder = Recorder(clock, first, last)
        trainable = runtime.optimizer.trainable if runtime.optimizer is not None else {}
        gradients = [(p, unit.name) for unit in runtime.units for p in unit.parameters if p in trainable]
        self._watch = ModuleWatch(self.recorder, model, gradients, forwards)
        self._comm.recorder = self.recorder

    def detach(self) -> None:
        """Stop recording."""
        self._comm.recorder = None
        self._watch.remove()

    @property
    def rank(self) -> int:
        return self._rank

    def close(self) -> Outcome:
        """Stop recording and write the files.

        Raises:
            OSError: a file cannot be written.
        """
        self.detach()
        self.outcome = self._write_files()
        return self.outcome

    def _write_files(self) -> Outcome:
        recorder = self.recorder
        recorder.close()
        recorder.clock.settle()
        trips = read_trips(recorder)
        steps = summarise(recorder, trips)
        origin = min(member.started for member in self._members)
        me = self._members[self._rank]
        events = rank_events(recorder, trips, self._rank, me.host, me.started - origin)
        mine = _document(events, self._about([me.host], steps))
        if len(self._members) == 1:
            _write(self._out, mine)
            return Outcome(self._out, steps, joined=1)
        _write(self._part(self._rank), mine)
        return self._join() if self._rank == 0 else Outcome(self._part(self._rank), steps, joined=1)

    def _join(self) -> Outcome:
        """Rank 0: one file of all that is here; the parts that went into it are removed."""
        here = [rank for rank, member in enumerate(self._members) if member.host == self._members[0].host]
        parts = self._read_parts(here, PATIENCE_S)
        others = [rank for rank in range(len(self._members)) if rank not in here]
        parts |= self._read_parts(others, PATIENCE_OTHER_HOSTS_S)
        summaries = [_summaries(part) for part in parts.values()]
        steps = mean_of_ranks(summaries)
        events = [event for rank in sorted(parts) for event in parts[rank]["traceEvents"]]
        _write(self._out, _document(events, self._about([self._members[rank].host for rank in sorted(parts)], steps)))
        for rank in parts:
            self._part(rank).unlink(missing_ok=True)
        missing = [rank for rank in range(len(self._members)) if rank not in parts]
        elsewhere = [f"{self._members[rank].host}:{self._part(rank)}" for rank in missing]
        return Outcome(self._out, steps, len(parts), elsewhere)

    def _read_parts(self, ranks: Iterable[int], patience: float) -> dict[int, dict[str, Any]]:
        """The files of ``ranks`` that are of this trace and appear in time."""
        missing, found = set(ranks), {}
        deadline = time.monotonic() + patience
        while missing:
            for rank in sorted(missing):
                part = _read(self._part(rank))
                if part is not None and part["otherData"]["token"] == self._members[0].token:
                    found[rank] = part
            missing -= set(found)
            if time.monotonic() > deadline:
                break
            if missing:
                time.sleep(0.05)
        return found

    def _part(self, rank: int) -> Path:
        return self._out.with_name(f"{self._out.stem}.rank{rank}{self._out.suffix}")

    def _about(self, hosts: Sequence[str], steps: Sequence[StepSummary]) -> dict[str, Any]:
        return {
            "plan": self._plan,
            "clock": self.recorder.clock.name,
            "hosts": sorted(set(hosts)),
            "token": self._members[0].token,
            "steps": [step.as_dict() for step in steps],
        }


@dataclass
class TraceRequest:
    """A trace that somebody outside the script asks for: of the first engine that the script makes.

    Args:
        report: told the outcome, on every rank, before the script is stopped.
    """

    steps: int
    skip: int
    out: Path
    keep_going: bool
    report: Callable[[Session, Outcome], None]
    session: Session | None = None
    done: bool = False
    engines: int = 0

    def begin(self, runtime: Runtime, model: nn.Module, forwards: bool) -> None:
        """An engine has been made."""
        self.engines += 1
        if self.engines == 1:
            self.session = Session(runtime, model, self.out, self.skip + 1, self.skip + self.steps, forwards)

    def step_over(self, runtime: Runtime) -> None:
        """``engine.step()`` is over, on all ranks alike.

        Raises:
            TraceComplete: everything has been recorded and written.
        """
        if self.session is None or self.done or self.session.recorder is not runtime.comm.recorder:
            return
        # Publishes are waited for in the next forward: one more step shows how much of them is exposed.
        one_more = runtime.plan.overlap.publish and runtime.mesh.publish.size > 1
        if self.session.recorder.step <= self.skip + self.steps + one_more:
            return
        self.finish()
        if not self.keep_going:
            if runtime.optimizer is not None:
                runtime.optimizer.wait_for_parameters()  # nothing may be in flight when a process ends
            raise TraceComplete

    def finish(self) -> None:
        """Write what has been recorded, if there is anything and nobody has done it yet."""
        if self.session is not None and not self.done:
            self.done = True
            self.report(self.session, self.session.close())


requests: list[TraceRequest] = []
"""At most one: what `amsp trace` wants of the engines that the script is going to make."""


def _document(events: list[dict[str, Any]], about: Mapping[str, Any]) -> dict[str, Any]:
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": dict(about)}


def _summaries(part: Mapping[str, Any]) -> list[StepSummary]:
    return [StepSummary(**step) for step in part["otherData"]["steps"]]


def _write(path: Path, document: Mapping[str, Any]) -> None:
    """All at once, so that who waits for the file never reads half of it."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(json.dumps(document), encoding="utf-8")
    draft.replace(path)


def _read(path: Path) -> dict[str, Any] | None:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    ours = isinstance(document, dict) and isinstance(document.get("otherData"), dict)
    return document if ours and "token" in document["otherData"] else None
