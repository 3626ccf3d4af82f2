"""The numbers of a comparison as tables of a report."""

from __future__ import annotations

import math
from collections.abc import Sequence

from deepspeed_amsp.compare.analysis import Figure, Row, State, Table
from deepspeed_amsp.compare.charts import MB, compute_note
from deepspeed_amsp.compare.document import Cell, Grid
from deepspeed_amsp.compare.results import DDP, FSDP2, HSDP, LIMIT, Setup
from deepspeed_amsp.compare.verdicts import Ablation, Outcome, Verdict

NONE = Cell("-", "quiet")


def caption(what: str, table: Table, setup: Setup) -> str:
    """What a table shows and how its times were made."""
    return f"{what} ({table.setting}; {compute_note(setup)})"


def speed(table: Table, setup: Setup) -> Grid:
    """Step time, throughput, loss, and what is to be said about it."""
    on_gpus = setup.flops_per_token is not None
    head = ["strategy", "step, s", "range", "tokens/s", *(["TGS", "MFU"] if on_gpus else []), "last loss", "from DDP"]
    rows = []
    for row in table.rows:
        if not row.runs:
            rows.append([_name(row), *[NONE] * (len(head) - 1), Cell(row.state.value, "bad")])
            continue
        gpus = [_optional(row.tokens_per_gpu_s, "{:,.0f}"), _optional(row.mfu, "{:.1%}")] if on_gpus else []
        rows.append(
            [
                _name(row),
                Cell(f"{row.step_s.median:.3f}"),
                Cell(f"{row.step_s.low:.3f}-{row.step_s.high:.3f}"),
                Cell(f"{row.tokens_per_s:,.0f}"),
                *gpus,
                Cell(f"{row.last_loss:.4f}"),
                _difference(row),
                _state(row),
            ]
        )
    return Grid(caption("Speed and loss", table, setup), [*head, "verdict"], rows)


def ratios(table: Table, setup: Setup) -> Grid:
    """How many times the throughput of each baseline every strategy has; the wrong and the failed left out."""
    baselines = table.baselines
    head = ["strategy", *(f"vs {_short(table, name)}" for name in baselines)]
    rows = [
        [_name(row), *(_ratio(row.ratios.get(name), row.strategy == name) for name in baselines)]
        for row in table.rows
        if row.state.ranked
    ]
    what = "Times the throughput of each baseline: median of paired neighbours, and their range over the median"
    return Grid(caption(what, table, setup), head, rows)


def communication(table: Table, setup: Setup) -> Grid:
    """Bytes of the busiest node against theory, what of a step was exposed, and its phases."""
    head = [
        "strategy",
        "sent, MB",
        "theory, MB",
        "off by",
        "gather",
        "reduce",
        "publish",
        "forward",
        "backward",
        "update",
    ]
    rows = []
    for row in table.rows:
        if not row.runs:
            continue
        exposed, phases = row.exposed, row.phases
        rows.append(
            [
                _name(row),
                _optional(row.sent_bytes, "{:.2f}", MB),
                _optional(row.theory_bytes, "{:.2f}", MB),
                _deviation(row),
                *([_ms(exposed.gather), _ms(exposed.reduce), _ms(exposed.publish)] if exposed else [NONE] * 3),
                *([_ms(phases.forward), _ms(phases.backward), _ms(phases.update)] if phases else [NONE] * 3),
            ]
        )
    what = "Sent by the busiest node in a step; milliseconds of exposed communication by kind, and of the step's phases"
    return Grid(caption(what, table, setup), head, rows)


def memory(table: Table, setup: Setup) -> Grid:
    """Bytes of the rank with the highest peak."""
    rows = []
    for row in table.rows:
        held = row.memory
        if held is not None:
            parts = (held.parameters, held.gradients, held.optimizer_states)
            rows.append([_name(row), *(Cell(f"{part / MB:.1f}") for part in (*parts, sum(parts), held.peak))])
    head = ["strategy", "P, MB", "G, MB", "OS, MB", "P + G + OS, MB", "peak, MB"]
    what = "Memory of one rank"
    if setup.device == "cpu":
        what += "; the peak is the growth of its process, all of its libraries' buffers included"
    if any(row.strategy in (FSDP2, HSDP) for row in table.rows):
        what += "; FSDP2's parameters are its fp32 shards, which are its masters, too"
    return Grid(caption(what, table, setup), head, rows)


