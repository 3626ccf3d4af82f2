"""Tables on a terminal, or as plain text where there is none."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from deepspeed_amsp.plan.report import Table

FOLDABLE = 7
"""Columns that a narrow terminal can fold and still be read."""


def show(lines: Iterable[str], tables: Iterable[Table]) -> None:
    """Print them: on a terminal in its width, cells folded; else every row on one line, however long."""
    if sys.stdout.isatty():
        _on_terminal(lines, tables)
        return
    print("\n".join(lines))
    for table in tables:
        print(f"\n{plain(table)}")


def plain(table: Table) -> str:
    """Columns lined up with spaces."""
    grid = [table.columns, *table.rows]
    widths = [max(len(row[column]) for row in grid) for column in range(len(table.columns))]
    parts = [table.title]
    for row in grid if table.rows else []:
        cells = [
            cell.rjust(width) if index in table.right else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        parts.append("  " + "  ".join(cells).rstrip())
    return "\n".join([*parts, *(f"  - {note}" for note in table.notes)])


def _width(table: Table) -> int:
    """Of the whole table, with three characters between columns."""
    grid = [table.columns, *table.rows]
    return sum(max(len(row[column]) for row in grid) + 3 for column in range(len(table.columns)))


def _records(table: Table) -> str:
    """Every row as "column value" pairs, for terminals that are too narrow for its columns."""
    rows = [
        "; ".join(f"{column} {cell}" for column, cell in zip(table.columns, row, strict=True)) for row in table.rows
    ]
    return "\n".join([table.title, *(f"  {row}" for row in rows), *(f"- {note}" for note in table.notes)])


def _on_terminal(lines: Iterable[str], tables: Iterable[Table]) -> None:
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    console = Console(highlight=False)
    for line in lines:
        console.print(Text(line))
    for table in tables:
        if len(table.columns) > FOLDABLE and _width(table) > console.width:
            console.print(Text(f"\n{_records(table)}"))
            continue
        shown = RichTable(title=Text(table.title), title_justify="left")
        for index, column in enumerate(table.columns):
            shown.add_column(Text(column), justify="right" if index in table.right else "left", overflow="fold")
        for row in table.rows:
            shown.add_row(*(Text(cell) for cell in row))
        console.print()
        console.print(shown if table.rows else Text(table.title))
        for note in table.notes:
            console.print(Text(f"- {note}"))
