"""Checks of a trace against the format, and readers of what it says."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

Event = dict[str, Any]
TICK_US = 0.002
"""Stamps are written in nanoseconds; a sum of two floats may be off by one."""


def load(path: Path) -> dict[str, Any]:
    """The document, after checking it against Chrome's trace event format."""
    document = json.loads(path.read_text())
    assert set(document) == {"traceEvents", "displayTimeUnit", "otherData"}
    threads: dict[tuple[int, int], list[Event]] = defaultdict(list)
    for event in document["traceEvents"]:
        assert isinstance(event["name"], str) and event["name"]
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int)
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "process_sort_index", "thread_name", "thread_sort_index")
            continue
        assert event["ph"] == "X" and event["dur"] >= 0 and isinstance(event["ts"], float) and event["cat"]
        threads[event["pid"], event["tid"]].append(event)
    assert set(threads) <= set(row_names(document))
    for events in threads.values():
        _check_nesting(events)
    return document


def _check_nesting(events: list[Event]) -> None:
    """Two slices of a thread are apart, or one is inside the other."""
    around: list[float] = []
    for event in sorted(events, key=lambda one: (one["ts"], -one["dur"])):
        begin, end = event["ts"], event["ts"] + event["dur"]
        while around and around[-1] <= begin + TICK_US:
            around.pop()
        assert not around or end <= around[-1] + TICK_US, f"{event['name']} reaches out of the slice around it"
        around.append(end)


def row_names(document: dict[str, Any]) -> dict[tuple[int, int], str]:
    """(rank, tid) -> the row, without the number of the lane."""
    return {
        (event["pid"], event["tid"]): event["args"]["name"].split(" (")[0]
        for event in document["traceEvents"]
        if event["ph"] == "M" and event["name"] == "thread_name"
    }


def slices(document: dict[str, Any], rank: int, row: str) -> list[Event]:
    """The slices of a row with all its lanes, by begin."""
    names = row_names(document)
    found = [
        event
        for event in document["traceEvents"]
        if event["ph"] == "X" and event["pid"] == rank and names[rank, event["tid"]] == row
    ]
    return sorted(found, key=lambda event: event["ts"])