def targets(verdicts: Sequence[Verdict], tables: Sequence[Table]) -> Grid:
    """What was aimed at, what was measured."""
    by_rate = {table.setting.nic_mbit: table for table in tables if table.setting.micro_batches == 1}
    tones = {Outcome.MET: "good", Outcome.MISSED: "bad", Outcome.NOISY: "bad", Outcome.UNKNOWN: "quiet"}
    rows = []
    for verdict in verdicts:
        target, table = verdict.target, by_rate[verdict.target.nic_mbit]
        subject = "the best AMSP plan" if target.subject is None else _title(table, target.subject)
        rows.append(
            [
                Cell(f"{subject} against {_title(table, target.baseline)}"),
                Cell(verdict.subject.title if verdict.subject else "-"),
                Cell(f"{target.nic_mbit:g}"),
                Cell(_at_least(verdict)),
                _ratio(verdict.measured, digits=3),
                Cell(verdict.outcome.value, tones[verdict.outcome]),
            ]
        )
    head = ["target", "measured plan", "Mbit/s", "at least", "measured", "outcome"]
    what = "Targets of the project, all for 2 nodes x 2 ranks and one micro-batch; compute time is emulated"
    return Grid(what, head, rows, texts=2)


def three_way(found: Ablation, table: Table, setup: Setup) -> Grid:
    """The paper's ablation."""
    theirs, same, planned = found.rows
    head = ["what runs", "step, s", "against the line above", "against DeepSpeed MiCS"]
    rows = [
        [Cell(theirs.title), Cell(f"{theirs.step_s.median:.3f}"), NONE, Cell("1.00x")],
        [
            Cell(f"our engine, the factors of MiCS: {same.title}"),
            Cell(f"{same.step_s.median:.3f}"),
            _ratio(found.engine),
            _ratio(found.engine),
        ],
        [
            Cell(f"our engine, the planner's factors: {planned.title}"),
            Cell(f"{planned.step_s.median:.3f}"),
            _ratio(found.factors),
            _ratio(found.both),
        ],
    ]
    return Grid(caption("What the engine is worth, and what the factors are", table, setup), head, rows)


def _at_least(verdict: Verdict) -> str:
    least = verdict.target.least
    return f"{least:.2f}x (a step of at most {1 / least:.2f}x)" if verdict.target.baseline == LIMIT else f"{least:.2f}x"


def _name(row: Row) -> Cell:
    return Cell(row.title, "ours" if row.ours else "")


def _title(table: Table, name: str) -> str:
    row = table.row(name)
    return row.title if row else name


def _short(table: Table, name: str) -> str:
    return _title(table, name).removeprefix("DeepSpeed ").removeprefix("torch ")


def _optional(value: float | None, form: str, unit: float = 1.0) -> Cell:
    return NONE if value is None else Cell(form.format(value / unit))


def _ms(seconds: float) -> Cell:
    return Cell(f"{1e3 * seconds:.0f}")


def _ratio(ratio: Figure | None, itself: bool = False, digits: int = 2) -> Cell:
    if ratio is None:
        return Cell("1.00x", "quiet") if itself else NONE
    spread = "" if ratio.spread is None else f" ({ratio.spread:.0%})"
    return Cell(f"{ratio.median:.{digits}f}x{spread}", "bad" if ratio.noisy else "")


def _difference(row: Row) -> Cell:
    if row.strategy == DDP or row.loss_difference is None or row.state is State.LIMIT:
        return NONE
    if math.isinf(row.loss_difference):
        return Cell("not comparable", "bad")
    return Cell(f"{row.loss_difference:.4f}", "bad" if row.state is State.WRONG else "")


def _state(row: Row) -> Cell:
    failed = f", {len(row.errors)} of {len(row.errors) + len(row.runs)} runs failed" if row.errors else ""
    if row.state is State.WRONG:
        return Cell(f"WRONG{failed}", "bad")
    return Cell(f"{row.state.value}{failed}", "bad" if failed else "good" if row.state is State.RIGHT else "quiet")


def _deviation(row: Row) -> Cell:
    sent, theory = row.sent_bytes, row.theory_bytes
    if sent is None or theory is None:
        return NONE
    text = f"{(sent - theory) / theory:+.1%}" if theory else f"{(sent - theory) / MB:+.2f} MB"
    return Cell(text, "good" if row.bytes_agree else "bad")
