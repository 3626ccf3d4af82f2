"""Time of one collective on one mesh as a function of message size: measured points, and what lies between them.

Time over bytes is close to affine, so that time is what is interpolated, never bandwidth (t is linear between
points; interpolating bandwidth between 1 MB and 64 MB is off by a factor of up to 2.4 near 8 MB).
Pure arithmetic. Bytes are those of the whole message, times seconds.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate
from math import log2
from typing import NamedTuple

from deepspeed_amsp.plan.factors import ShardFactor


class ProfileError(ValueError):
    """A profile that cannot be used, or a question that it cannot answer; one line that names file or entry."""


class Op(str, Enum):
    """A collective. Its bytes: the gathered size, the input that is reduced and scattered, the reduced tensor, the
    broadcast tensor."""

    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_REDUCE = "all_reduce"
    BROADCAST = "broadcast"


class Point(NamedTuple):
    """A measurement: seconds (the median) for a message of ``bytes``, and the interquartile range of the seconds.

    each: of several such messages issued together, how much later than the one before each is done. As long as
    ``seconds`` where nothing of one message overlaps with the next; None where that was not measured.
    """

    bytes: int
    seconds: float
    spread: float = 0.0
    each: float | None = None

    def divided(self, speed: float) -> Point:
        """On a link ``speed`` times as fast."""
        each = None if self.each is None else self.each / speed
        return Point(self.bytes, self.seconds / speed, self.spread / speed, each)


@dataclass(frozen=True)
class Curve:
    """Piecewise linear and never falling: through (at[i], seconds[i]), at[0] = 0, and ``slope`` s/byte behind the last.

    seconds[0] is the latency, the limit for small messages; ``largest`` is the largest message that was measured.
    """

    at: tuple[float, ...]
    seconds: tuple[float, ...]
    slope: float
    largest: float = float("inf")

    @classmethod
    def through(cls, points: Sequence[Point]) -> Curve:
        """Below the first point the line through the first two goes on, never below 0; above the last, that of the
        last two. Disturbances only make messages slower, so what a larger one took is enough for the smaller ones.

        One point alone is taken for pure latency below it and for pure bandwidth above.
        """
        at = [float(point.bytes) for point in points]
        seconds = [*accumulate((point.seconds for point in reversed(points)), min)][::-1]
        if len(points) == 1:
            return cls((0.0, at[0]), (seconds[0], seconds[0]), seconds[0] / at[0], at[0])
        first = (seconds[1] - seconds[0]) / (at[1] - at[0])
        last = (seconds[-1] - seconds[-2]) / (at[-1] - at[-2])
        return cls((0.0, *at), (max(seconds[0] - first * at[0], 0.0), *seconds), last, at[-1])

    def __call__(self, size: float) -> float:
        """Seconds for a message of ``size`` bytes."""
        index = bisect_right(self.at, size) - 1
        if index == len(self.at) - 1:
            return self.seconds[-1] + self.slope * (size - self.at[-1])
        low, high = self.at[index], self.at[index + 1]
        part = (size - low) / (high - low)
        # In this form no rounding makes it leave the two, or fall.
        return self.seconds[index] + part * (self.seconds[index + 1] - self.seconds[index])

    def stretched(self, latency: float, rest: float) -> Curve:
        """The latency times one factor, what comes on top of it times the other."""
        base = self.seconds[0]
        seconds = tuple(base * latency + (value - base) * rest for value in self.seconds)
        return Curve(self.at, seconds, self.slope * rest, self.largest)


def _mixed(one: Curve, factor: float, other: Curve, weight: float) -> Curve:
    """factor * one + weight * other, exactly: a sum of piecewise linear curves is one."""
    at = tuple(sorted({*one.at, *other.at}))
    seconds = tuple(factor * one(size) + weight * other(size) for size in at)
    slope = factor * one.slope + weight * other.slope
    return Curve(at, seconds, slope, min(one.largest, other.largest))


Curves = Mapping[ShardFactor, Curve]


def between(op: Op, curves: Curves, mesh: ShardFactor) -> Curve | None:
    """The curve of a mesh inside the data; None outside.

    The ring model t = (p - 1) (a + b bytes / p) for a group of p GPUs makes t / (p - 1) linear in 1 / p, between
    neighbours with the same GPUs in a node and other nodes (or both in one node). Where a group has other GPUs of
    each node, the siblings on that node's NICs are other too: b is as 1 / s0, t / (p - 1) linear in 1 / (p s0).
    A Broadcast out of p that are issued together takes t = a (p - 1) / p + b bytes, linear in 1 / p either way.
    Neighbours are both in one node or both across nodes, since the two have nothing to do with each other.
    """
    if mesh in curves:
        return curves[mesh]
    if mesh.s1 == 1:
        return _along(op, curves, mesh, lambda other: other.s1 == 1, lambda m: m.s0)
    across = {other: curve for other, curve in curves.items() if other.s1 > 1}
    found = _along(op, across, mesh, lambda other: other.s0 == mesh.s0, lambda m: m.s1)
    if found is not None:
        return found
    column: dict[ShardFactor, Curve] = {}
    for s0 in {other.s0 for other in across} - {mesh.s0}:
        target = ShardFactor(s0, mesh.s1)
        row = across.get(target) or _along(op, across, target, lambda other, s0=s0: other.s0 == s0, lambda m: m.s1)  # type: ignore[misc]
        if row is not None:
            column[target] = row
    return _along(op, column, mesh, lambda other: True, lambda m: m.s0)


def _along(
    op: Op,
    curves: Curves,
    mesh: ShardFactor,
    eligible: Callable[[ShardFactor], bool],
    place: Callable[[ShardFactor], int],
) -> Curve | None:
    """Between the nearest eligible meshes on both sides of ``mesh``."""
    others = [other for other in curves if eligible(other)]
    below = max((other for other in others if place(other) < place(mesh)), key=place, default=None)
    above = min((other for other in others if place(other) > place(mesh)), key=place, default=None)
    if below is None or above is None:
        return None
    part = (_load(op, mesh) - _load(op, above)) / (_load(op, below) - _load(op, above))
    factor, weight = part * _hops(op, mesh) / _hops(op, below), (1 - part) * _hops(op, mesh) / _hops(op, above)
    return _mixed(curves[below], factor, curves[above], weight)


def _load(op: Op, mesh: ShardFactor) -> float:
    """What t / (p - 1), or a Broadcast's t, is linear in."""
    return 1 / (mesh.size * mesh.s0) if mesh.s1 > 1 and op is not Op.BROADCAST else 1 / mesh.size


