"""From the raw figures of a comparison to its tables: medians, ratios of neighbours, bytes, losses, who is right.

Nothing is compared across settings, and ratios are taken between runs of the same round alone: these were neighbours
in time, so what slows the machine for minutes slows both.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from statistics import fmean, median

from deepspeed_amsp.compare.results import AMSP, BASELINES, DDP, LIMIT, Exposed, Memory, Phases, Results, Run, Setup

NOISY = 0.10
"""Spread of a ratio from which the machine was too noisy to say anything."""
BYTES_TOLERANCE = 0.05
BYTES_FLOOR = 100_000
"""Bytes by which a count may always differ: losses, norms and headers, which theory leaves out."""


@dataclass(frozen=True)
class Setting:
    """What all strategies of one table had in common besides the work."""

    micro_batches: int
    nic_mbit: float | None

    @classmethod
    def of(cls, run: Run) -> Setting:
        return cls(run.micro_batches, run.nic_mbit)

    def __str__(self) -> str:
        link = "" if self.nic_mbit is None else f", {self.nic_mbit:g} Mbit/s"
        return f"M = {self.micro_batches}{link}"

    @property
    def slug(self) -> str:
        """For names of files."""
        link = "" if self.nic_mbit is None else f"-{self.nic_mbit:g}mbit"
        return f"m{self.micro_batches}{link}"


@dataclass(frozen=True)
class Figure:
    """Several measurements of one thing."""

    values: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.values:
            raise ValueError("a figure needs a value")

    @property
    def median(self) -> float:
        """What tables show."""
        return median(self.values)

    @property
    def low(self) -> float:
        return min(self.values)

    @property
    def high(self) -> float:
        return max(self.values)

    @property
    def spread(self) -> float | None:
        """Range over median; None of a single measurement."""
        return (self.high - self.low) / self.median if len(self.values) > 1 else None

    @property
    def noisy(self) -> bool:
        """Whether the spread is too large for the median to mean anything."""
        return self.spread is not None and self.spread >= NOISY


class State(str, Enum):
    """What can be said about a strategy."""

    RIGHT = "right"
    LIMIT = "limit"  # trains each rank alone, so its losses say nothing
    UNCHECKED = "unchecked"  # there is no sound DDP to compare with
    WRONG = "WRONG"
    FAILED = "failed"

    @property
    def ranked(self) -> bool:
        """Whether its speed counts."""
        return self in (State.RIGHT, State.UNCHECKED)

    @property
    def compares(self) -> bool:
        """Whether others may be held against it."""
        return self.ranked or self is State.LIMIT


@dataclass(frozen=True)
class Row:
    """A strategy in one setting. runs: those that succeeded, by round; errors: of the others.

    loss_difference: largest one from DDP in any step of any round; infinite for a loss that is no number or for other
    steps than DDP's, None without DDP. ratios: by baseline, how many times its throughput this strategy has.
    """

    strategy: str
    title: str
    state: State
    runs: tuple[Run, ...]
    errors: tuple[str, ...]
    loss_difference: float | None
    ratios: dict[str, Figure]
    setup: Setup

    @property
    def ours(self) -> bool:
        """Trained by our engine."""
        return is_ours(self.strategy)

    @cached_property
    def step_s(self) -> Figure:
        """Seconds of a step; a value is the median of one run."""
        return Figure(tuple(_seconds(run) for run in self.runs))

    @property
    def tokens_per_s(self) -> float:
        """Of all ranks."""
        return median(map(_speed, self.runs))

    @property
    def tokens_per_gpu_s(self) -> float | None:
        """TGS; None where compute is emulated."""
        return None if self.setup.flops_per_token is None else self.tokens_per_s / self.setup.world_size

    @property
    def mfu(self) -> float | None:
        """Share of an accelerator's peak; None where it or the model's FLOPs are unknown."""
        speed, flops, peak = self.tokens_per_gpu_s, self.setup.flops_per_token, self.setup.peak_flops
        return None if speed is None or flops is None or peak is None else speed * flops / peak

    @property
    def sent_bytes(self) -> float | None:
        """By the busiest node in a step."""
        return _median(run.sent_bytes_per_node for run in self.runs)

    @property
    def theory_bytes(self) -> float | None:
        """What theory says about `sent_bytes`."""
        return _median(run.theory_bytes_per_node for run in self.runs)

    @property
    def bytes_agree(self) -> bool | None:
        """Whether count and theory do; None where one of them is missing."""
        sent, theory = self.sent_bytes, self.theory_bytes
        if sent is None or theory is None:
            return None
        return abs(sent - theory) <= max(BYTES_TOLERANCE * theory, BYTES_FLOOR)

    @property
    def exposed(self) -> Exposed | None:
        """Means over the runs that know."""
        known = [run.exposed_s for run in self.runs if run.exposed_s is not None]
        if not known:
            return None
        return Exposed(
            gather=fmean(one.gather for one in known),
            reduce=fmean(one.reduce for one in known),
            publish=fmean(one.publish for one in known),
        )

    @property
    def typical(self) -> Run:
        """The run whose step time is the median, or next below: its timeline and phases are shown."""
        return sorted(self.runs, key=_seconds)[(len(self.runs) - 1) // 2]

    @property
    def phases(self) -> Phases | None:
        """Parts of a step in the typical run."""
        return self.typical.phases_s

    @property
    def memory(self) -> Memory | None:
        """Of the run with the highest peak."""
        known = [run.memory for run in self.runs if run.memory is not None]
        return max(known, key=lambda memory: memory.peak, default=None)

    @property
    def last_loss(self) -> float:
        """After all steps, in the first run."""
        return self.runs[0].losses[-1]


@dataclass(frozen=True)
class Table:
    """All strategies of one setting: the limit, then the ranked ones, quickest first, then the wrong and the failed."""

    setting: Setting
    rows: tuple[Row, ...]

    def row(self, strategy: str) -> Row | None:
        """A strategy by its name; None where it is not part of the comparison."""
        return next((row for row in self.rows if row.strategy == strategy), None)

    @property
    def ranked(self) -> list[Row]:
        """Quickest first."""
        return [row for row in self.rows if row.state.ranked]

    @property
    def best_plan(self) -> Row | None:
        """The quickest of our own plans: neither factors of others nor a plan with an overlap switched off."""
        return next((row for row in self.ranked if is_own_plan(row.strategy)), None)

    @property
    def baselines(self) -> list[str]:
        """Those with which this table can compare, in the usual order: the wrong and the failed are none."""
        return _baselines({row.strategy: row.state for row in self.rows})

    def compare(self, strategy: str, baseline: str) -> Figure | None:
        """How many times the throughput of ``baseline`` a strategy has, a value for each round; None: no pair."""
        subject, other = self.row(strategy), self.row(baseline)
        return None if subject is None or other is None else paired(subject.runs, other.runs)

    @property
    def losses_tell(self) -> bool:
        """False where even the limit, whose ranks learn nothing from each other, would pass for right."""
        limit = self.row(LIMIT)
        difference = None if limit is None else limit.loss_difference
        return limit is None or difference is None or difference > limit.setup.loss_tolerance

    @property
    def noisy(self) -> list[tuple[Row, str, Figure]]:
        """(strategy, baseline, ratio) of all ratios with too large a spread, worst first."""
        pairs = ((row, baseline, ratio) for row in self.ranked for baseline, ratio in row.ratios.items())
        found = [pair for pair in pairs if pair[2].noisy]
        return sorted(found, key=lambda one: -(one[2].spread or 0.0))


def analyse(results: Results) -> list[Table]:
    """One table a setting, in the order in which settings were first met."""
    by_setting: dict[Setting, dict[str, list[Run]]] = {}
    for run in results.runs:
        by_setting.setdefault(Setting.of(run), {}).setdefault(run.strategy, []).append(run)
    return [_table(setting, runs, results.setup) for setting, runs in by_setting.items()]


def is_ours(strategy: str) -> bool:
    """Whether our engine trains it."""
    return strategy == AMSP or strategy.startswith(f"{AMSP}-")


def is_own_plan(strategy: str) -> bool:
    """One of our plans as we would use it, not a demonstration of what another scheme or a lost overlap costs."""
    variant = strategy.removeprefix(AMSP).removeprefix("-")
    return is_ours(strategy) and variant not in BASELINES and not variant.startswith("no-")


def paired(subject: Sequence[Run], baseline: Sequence[Run]) -> Figure | None:
    """Ratios of throughput, round by round; None where no round has both."""
    others = {run.round: run for run in baseline}
    ratios = [_speed(run) / _speed(others[run.round]) for run in subject if run.round in others]
    return Figure(tuple(ratios)) if ratios else None


def _table(setting: Setting, by_strategy: dict[str, list[Run]], setup: Setup) -> Table:
    succeeded = {
        name: tuple(sorted((run for run in runs if run.error is None), key=lambda run: run.round))
        for name, runs in by_strategy.items()
    }
    differences = {name: _loss_difference(done, succeeded.get(DDP, ())) for name, done in succeeded.items()}
    states = {name: _state(name, done, differences[name], setup.loss_tolerance) for name, done in succeeded.items()}
    baselines = _baselines(states)
    rows = [
        Row(
            strategy=name,
            title=runs[0].title,
            state=states[name],
            runs=succeeded[name],
            errors=tuple(run.error for run in runs if run.error is not None),
            loss_difference=differences[name],
            ratios={
                baseline: ratio
                for baseline in baselines
                if baseline != name and (ratio := paired(succeeded[name], succeeded[baseline])) is not None
            },
            setup=setup,
        )
        for name, runs in by_strategy.items()
    ]
    order = (State.LIMIT, State.RIGHT, State.UNCHECKED, State.WRONG, State.FAILED)
    place = {State.UNCHECKED: order.index(State.RIGHT)}
    rows.sort(key=lambda row: (place.get(row.state, order.index(row.state)), row.step_s.median if row.runs else 0.0))
    return Table(setting, tuple(rows))


def _baselines(states: Mapping[str, State]) -> list[str]:
    return [name for name in (*BASELINES, LIMIT) if name in states and states[name].compares]


def _state(name: str, done: Sequence[Run], difference: float | None, tolerance: float) -> State:
    if not done:
        return State.FAILED
    if name == LIMIT:
        return State.LIMIT
    if difference is None:
        return State.UNCHECKED
    return State.RIGHT if difference <= tolerance else State.WRONG


def _loss_difference(runs: Sequence[Run], ddp: Sequence[Run]) -> float | None:
    """All runs start from the same weights and data, so any sound one of DDP's will do."""
    if not runs:
        return None
    if not all(_finite(run) for run in runs):
        return math.inf  # wrong whatever the others have
    reference = next((run.losses for run in ddp if _finite(run)), None)
    return None if reference is None else max(_difference(run.losses, reference) for run in runs)


def _finite(run: Run) -> bool:
    return all(map(math.isfinite, run.losses))


def _difference(losses: Sequence[float], reference: Sequence[float]) -> float:
    if len(losses) != len(reference):
        return math.inf
    return max(abs(ours - theirs) for ours, theirs in zip(losses, reference, strict=True))


def _seconds(run: Run) -> float:
    return median(run.step_s)


def _speed(run: Run) -> float:
    return run.tokens_per_step / _seconds(run)


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None
