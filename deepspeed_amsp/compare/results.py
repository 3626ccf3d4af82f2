"""What a comparison measured, as results.jsonl: raw figures only, whatever can be derived is (`compare.analysis`).

One JSON object a line: first the set-up, then one run a line, appended as runs end, so that a comparison which is
interrupted keeps what it had. Not-a-number and infinity, which a run that went wrong has as losses, are the strings
"NaN", "Infinity" and "-Infinity".

    start(path, Setup(...))
    append(path, Run(strategy="ddp", ...))
    results = read(path)
"""

from __future__ import annotations

import json
import os
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeAlias

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

SCHEMA: Final = 1

LIMIT = "limit"
DDP = "ddp"
FSDP2 = "fsdp2"
HSDP = "hsdp"
ZERO1, ZERO2, ZERO3 = "zero1", "zero2", "zero3"
HPZ = "hpz"
MICS = "mics"
AMSP = "amsp"
AMSP_MICS = "amsp-mics"
BASELINES = (DDP, FSDP2, HSDP, ZERO1, ZERO2, ZERO3, HPZ, MICS)
"""Names of strategies that others wrote. `LIMIT` is the same work without communication. Ours is `AMSP` with the
planner's factors; names that start with "amsp-" are our engine with other factors or switches."""

_RULES = ConfigDict(extra="forbid", ser_json_inf_nan="strings")
Bytes: TypeAlias = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Seconds: TypeAlias = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Duration: TypeAlias = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count: TypeAlias = Annotated[int, Field(ge=1)]


class ResultsError(ValueError):
    """A file that is no results.jsonl, or was cut off: one line that names file, line and field."""


@dataclass(frozen=True, config=_RULES)
class Phases:
    """Mean seconds of a step's parts, over steps, on rank 0; forward and backward over all its micro-batches."""

    forward: Seconds
    backward: Seconds
    update: Seconds


@dataclass(frozen=True, config=_RULES)
class Exposed:
    """Mean seconds of a step in which computation stood still for communication of one kind."""

    gather: Seconds
    reduce: Seconds
    publish: Seconds


@dataclass(frozen=True, config=_RULES)
class Memory:
    """Bytes of one rank: what it holds between steps, and all that it held at the peak."""

    parameters: Bytes
    gradients: Bytes
    optimizer_states: Bytes
    peak: Bytes


@dataclass(frozen=True, config=_RULES)
class Slice:
    """A bar of a timeline; seconds from the start of the step. row: "forward", "gather", "reduce", ..."""

    row: str
    name: str
    start_s: Seconds
    end_s: Seconds

    def __post_init__(self) -> None:
        if self.end_s < self.start_s:
            raise ValueError(f"slice {self.name!r} ends before it starts")


@dataclass(frozen=True, kw_only=True, config=_RULES)
class Setup:
    """The first line: where and how all runs were made.

    date: ISO 8601. versions: of python, torch, deepspeed and so on. config: the resolved ab.yaml. fairness: one
    sentence for each measure. device: "cpu", or the name of the accelerator. peak_flops: of one accelerator, a
    second; flops_per_token: forward and backward of one token by Megatron's formula; None where compute is emulated.
    loss_tolerance: largest difference from DDP's loss in any step with which a strategy still counts as right.
    """

    kind: Literal["setup"] = "setup"
    schema: Literal[1] = SCHEMA
    date: str
    host: str
    versions: dict[str, str]
    config: dict[str, Any]
    emulated: bool
    fairness: list[str]
    nodes: Count
    ranks_per_node: Count
    device: str = "cpu"
    flops_per_token: Duration | None = None
    peak_flops: Duration | None = None
    loss_tolerance: Duration = 0.02

    @property
    def world_size(self) -> int:
        """Ranks of all nodes."""
        return self.nodes * self.ranks_per_node


@dataclass(frozen=True, kw_only=True, config=_RULES)
class Run:
    """One strategy, measured once.

    micro_batches: a step's, on each rank. nic_mbit: None where the network was not emulated. round: runs of one
    round, micro_batches and nic_mbit were neighbours in time; ratios are taken between them alone. step_s: seconds
    of each measured step (warm-up left out). losses: one a step, from the first on, mean over ranks. Bytes are
    payload and headers that the busiest node sent in a step; None without a counter. exposed_s and timeline: None
    where we cannot look into the strategy. error: the first traceback of a run that failed, which may have no steps.
    """

    kind: Literal["run"] = "run"
    strategy: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_.+-]*$")]
    title: Annotated[str, Field(min_length=1)]
    micro_batches: Count
    nic_mbit: Duration | None
    round: Annotated[int, Field(ge=0)]
    tokens_per_step: Count
    step_s: list[Duration] = field(default_factory=list)
    phases_s: Phases | None = None
    sent_bytes_per_node: Bytes | None = None
    theory_bytes_per_node: Bytes | None = None
    exposed_s: Exposed | None = None
    memory: Memory | None = None
    losses: list[float] = field(default_factory=list)
    timeline: list[Slice] | None = None
    error: str | None = None

    def __post_init__(self) -> None:
        if self.error is None and not (self.step_s and self.losses):
            raise ValueError("a run without an error has step_s and losses")


@dataclass(frozen=True)
class Results:
    """A whole file."""

    setup: Setup
    runs: list[Run]


_SETUP, _RUN = TypeAdapter(Setup), TypeAdapter(Run)


def start(path: Path, setup: Setup) -> None:
    """Begin a file, in place of one that may be there."""
    path.write_bytes(_SETUP.dump_json(setup) + b"\n")


def append(path: Path, run: Run) -> None:
    """Add a run; once this returns it outlives this process."""
    with path.open("ab") as file:
        file.write(_RUN.dump_json(run) + b"\n")
        file.flush()
        os.fsync(file.fileno())


def write(path: Path, results: Results) -> None:
    """The whole file at once."""
    start(path, results.setup)
    for run in results.runs:
        append(path, run)


def read(path: Path) -> Results:
    """Read a file back.

    Raises:
        ResultsError: there is no such file, it is none of ours, or a line was cut off.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = "no such file" if isinstance(error, FileNotFoundError) else f"cannot be read: {error}"
        raise ResultsError(f"{path}: {reason}") from error
    lines = text.removesuffix("\n").split("\n")  # splitlines() knows separators that JSON strings may hold
    if lines == [""]:
        raise ResultsError(f"{path}: is empty; results.jsonl starts with a line of kind 'setup'")
    setup = _line(path, 1, lines[0], "setup", _SETUP)
    return Results(setup, [_line(path, number, line, "run", _RUN) for number, line in enumerate(lines[1:], 2)])


def _line(path: Path, number: int, line: str, kind: str, adapter: TypeAdapter[Any]) -> Any:
    where = f"{path}, line {number}"
    try:
        values = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ResultsError(f"{where}: no JSON object; the file was cut off there, or is no results.jsonl") from error
    if not isinstance(values, dict) or values.get("kind") != kind:
        raise ResultsError(f"{where}: must be an object of kind {kind!r}; this is no results.jsonl of amsp compare")
    if kind == "setup" and values.get("schema") != SCHEMA:
        raise ResultsError(f"{where}: schema {values.get('schema')!r}; this package reads schema {SCHEMA}")
    try:
        return adapter.validate_python(values)
    except ValidationError as error:
        first = error.errors()[0]
        field_name = ".".join(map(str, first["loc"]))
        raise ResultsError(f"{where}: {f'{field_name}: ' if field_name else ''}{first['msg']}") from error
