"""A profile as JSON: what stands in the file, and every reason to refuse it."""

from __future__ import annotations

import json
import math
import os
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from deepspeed_amsp.plan.curves import Op, Point, ProfileError
from deepspeed_amsp.plan.factors import ShardFactor
from deepspeed_amsp.plan.links import Links

if TYPE_CHECKING:
    from deepspeed_amsp.plan.profile import Profile

VERSION = 1
LARGE = 1_000_000
"""Bytes from which a message's time says something about bandwidth."""
SLOWEST, FASTEST = 1e6, 1e14
"""Bytes/s: what is slower or faster was not written in seconds."""

TEXTS = ("name", "host", "backend", "date", "notes")
NUMBERS = ("peak_flops", "peak_flops_fp32", "gpu_memory", "memory_bandwidth", "host_seconds")
KEYS = ("version", "kind", "gpus_per_node", "nodes", "versions", "entries", "links", *TEXTS, *NUMBERS)


Figure = Literal["seconds", "each"]


@dataclass(frozen=True)
class Entry:
    """What was measured of one collective on one mesh, smallest message first."""

    op: Op
    mesh: ShardFactor
    points: tuple[Point, ...]

    def __str__(self) -> str:
        """ "all_gather on 2x1"."""
        return f"{self.op.value} on {self.mesh}"

    def divided(self, speed: float) -> Entry:
        """On links ``speed`` times as fast."""
        return Entry(self.op, self.mesh, tuple(point.divided(speed) for point in self.points))

    def of(self, figure: Figure) -> tuple[Point, ...]:
        """Its points with another of their figures as their seconds; see `Point`."""
        if figure == "each":
            return tuple(
                Point(point.bytes, point.seconds if point.each is None else point.each) for point in self.points
            )
        return self.points

    def with_point(self, point: Point) -> Entry:
        """With one more measurement, which replaces one of the same size."""
        others = [other for other in self.points if other.bytes != point.bytes]
        return Entry(self.op, self.mesh, tuple(sorted([*others, point])))


