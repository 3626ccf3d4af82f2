"""Tables of text: what an explanation consists of before somebody decides how it is shown."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """Rows of text. notes stand below; right: columns of numbers, by their index."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()
    right: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        """Raises ValueError for a row of another length."""
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"{self.title}: {len(row)} cells in a row of {len(self.columns)} columns: {row}.")


def markdown(title: str, lines: Iterable[str], tables: Iterable[Table], code: str = "") -> str:
    """A page: a heading, lines as a list, tables, and a block of JSON."""
    parts = [f"# {title}", "\n".join(f"- {_escaped(line)}" for line in lines)]
    for table in tables:
        parts.append(f"## {table.title}")
        if table.rows:
            parts.append(_table(table))
        if table.notes:
            parts.append("\n".join(f"- {_escaped(note)}" for note in table.notes))
    if code:
        parts.append(f"## ds_config\n\n```json\n{code}\n```")
    return "\n\n".join(part for part in parts if part) + "\n"


def _table(table: Table) -> str:
    rule = ["--:" if index in table.right else "---" for index in range(len(table.columns))]
    rows = [table.columns, tuple(rule), *table.rows]
    return "\n".join("| " + " | ".join(_escaped(cell) for cell in row) + " |" for row in rows)


def _escaped(cell: str) -> str:
    return cell.replace("|", "\\|").replace("\n", " ")


def size(number: float) -> str:
    """Bytes in GB of 1e9; in MB where that would be nothing. Rounded to nearest."""
    if 0 < abs(number) < 0.1e9:
        return f"{number / 1e6:.1f} MB"
    return f"{number / 1e9:,.1f} GB"


def duration(seconds: float) -> str:
    """Seconds, or ms below one."""
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.3f} s"


def percent(part: float, signed: bool = False) -> str:
    """A part as "3.1 %"."""
    return f"{part * 100:+.1f} %" if signed else f"{part * 100:.1f} %"
