"""The pictures of a comparison, as PNG files. Needs matplotlib.

Ours are orange, what others wrote is blue, the limit is grey: in all pictures, and told apart without colours, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepspeed_amsp.compare.analysis import Row, State, Table
from deepspeed_amsp.compare.results import DDP, LIMIT, ZERO1, Setup, Slice

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Picture

OURS, THEIRS, NEUTRAL, BAD = "#d55e00", "#0072b2", "#8c8c8c", "#b00020"
INK, FAINT = "#222222", "#d9d9d9"
DPI = 150
MOST_LEVELS = 4
"""Collectives of one kind that are drawn side by side; more would be hairlines."""
MB = 1e6

PHASES = ("forward", "backward", "update")
"""Rows of every strategy's timeline; they follow one another, so they share a lane."""
ROW_COLOURS = {
    "forward": "#56b4e9",
    "backward": "#0072b2",
    "update": "#009e73",
    "gather": "#f0c419",
    "reduce": "#d55e00",
    "publish": "#cc79a7",
}

_PAPER: dict[str, Any] = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
"""Behind words that a line may cross."""

STYLE: dict[Any, Any] = {
    "font.size": 9,
    "text.parse_math": False,  # a title with a dollar sign is a title
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": NEUTRAL,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "text.color": INK,
}


