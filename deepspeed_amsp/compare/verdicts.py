"""What a comparison is held against: the targets of the project, and the paper's three-way ablation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from deepspeed_amsp.compare.analysis import Figure, Row, Setting, Table
from deepspeed_amsp.compare.results import AMSP, AMSP_MICS, DDP, HSDP, LIMIT, MICS, ZERO1, ZERO3, Setup

SHAPE = (2, 2)
"""(nodes, ranks of a node) of the cluster for which the targets were set, with one micro-batch."""


@dataclass(frozen=True)
class Target:
    """At ``nic_mbit`` Mbit/s a strategy shall have ``least`` times the throughput of another.

    subject None: our best plan.
    """

    subject: str | None
    baseline: str
    nic_mbit: float
    least: float


TARGETS = (
    Target(None, ZERO1, 500, 1.9),
    Target(None, ZERO1, 250, 2.2),
    Target(None, ZERO3, 500, 1.7),
    Target(None, ZERO3, 250, 1.7),
    Target(None, MICS, 500, 1.5),
    Target(None, MICS, 250, 1.4),
    Target(None, HSDP, 500, 1.5),
    Target(None, HSDP, 250, 1.4),
    Target(None, DDP, 500, 1.15),
    Target(None, DDP, 250, 1.4),
    Target(AMSP_MICS, MICS, 500, 1.2),
    Target(AMSP_MICS, MICS, 250, 1.2),
    Target(None, LIMIT, 500, 1 / 1.12),
)
"""The last: a step takes at most 1.12 times that of the same work without communication."""


class Outcome(str, Enum):
    """How a target came out."""

    MET = "met"
    MISSED = "missed"
    NOISY = "machine too noisy"
    UNKNOWN = "not measured"


@dataclass(frozen=True)
class Verdict:
    """A target and what was measured. subject: the row that was held against it, if there was one."""

    target: Target
    subject: Row | None
    measured: Figure | None

    @property
    def outcome(self) -> Outcome:
        """Said by the median; where rounds spread too far for that, only what all of them say."""
        if self.measured is None:
            return Outcome.UNKNOWN
        least = self.target.least
        if self.measured.noisy and self.measured.low < least <= self.measured.high:
            return Outcome.NOISY
        return Outcome.MET if self.measured.median >= least else Outcome.MISSED


def verdicts(tables: Iterable[Table], setup: Setup) -> list[Verdict]:
    """One for each target whose setting is part of the comparison; none on another cluster than that of the targets."""
    if not setup.emulated or (setup.nodes, setup.ranks_per_node) != SHAPE:
        return []
    by_setting = {table.setting: table for table in tables}
    found = []
    for target in TARGETS:
        table = by_setting.get(Setting(1, target.nic_mbit))
        if table is not None:
            found.append(_verdict(target, table))
    return found


def _verdict(target: Target, table: Table) -> Verdict:
    subject = table.best_plan if target.subject is None else table.row(target.subject)
    baseline = table.row(target.baseline)
    if subject is None or baseline is None or not (subject.state.ranked and baseline.state.compares):
        return Verdict(target, subject, None)
    return Verdict(target, subject, table.compare(subject.strategy, target.baseline))


@dataclass(frozen=True)
class Ablation:
    """DeepSpeed's MiCS, our engine with its factors, our engine with the planner's: who wins how much.

    engine: second over first; factors: third over second; both: third over first.
    """

    setting: Setting
    rows: tuple[Row, Row, Row]
    engine: Figure
    factors: Figure
    both: Figure


def ablation(table: Table) -> Ablation | None:
    """None where one of the three is missing, failed or wrong."""
    rows = [table.row(MICS), table.row(AMSP_MICS), table.row(AMSP) or table.best_plan]
    known: Sequence[Row] = [row for row in rows if row is not None and row.state.ranked]
    if len(known) < 3:
        return None
    theirs, same_factors, planned = known
    pairs = [
        table.compare(subject.strategy, other.strategy)
        for subject, other in ((same_factors, theirs), (planned, same_factors), (planned, theirs))
    ]
    engine, factors, both = pairs
    if engine is None or factors is None or both is None:
        return None
    return Ablation(table.setting, (theirs, same_factors, planned), engine, factors, both)
