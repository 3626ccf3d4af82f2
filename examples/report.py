"""What a run leaves behind: a progress bar, JSON lines, tables and the loss curve.

Only rank 0 writes; the other ranks take part in gathering what each of them holds and sends.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import deepspeed
import matplotlib
import torch
import torch.distributed as dist
from rich.console import Console, Group
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

matplotlib.use("Agg")  # a run may have no display
from matplotlib import pyplot

STATES = {
    "P": "P (parameters)",
    "G": "G (gradients)",
    "master": "OS (fp32 master)",
    "moments": "OS (moments)",
}
LAST_STEPS = 20  # the training loss of the table is the mean of this many last steps


# --- facts about the engine ---------------------------------------------------------------------------


@dataclass(frozen=True)
class MemoryRow:
    """Bytes of one kind of state: on rank 0, and on the rank with the most."""

    state: str
    held_rank0: int
    formula_rank0: int
    held_max: int
    formula_max: int


@dataclass(frozen=True)
class CollectiveRow:
    """Collectives of one kind and purpose in a step: on rank 0, and on the rank with the most bytes."""

    kind: str
    purpose: str
    count_rank0: int
    bytes_rank0: int
    count_max: int
    bytes_max: int


@dataclass(frozen=True)
class EngineFacts:
    """What an AMSP engine says about itself, gathered over the ranks; empty for a plain engine."""

    plan: str = ""
    memory: tuple[MemoryRow, ...] = ()
    collectives: tuple[CollectiveRow, ...] = ()


def gather_engine_facts(engine: Any) -> EngineFacts:
    """Ask every rank's engine what it holds and sends. The only place that reads `engine.amsp`.

    Every rank calls it; rank 0 gets the rows, the others an empty answer.
    """
    amsp = getattr(engine, "amsp", None)
    if amsp is None:
        return EngineFacts()
    mine = (amsp.memory_report(), amsp.collectives())
    everyone: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(mine, everyone, dst=0)
    if everyone is None:
        return EngineFacts()
    return EngineFacts(
        plan=str(amsp.plan.describe()),
        memory=_memory_rows([memory for memory, _ in everyone]),
        collectives=_collective_rows([collectives for _, collectives in everyone]),
    )


def _memory_rows(reports: Sequence[Mapping[str, Mapping[str, int]]]) -> tuple[MemoryRow, ...]:
    """One row per kind of state from the ranks' memory reports, rank 0 first."""
    return tuple(
        MemoryRow(
            state=label,
            held_rank0=reports[0][key]["held"],
            formula_rank0=reports[0][key]["formula"],
            held_max=max(report[key]["held"] for report in reports),
            formula_max=max(report[key]["formula"] for report in reports),
        )
        for key, label in STATES.items()
    )


def _collective_rows(reports: Sequence[Sequence[Mapping[str, Any]]]) -> tuple[CollectiveRow, ...]:
    """One row per (purpose, kind) from the ranks' lists of collectives, rank 0 first."""
    totals = [_totals(report) for report in reports]
    keys = sorted({key for ranks_totals in totals for key in ranks_totals})
    rows = []
    for purpose, kind in keys:
        per_rank = [ranks_totals.get((purpose, kind), (0, 0)) for ranks_totals in totals]
        count_max, bytes_max = max(per_rank, key=lambda pair: pair[1])
        rows.append(CollectiveRow(kind, purpose, *per_rank[0], count_max, bytes_max))
    return tuple(rows)


def _totals(report: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str], tuple[int, int]]:
    """(purpose, kind) -> (count, bytes) of one rank; rows of the same pair are added up."""
    totals: dict[tuple[str, str], tuple[int, int]] = {}
    for row in report:
        key = (str(row["purpose"]), str(row["kind"]))
        count, size = totals.get(key, (0, 0))
        totals[key] = (count + int(row["count"]), size + int(row["bytes"]))
    return totals


# --- the run as it goes -------------------------------------------------------------------------------


@dataclass
class History:
    """The numbers of a run, step by step."""

    steps: list[dict[str, float]] = field(default_factory=list)
    validation: list[tuple[int, float]] = field(default_factory=list)

    def training_loss(self) -> float:
        """The mean loss of the last steps: one step's loss is that of a few windows."""
        losses = [row["loss"] for row in self.steps[-LAST_STEPS:]]
        return sum(losses) / max(len(losses), 1)

    def tokens_per_second(self) -> float:
        """Tokens of the whole run over its time in training steps; the first step, a warm-up, not counted."""
        timed = self.steps[1:] or self.steps
        seconds = sum(row["seconds"] for row in timed)
        return sum(row["tokens"] for row in timed) / seconds if seconds else 0.0