def check(name: str, gpus_per_node: int, nodes: int, entries: tuple[Entry, ...], links: Links | None) -> None:
    """Raises ProfileError, in one line that names the entry; whether all collectives are there is `read`'s to ask."""
    where = f"profile {name}"
    for field, value in (("gpus_per_node", gpus_per_node), ("nodes", nodes)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ProfileError(f"{where}: {field} must be a whole number of at least 1, not {value!r}.")
    if (links is None) == (not entries):
        raise ProfileError(f"{where}: has {'neither' if links is None else 'both'} entries (measured) and links.")
    seen: set[tuple[Op, ShardFactor]] = set()
    for entry in entries:
        if (entry.op, entry.mesh) in seen:
            raise ProfileError(f"{where}: {entry} stands there twice.")
        seen.add((entry.op, entry.mesh))
        if not (1 <= entry.mesh.s0 <= gpus_per_node and entry.mesh.s1 >= 1 and entry.mesh.size > 1):
            raise ProfileError(f"{where}: {entry}: no group of several GPUs is that with {gpus_per_node} GPUs a node.")
        _check_points(f"{where}: {entry}", entry.points)


def _check_points(where: str, points: tuple[Point, ...]) -> None:
    if not points:
        raise ProfileError(f"{where}: has no points.")
    before = 0
    for point in points:
        _check_point(where, point)
        if point.bytes <= before:
            how = "twice" if point.bytes == before else f"after {before}; sizes must ascend"
            raise ProfileError(f"{where}: {point.bytes} bytes stand there {how}.")
        before = point.bytes


def _check_point(where: str, point: Point) -> None:
    size, seconds, spread, each = point
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ProfileError(f"{where}: bytes must be a whole number of at least 1, not {size!r}.")
    where = f"{where}, {size} bytes"
    for name, value in (("seconds", seconds), ("spread", spread), ("each", seconds if each is None else each)):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise ProfileError(f"{where}: {name} must be a number, not {value!r}.")
    if seconds <= 0 or spread < 0:
        raise ProfileError(f"{where}: seconds must be above 0 and spread not below 0, not {seconds!r} and {spread!r}.")
    if each is not None and not 0 < each <= seconds:
        raise ProfileError(f"{where}: each must be above 0 and at most seconds, {seconds!r}, not {each!r}.")


def check_plausible(entries: tuple[Entry, ...]) -> None:
    """Raises ProfileError for times that cannot be seconds; not for profiles that a calculation made."""
    for entry in entries:
        for size, seconds, *_ in entry.points:
            if size >= LARGE and not SLOWEST <= size / seconds <= FASTEST:
                raise ProfileError(
                    f"{entry}, {size} bytes: {seconds!r} s are {size / seconds / 1e6:.3g} MB/s, which no network has "
                    f"({SLOWEST / 1e6:g} MB/s to {FASTEST / 1e12:g} TB/s): times are in seconds, not ms or us."
                )


def as_dict(profile: Profile) -> dict[str, object]:
    """As JSON values."""
    values: dict[str, object] = {"version": VERSION, "name": profile.name, "kind": profile.kind}
    values |= {"gpus_per_node": profile.gpus_per_node, "nodes": profile.nodes}
    values |= {key: getattr(profile, key) for key in (*TEXTS, *NUMBERS) if getattr(profile, key) and key != "name"}
    values["versions"] = dict(profile.versions)
    if profile.links is not None:
        values["links"] = dict(vars(profile.links))
    else:
        values["entries"] = [
            {"op": entry.op.value, "mesh": entry.mesh.as_list(), "points": [_values(point) for point in entry.points]}
            for entry in profile.entries
        ]
    return values


def _values(point: Point) -> dict[str, float]:
    return {name: value for name, value in point._asdict().items() if value is not None}


def write(values: dict[str, object], path: Path) -> None:
    """Write JSON so that a reader, or a run that was interrupted, finds the old file or the whole new one."""
    text = json.dumps(values, indent=1, allow_nan=False) + "\n"
    path = path.resolve()  # a link stays one
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        # mkstemp makes files that nobody else may read.
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(name, 0o666 & ~mask)
        os.replace(name, path)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(name)
        raise


def read(path: Path, complete: bool = True) -> dict[str, Any]:
    """The arguments of a `Profile`.

    Args:
        complete: refuse a file without some collective; a measurement that was interrupted is resumed without.

    Raises:
        ProfileError: one line that names the file, and the entry where it is one's.
    """
    try:
        values = _read_json(path)
        found = _fields(values)
        check(found["name"], found["gpus_per_node"], found["nodes"], found["entries"], found["links"])
        check_plausible(found["entries"])
        missing = [op.value for op in Op if op not in {entry.op for entry in found["entries"]}]
        if complete and found["links"] is None and missing:
            raise ProfileError(f"has no measurement of {', '.join(missing)}; amsp profile --resume would add it.")
    except ProfileError as error:
        raise ProfileError(f"{path}: {error}") from error
    return found


def _read_json(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ProfileError("no such file.") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ProfileError(f"cannot be read: {error}.") from error
    if not text.strip():
        raise ProfileError("is empty.")
    try:
        values = json.loads(text, parse_constant=_no_constant, object_pairs_hook=_no_duplicates)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ProfileError(f"is no JSON, or was cut off: {error}.") from error
    if not isinstance(values, dict):
        raise ProfileError(f"must hold a JSON object, not {type(values).__name__}.")
    return values


def _no_constant(word: str) -> float:
    raise ProfileError(f"holds {word}, which is no number.")


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ProfileError(f"{key!r} stands twice in one object.")
        found[key] = value
    return found


def _fields(values: dict[str, Any]) -> dict[str, Any]:
    version = values.get("version")
    if isinstance(version, bool) or version != VERSION:
        raise ProfileError(f"is version {version!r} of a profile; this package reads version {VERSION}.")
    unknown = sorted(set(values) - set(KEYS))
    if unknown:
        raise ProfileError(f"unknown key {unknown[0]!r}; there are {', '.join(KEYS)}.")
    kind = values.get("kind")
    if kind not in ("measured", "analytic"):
        raise ProfileError(f'kind must be "measured" or "analytic", not {kind!r}.')
    found: dict[str, Any] = {name: _typed(values, name, str, "") for name in TEXTS}
    found |= {name: values.get(name) for name in ("gpus_per_node", "nodes")}
    found |= {name: _above_zero(values, name) for name in NUMBERS}
    found["versions"] = tuple((str(k), str(v)) for k, v in _typed(values, "versions", dict, {}).items())
    entries = _typed(values, "entries", list, [])
    found["entries"] = tuple(_entry(index, entry) for index, entry in enumerate(entries))
    found["links"] = None
    if kind == "analytic":
        try:
            found["links"] = Links(**_typed(values, "links", dict, {}))
        except TypeError as error:
            raise ProfileError(f"links: {error}.") from error
    elif "links" in values:
        raise ProfileError("a measured profile has no links.")
    return found


def _typed(values: dict[str, Any], key: str, kind: type, default: Any) -> Any:
    value = values.get(key, default)
    if not isinstance(value, kind):
        raise ProfileError(f"{key} must be a {kind.__name__}, not {value!r}.")
    return value


def _above_zero(values: dict[str, Any], key: str) -> float | None:
    value = values.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ProfileError(f"{key} must be a number above 0, not {value!r}.")
    return float(value)


def _entry(index: int, values: Any) -> Entry:
    where = f"entry {index}"
    if not isinstance(values, dict) or set(values) != {"op", "mesh", "points"}:
        raise ProfileError(f"{where}: must be an object of op, mesh and points.")
    try:
        op = Op(values["op"])
    except ValueError as error:
        raise ProfileError(
            f"{where}: unknown op {values['op']!r}; there are {', '.join(o.value for o in Op)}."
        ) from error
    mesh = values["mesh"]
    if not isinstance(mesh, list) or len(mesh) != 2 or not all(type(factor) is int for factor in mesh):
        raise ProfileError(f"{where} ({op.value}): mesh must be [GPUs in a node, nodes], not {mesh!r}.")
    points = values["points"]
    if not isinstance(points, list):
        raise ProfileError(f"{where} ({op.value}): points must be a list.")
    for point in points:
        if not isinstance(point, dict) or not {"bytes", "seconds"} <= set(point) <= set(Point._fields):
            raise ProfileError(f"{where} ({op.value}): a point has {', '.join(Point._fields)}, not {point!r}.")
    return Entry(op, ShardFactor(*mesh), tuple(Point(**point) for point in points))