def _hops(op: Op, mesh: ShardFactor) -> float:
    return 1.0 if op is Op.BROADCAST else mesh.size - 1.0


def nearest(curves: Curves, mesh: ShardFactor) -> ShardFactor | None:
    """The measured mesh to go on from when ``mesh`` is outside the data; None if none is of its kind (in one node,
    across nodes). One with as many GPUs in a node is preferred, then the nearest in size."""
    alike = [other for other in curves if (other.s1 > 1) == (mesh.s1 > 1)]

    def distance(other: ShardFactor) -> tuple[float, float, int]:
        return (abs(log2(other.s0 / mesh.s0)), abs(log2(other.s1 / mesh.s1)), other.size)

    return min(alike, key=distance, default=None)


def beyond(op: Op, curve: Curve, measured: ShardFactor, mesh: ShardFactor) -> Curve:
    """A mesh outside the data, by the ring model from the nearest ``measured`` one: the latency grows with the hops,
    p - 1; the rest with (p - 1) / p and, across nodes, with the siblings on a node's NICs, 1 / s0."""
    ring = (mesh.size - 1) / mesh.size * measured.size / (measured.size - 1)
    share = measured.s0 / mesh.s0 if mesh.s1 > 1 else 1.0
    if op is Op.BROADCAST:
        return curve.stretched(ring, share)
    return curve.stretched((mesh.size - 1) / (measured.size - 1), ring * share)
