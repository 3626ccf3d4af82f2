"""What an engine exposes as ``engine.amsp``: the plan, the mesh, and reports about a running engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from deepspeed.comm.comm import comms_logger
from torch import nn

from deepspeed_amsp.about import group_lines, memory_line
from deepspeed_amsp.comm import Communicator, LogEntry
from deepspeed_amsp.data_parallel import DataParallel
from deepspeed_amsp.mesh import Mesh
from deepspeed_amsp.optimizer import AMSPOptimizer
from deepspeed_amsp.partition.accounting import Bytes
from deepspeed_amsp.partition.params import Unit
from deepspeed_amsp.plan.resolve import Plan
from deepspeed_amsp.topology import Topology
from deepspeed_amsp.trace.reading import exposed_lately
from deepspeed_amsp.trace.session import Session, requests


class Runtime:
    """One engine's plan on its cluster; ``topology`` is that of the whole run."""

    def __init__(self, plan: Plan, topology: Topology, data_parallel: DataParallel) -> None:
        self.plan = plan
        self.topology = topology
        self.data_parallel = data_parallel
        self.mesh = Mesh(
            plan.sharding,
            plan.merge_communicators,
            plan.hierarchical,
            data_parallel.orders(topology, plan.sharding),
            data_parallel.models if data_parallel.parts > 1 else (),
        )
        self.comm = Communicator()
        self.units: list[Unit] = []
        self.optimizer: AMSPOptimizer | None = None
        self._gathers_seen = (0, 0)

    def ready(self, model: nn.Module, compiled: Callable[[], bool]) -> None:
        """The engine is complete. ``compiled`` says whether torch.compile was applied by now."""
        self._model = model
        self._compiled = compiled
        for request in requests:
            request.begin(self, model, forwards=not compiled())

    def describe(self) -> list[str]:
        """The plan, its groups and what rests on this rank, a line each; gradients and activations come on top."""
        lines = [
            f"{self.plan.describe()}; {len(self.units)} units",
            *self.data_parallel.describe(),
            *group_lines(self.plan.sharding, self.mesh.order),
        ]
        if self.optimizer is not None:
            accounting = self.optimizer.accounting
            rests = {"P": accounting.parameters(), "master": accounting.masters(), "moments": accounting.moments()}
            lines.append(memory_line(self.mesh.rank, {kind: size["formula"] for kind, size in rests.items()}))
        return lines

    def memory_report(self) -> dict[str, Bytes]:
        """Bytes on this rank by "P", "G", "master" and "moments", held and by formula with true owner loads.

        G is the gradient at rest between micro-batches, measured in the first window, or, without
        accumulation, the owned gradient before the step.

        Raises:
            RuntimeError: before the first step, or without an optimizer.
        """
        if self.optimizer is None or not self.optimizer.gradient_bytes:
            raise RuntimeError("there are no gradients and states to report before the first training step")
        accounting = self.optimizer.accounting
        return {
            "P": accounting.parameters(),
            "G": dict(self.optimizer.gradient_bytes),
            "master": accounting.masters(),
            "moments": accounting.moments(),
        }

    def collectives(self) -> list[dict[str, Any]]:
        """Collectives of the last whole step that this rank took part in, by kind and purpose; bytes are whole
        messages (see `comm.LogEntry`)."""
        counts: Counter[tuple[str, str]] = Counter()
        sizes: Counter[tuple[str, str]] = Counter()
        for entry in self.comm.last_step:
            key = (entry.op, entry.purpose.value)
            counts[key] += 1
            sizes[key] += entry.bytes
        return [
            {"kind": kind, "purpose": purpose, "count": counts[kind, purpose], "bytes": sizes[kind, purpose]}
            for kind, purpose in counts
        ]

    def scalars(self) -> dict[str, float]:
        """What monitors show of the last whole step on this rank, beside DeepSpeed's own scalars.

        bytes_<purpose>: of whole messages; gather_hits: the share of gathers, since this was last asked, that had been
        issued ahead of their use; exposed_ms_<purpose>: with wall_clock_breakdown, or while a trace is recorded on the
        host's clock.
        """
        found: dict[str, float] = {}
        for row in self.collectives():
            name = f"bytes_{row['purpose']}"
            found[name] = found.get(name, 0.0) + row["bytes"]
        if self.optimizer is not None:
            now, before = self.optimizer.gather_hits, self._gathers_seen
            self._gathers_seen = now
            if now[0] > before[0]:
                found["gather_hits"] = (now[1] - before[1]) / (now[0] - before[0])
        exposed: dict[str, float] = {}
        if self.comm.breakdown is not None:
            exposed = self.comm.breakdown.last_step
        elif self.comm.recorder is not None:
            exposed = exposed_lately(self.comm.recorder)
        return found | {f"exposed_ms_{kind}": value for kind, value in exposed.items()}

    @contextmanager
    def tracing(self, path: str | Path) -> Iterator[Session]:
        """Record what runs inside the block, on all ranks, and write it to ``path`` for Perfetto (ui.perfetto.dev).

        The session's ``outcome`` is there when the block is over. The publishes of the last step show where
        they are waited for only when the block ends after the next forward. Nothing is written when it raises.

        Raises:
            RuntimeError: this engine is being traced already.
            OSError: the file cannot be written.
        """
        session = Session(self, self._model, Path(path), first=1, last=None, forwards=not self._compiled())
        try:
            yield session
        except BaseException:
            session.detach()
            raise
        session.close()

    def step_over(self) -> None:
        """``engine.step()`` is over: the end of a trace that was asked for from outside the script."""
        for request in requests:
            request.step_over(self)


def communication_logger() -> Callable[[LogEntry, float], None] | None:
    """What DeepSpeed's comms_logger is told, when it is on; it counts a shard's bytes where ranks add theirs."""
    seen = comms_logger
    if not seen.enabled:
        return None

    def tell(entry: LogEntry, milliseconds: float) -> None:
        if seen.prof_all or entry.op in seen.prof_ops:
            share = len(entry.ranks) if entry.op in ("all_gather", "reduce_scatter") else 1
            seen.append(entry.op, entry.op, milliseconds, entry.bytes // share)

    return tell