def available() -> bool:
    """Whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def draw(table: Table, setup: Setup, folder: Path) -> dict[str, Path]:
    """All pictures of a setting that its data allow, by kind: "throughput", "memory", "timeline"."""
    import matplotlib

    drawn: dict[str, Path] = {}
    with matplotlib.rc_context(STYLE):
        for kind, picture in (
            ("throughput", _throughput(table, setup)),
            ("memory", _memory(table, setup)),
            ("timeline", _timeline(table, setup)),
        ):
            if picture is not None:
                drawn[kind] = folder / f"{kind}-{table.setting.slug}.png"
                picture.savefig(drawn[kind], dpi=DPI, facecolor="white")
    return drawn


def reference(table: Table) -> str | None:
    """The baseline of the bar chart: ZeRO-1, else DDP, else what there is."""
    known = table.baselines
    return next((name for name in (ZERO1, DDP, *known) if name in known), None)


def compute_note(setup: Setup) -> str:
    """What every table and picture says about where its times come from."""
    cluster = f"{setup.nodes} nodes x {setup.ranks_per_node} ranks"
    if setup.device != "cpu":
        return f"{cluster}, {setup.device}"
    return f"{cluster}, {'emulated cluster' if setup.emulated else 'plain loopback'}, compute time is emulated"


def _figure(width: float, height: float) -> Picture:
    from matplotlib.figure import Figure as Picture

    return Picture(figsize=(width, height), layout="constrained")


def _title(axes: Axes, text: str, table: Table, setup: Setup) -> None:
    axes.set_title(text, pad=17)
    axes.text(
        0, 1, f"{table.setting}; {compute_note(setup)}",
        transform=axes.transAxes, fontsize=8, color="0.4", va="bottom",
    )  # fmt: skip


def _colour(row: Row) -> str:
    if row.strategy == LIMIT:
        return NEUTRAL
    return OURS if row.ours else THEIRS


def _legend(axes: Axes, rows: Iterable[Row], **where: Any) -> None:
    from matplotlib.patches import Patch

    names = {OURS: "AMSP", THEIRS: "others", NEUTRAL: "no communication"}
    used = {_colour(row) for row in rows}
    axes.legend(
        handles=[Patch(color=colour, label=name) for colour, name in names.items() if colour in used],
        frameon=False, fontsize=8, **where,
    )  # fmt: skip


def _throughput(table: Table, setup: Setup) -> Picture | None:
    """A bar a strategy: ratio to one baseline, with the range of the rounds; the wrong and the failed by name."""
    baseline = reference(table)
    base = table.row(baseline) if baseline else None
    if baseline is None or base is None:
        return None
    figure = _figure(8, 1.2 + 0.27 * len(table.rows))
    axes = figure.add_subplot()
    shown = []
    for place, row in enumerate(table.rows):
        ratio = table.compare(row.strategy, baseline)
        if not row.state.compares or ratio is None:
            word = "not measured in the same round" if row.state.compares else f"{row.state.value}, not ranked"
            axes.text(0.02, place, word, color=BAD, va="center", bbox=_PAPER)
            continue
        shown.append(row)
        error = [[ratio.median - ratio.low], [ratio.high - ratio.median]]
        axes.barh(
            place, ratio.median, height=0.72, color=_colour(row), hatch="///" if row.strategy == LIMIT else None,
            edgecolor="white", xerr=error, error_kw={"ecolor": INK, "elinewidth": 0.9, "capsize": 2.5},
        )  # fmt: skip
        axes.annotate(
            f"{ratio.median:.2f}x", (ratio.high, place), (5, 0), textcoords="offset points", va="center", fontsize=8.5,
            bbox=_PAPER,
        )  # fmt: skip
    axes.axvline(1, color=INK, linewidth=0.9, linestyle="--")
    axes.set_yticks(range(len(table.rows)), [row.title for row in table.rows])
    axes.set_ylim(len(table.rows) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.margins(x=0.09)
    axes.set_xlim(left=0)
    axes.set_xlabel(f"times the throughput of {base.title} (range over rounds)", loc="left")
    _title(axes, "Throughput: longer is better", table, setup)
    _legend(axes, shown, loc="lower right")
    return figure


def _memory(table: Table, setup: Setup) -> Picture | None:
    """Memory against throughput, a point a strategy, named in a column at the right."""
    rows = [row for row in table.rows if row.memory is not None and row.state in (State.RIGHT, State.UNCHECKED)]
    if not rows:
        return None
    states_only = setup.device == "cpu"  # where compute is emulated the peak of a process is mostly not the strategy's
    points = []
    for row in rows:
        memory = row.memory
        assert memory is not None
        states = memory.parameters + memory.gradients + memory.optimizer_states
        points.append(((states if states_only else memory.peak) / MB, row.tokens_per_s))
    figure = _figure(8, max(4.5, 1.5 + 0.22 * len(rows)))
    axes = figure.add_subplot()
    for row, (x, y) in zip(rows, points, strict=True):
        axes.scatter(x, y, s=42, color=_colour(row), marker="o" if row.ours else "s", zorder=3, edgecolor="white")
    axes.set_xlim(left=0)
    axes.margins(y=0.05)
    _name_points(axes, rows, points)
    what = "parameters, gradients and optimizer states of one rank" if states_only else "peak of one rank"
    axes.set(xlabel=f"{what}, MB", ylabel="tokens/s of all ranks")
    axes.grid(color=FAINT, linewidth=0.6)
    _title(axes, "Memory and throughput: up and to the left is better", table, setup)
    return figure


def _name_points(axes: Axes, rows: Sequence[Row], points: Sequence[tuple[float, float]]) -> None:
    """Names in a column beside the plot in order of height, joined to their points by thin lines."""
    order = sorted(range(len(rows)), key=lambda index: points[index][1])
    low, high = axes.get_ylim()
    heights = _apart([(points[index][1] - low) / (high - low) for index in order], 0.97 / max(len(rows) - 1, 16))
    for index, height in zip(order, heights, strict=True):
        axes.annotate(
            rows[index].title, points[index], (1.05, height), textcoords="axes fraction", va="center", fontsize=8,
            color=_colour(rows[index]), annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": "0.75", "linewidth": 0.6, "shrinkB": 4, "relpos": (0, 0.5)},
        )  # fmt: skip


def _apart(heights: Sequence[float], least: float) -> list[float]:
    """Ascending heights of a plot, moved so that neighbours are ``least`` apart."""
    moved: list[float] = []
    for height in heights:
        moved.append(max(height, moved[-1] + least) if moved else height)
    ceiling = 0.97
    for index in reversed(range(len(moved))):
        moved[index] = min(moved[index], ceiling)
        ceiling = moved[index] - least
    return moved


def _timeline(table: Table, setup: Setup) -> Picture | None:
    """One step of each strategy over the same axis: what is computed, and below it what is in flight."""
    rows = [row for row in table.rows if row.runs and row.typical.timeline]
    if not rows:
        return None
    lanes: list[tuple[Row, str, list[list[Slice]]]] = []
    for row in rows:
        slices = row.typical.timeline or []
        lanes.append((row, "compute", [[one for one in slices if one.row in PHASES]]))
        for name in sorted({one.row for one in slices if one.row not in PHASES}, key=_order):
            lanes.append((row, name, _levels([one for one in slices if one.row == name])))
    figure = _figure(9.5, 1.3 + 0.15 * len(lanes) + 0.16 * len(rows))
    axes = figure.add_subplot()
    _bars(axes, lanes)
    axes.set_xlim(left=0)
    axes.set_xlabel("seconds from the start of the step")
    axes.grid(axis="x", color=FAINT, linewidth=0.6)
    axes.set_axisbelow(True)
    _title(axes, "One step of each strategy", table, setup)
    _timeline_legend(figure, {name for _, name, _ in lanes})
    return figure


def _bars(axes: Axes, lanes: Sequence[tuple[Row, str, list[list[Slice]]]]) -> None:
    """A lane is one line high; collectives of one kind that are in flight together share it as thinner bars."""
    place = 0.0
    ticks: list[tuple[float, Row]] = []
    for index, (row, _, levels) in enumerate(lanes):
        first = index == 0 or lanes[index - 1][0] is not row
        if first:
            place += 1.1 if index else 0.0
            ticks.append((place, row))
        height = 0.9 / len(levels)
        for level, slices in enumerate(levels):
            axes.broken_barh(
                [(one.start_s, one.end_s - one.start_s) for one in slices],
                (place - 0.45 + level * height, height),
                facecolors=[ROW_COLOURS.get(one.row, NEUTRAL) for one in slices],
                edgecolor="white", linewidth=0.3 if len(levels) == 1 else 0,
            )  # fmt: skip
        if first:
            axes.axhline(place - 0.75, color=FAINT, linewidth=0.6)
        place += 1.0
    titles = [f"{row.title}{' (WRONG)' if row.state is State.WRONG else ''}" for _, row in ticks]
    axes.set_yticks([where for where, _ in ticks], titles, fontsize=8)
    for label, (_, row) in zip(axes.get_yticklabels(), ticks, strict=True):
        label.set_color(_colour(row))
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(place - 0.2, -0.8)


def _levels(slices: Sequence[Slice]) -> list[list[Slice]]:
    """Spread so that none overlaps another of its level, as long as there are levels to spread them on."""
    levels: list[list[Slice]] = []
    for one in sorted(slices, key=lambda one: one.start_s):
        free = next((level for level in levels if level[-1].end_s <= one.start_s), None)
        if free is None and len(levels) < MOST_LEVELS:
            levels.append([one])
        else:
            (free or min(levels, key=lambda level: level[-1].end_s)).append(one)
    return levels


def _timeline_legend(figure: Picture, names: set[str]) -> None:
    from matplotlib.patches import Patch

    communication = sorted(names - {"compute"}, key=_order)
    handles = [Patch(color=ROW_COLOURS.get(name, NEUTRAL), label=name) for name in (*PHASES, *communication)]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=8)


def _order(name: str) -> tuple[int, str]:
    known = list(ROW_COLOURS)
    return (known.index(name) if name in known else len(known), name)
