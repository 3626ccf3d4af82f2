"""The table of amsp.topology.leaf_switches: from the block or from a file beside the hostfile.

The file has one leaf switch a line: host names, separated by spaces. Empty lines and what follows a "#" count
for nothing.

    node1 node2 node3      # rack A
    node4 node5

Every host reads its own file, so ranks exchange what they read, errors included: all of them go on with the
same table or stop with the same error.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from deepspeed_amsp.topology import LEAF_KEY, TopologyError

Table = tuple[tuple[str, ...], ...]

_HOST = re.compile(r"[\w.:-]+")
_LISTED = 8
"""Ranks that an error lists one by one."""


class Reading(NamedTuple):
    """What one rank read: a table, none, or why it could not be read."""

    table: Table | None
    error: str = ""


def table_name(setting: Table | str | None) -> str:
    """How an error calls the table."""
    return f"{LEAF_KEY} ({setting})" if isinstance(setting, str) else LEAF_KEY


def read_table(setting: Table | str | None) -> Reading:
    """The table itself, or that of the file at the path ``setting``. Never raises: see `agreed_table`."""
    if not isinstance(setting, str):
        return Reading(setting)
    try:
        return Reading(parse_table(Path(setting).read_text(encoding="utf-8-sig"), setting))
    except TopologyError as error:
        return Reading(None, str(error))
    except (OSError, ValueError) as error:  # ValueError: bytes that are no UTF-8, or a null in the path
        why = getattr(error, "strerror", None) or str(error)
        return Reading(None, f"{table_name(setting)} cannot be read: {why} ({Path(setting).absolute()}).")


def parse_table(text: str, path: str) -> Table:
    """The table in a file's text.

    Raises:
        TopologyError: with the path and the line, for a word that is no host name, a host that was named
            before, and a file without a host.
    """
    rows: list[tuple[str, ...]] = []
    line_of: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        row = tuple(line.partition("#")[0].split())
        for host in row:
            if not _HOST.fullmatch(host):
                raise _wrong(path, number, f"{host!r} is no host name")
            if host in line_of:
                raise _wrong(path, number, f"{host} was named in line {line_of[host]} already")
            line_of[host] = number
        if row:
            rows.append(row)
    if not rows:
        raise TopologyError(f"{table_name(path)} names no host.")
    return tuple(rows)


def agreed_table(readings: Sequence[Reading], name: str = LEAF_KEY) -> Table | None:
    """The one table that all ranks read; ``readings`` is by rank, ``name`` what errors call it.

    Raises:
        TopologyError: a rank could not read its table, or ranks read different ones.
    """
    for error in dict.fromkeys(reading.error for reading in readings if reading.error):
        where = [rank for rank, reading in enumerate(readings) if reading.error == error]
        raise TopologyError(error if len(where) == len(readings) else f"On {_ranks(where)}: {error}")
    tables = list(dict.fromkeys(reading.table for reading in readings))
    if len(tables) == 1:
        return tables[0]
    seen = "; ".join(
        f"{'none' if table is None else [list(row) for row in table]} on "
        f"{_ranks([rank for rank, reading in enumerate(readings) if reading.table == table])}"
        for table in tables
    )
    raise TopologyError(f"{name} is not the same on every rank: {seen}. Give all hosts the same table.")


def _wrong(path: str, line: int, what: str) -> TopologyError:
    return TopologyError(
        f"{table_name(path)}, line {line}: {what}; write one leaf switch a line, its host names separated by spaces."
    )


def _ranks(ranks: Sequence[int]) -> str:
    listed = ", ".join(map(str, ranks[:_LISTED]))
    more = f" and {len(ranks) - _LISTED} more" if len(ranks) > _LISTED else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {listed}{more}"