class Monitor:
    """Shows and records a run: a progress bar on a terminal, a line now and then elsewhere."""

    def __init__(self, folder: Path, steps: int, writes: bool) -> None:
        """Only the rank with `writes` shows and writes; the others keep the history."""
        self.history = History()
        self.folder = folder
        self.writes = writes
        self._steps = steps
        self._console = Console(quiet=not writes)
        columns = [TextColumn("step"), MofNCompleteColumn(), BarColumn(bar_width=12), TimeRemainingColumn()]
        self._progress = Progress(
            *columns,
            TextColumn("{task.fields[facts]}"),
            console=self._console,
            disable=not (writes and self._console.is_terminal),
        )
        self._task = self._progress.add_task("train", total=steps, facts="")
        if writes:
            folder.mkdir(parents=True, exist_ok=True)
            self._lines = (folder / "metrics.jsonl").open("w", encoding="utf-8", buffering=1)

    def __enter__(self) -> Monitor:
        """Start the bar."""
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop the bar and close the file, whatever happened."""
        self._progress.stop()
        if self.writes:
            self._lines.close()

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        self._progress.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def step(self, step: int, loss: float, lr: float, tokens: int, seconds: float, elapsed: float) -> None:
        """Record one optimizer step: `seconds` for itself, `elapsed` since training began."""
        speed = tokens / seconds
        self.history.steps.append({"step": step, "loss": loss, "tokens": tokens, "seconds": seconds})
        facts = f"loss {loss:.3f}  lr {lr:.2e}  {speed:,.0f} tokens/s"
        self._progress.update(self._task, completed=step, facts=facts)
        row = {"step": step, "loss": loss, "lr": lr, "tokens_per_s": speed, "elapsed": elapsed}
        self._record(row)
        # Without a terminal the bar would be invisible: a line every tenth of the run instead.
        if not self._console.is_terminal and (step == 1 or step % max(self._steps // 10, 1) == 0):
            self.say(f"step {step}/{self._steps}  {facts}")

    def validated(self, step: int, loss: float) -> None:
        """Record a validation loss."""
        self.history.validation.append((step, loss))
        self._record({"step": step, "validation_loss": loss})
        self.say(f"step {step}/{self._steps}  validation loss {loss:.3f}")

    def _record(self, row: Mapping[str, float]) -> None:
        """One JSON line; the file is line-buffered, so that a run can be followed."""
        if self.writes:
            self._lines.write(json.dumps(row) + "\n")


# --- the end of the run -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Summary:
    """The result of a run, as summary.json holds it."""

    config: str
    engine: str
    world_size: int
    parameters: int
    steps: int
    training_loss: float
    validation_loss: float
    byte_frequency_loss: float
    tokens_per_second: float
    seconds: float
    facts: EngineFacts
    torch: str = torch.__version__
    deepspeed: str = deepspeed.__version__
    python: str = platform.python_version()


def finish(folder: Path, summary: Summary, history: History) -> None:
    """Print the tables and write summary.json, table.txt and loss.png."""
    tables = Group(*_tables(summary))
    Console(width=100).print(tables)
    with (folder / "table.txt").open("w", encoding="utf-8") as file:
        Console(file=file, width=100).print(tables)
    (folder / "summary.json").write_text(json.dumps(asdict(summary), indent=2) + "\n", encoding="utf-8")
    draw_losses(folder / "loss.png", summary, history)


def _tables(summary: Summary) -> list[Table | Text]:
    """The tables that apply: the losses always, plan, memory and collectives for an AMSP engine."""
    tables: list[Table | Text] = [_result_table(summary)]
    if summary.facts.plan:
        tables.append(Text(f"plan: {summary.facts.plan}\n"))
    if summary.facts.memory:
        tables.append(_memory_table(summary.facts.memory))
    if summary.facts.collectives:
        tables.append(_collective_table(summary.facts.collectives))
    return tables


def _result_table(summary: Summary) -> Table:
    """Losses beside the byte-frequency model's, and the speed."""
    title = f"{summary.engine}, {summary.world_size} ranks, {summary.parameters:,} parameters"
    table = Table(title=title, title_justify="left")
    table.add_column("")
    table.add_column("loss (nats per byte)", justify="right")
    table.add_row("byte-frequency model, validation text", f"{summary.byte_frequency_loss:.3f}")
    table.add_row(f"training, mean of the last {LAST_STEPS} steps", f"{summary.training_loss:.3f}")
    table.add_row("validation", f"{summary.validation_loss:.3f}", end_section=True)
    table.add_row("steps", f"{summary.steps:,}")
    table.add_row("tokens/s (all ranks)", f"{summary.tokens_per_second:,.0f}")
    table.add_row("seconds in training", f"{summary.seconds:.0f}")
    return table


def _memory_table(rows: Sequence[MemoryRow]) -> Table:
    """Bytes per rank, held beside the formula's."""
    table = Table(title="Bytes of P, G and OS per rank", title_justify="left")
    headings = ("held, rank 0", "formula, rank 0", "held, largest", "formula, largest")
    table.add_column("")
    for heading in headings:
        table.add_column(heading, justify="right")
    for row in rows:
        sizes = (row.held_rank0, row.formula_rank0, row.held_max, row.formula_max)
        table.add_row(row.state, *(f"{size:,}" for size in sizes))
    return table


def _collective_table(rows: Sequence[CollectiveRow]) -> Table:
    """Collectives of the last step by purpose and kind."""
    table = Table(title="Collectives of the last step", title_justify="left")
    for heading in ("purpose", "kind"):
        table.add_column(heading)
    for heading in ("calls, rank 0", "bytes, rank 0", "calls, largest", "bytes, largest"):
        table.add_column(heading, justify="right")
    for row in rows:
        numbers = (row.count_rank0, row.bytes_rank0, row.count_max, row.bytes_max)
        table.add_row(row.purpose, row.kind, *(f"{number:,}" for number in numbers))
    return table


def draw_losses(path: Path, summary: Summary, history: History) -> None:
    """The training curve, the validation points and the byte-frequency line."""
    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    steps = [row["step"] for row in history.steps]
    axes.plot(steps, [row["loss"] for row in history.steps], linewidth=1, color="tab:blue", label="training")
    axes.plot(*zip(*history.validation, strict=True), "o-", color="tab:orange", label="validation")
    axes.axhline(summary.byte_frequency_loss, linestyle="--", color="tab:gray", label="byte-frequency model")
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per byte)")
    axes.set_ylim(bottom=0)
    size = f"{summary.parameters / 1e6:.1f}M-parameter LLaMA"
    axes.set_title(f"{size}, {summary.engine}, {summary.world_size} ranks")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
