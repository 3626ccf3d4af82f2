"""A profile: how long collectives take on a cluster, t(op, bytes, s0 x s1). Measured, or from an analytic model.

    profile = find_profile("a800-hdr")                      (builtin_profiles) a built-in one or a file
    profile = Profile.load("profile.json")
    profile.time(Op.ALL_GATHER, 64e6, ShardFactor(8, 4))    seconds

Pure: imports neither torch nor deepspeed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from pathlib import Path

from deepspeed_amsp.plan import profile_file
from deepspeed_amsp.plan.curves import Curve, Curves, Op, Point, ProfileError, between, beyond, nearest
from deepspeed_amsp.plan.factors import ShardFactor, divisors
from deepspeed_amsp.plan.links import Links

__all__ = ["Entry", "Links", "Op", "Point", "Profile", "ProfileError", "meshes_needed"]

Entry = profile_file.Entry
Figure = profile_file.Figure


def meshes_needed(data_parallel: ShardFactor) -> list[ShardFactor]:
    """The meshes of every group of every legal plan on this cluster, in-node ones first; the lonely 1x1 left out.

    An axis is a ratio of two members of a chain of legal factors. (R, s1) over (R / s0, 1) is s0 x s1 for all
    divisors s0 of R and s1 of N, and nothing else comes out; the parts of two-stage collectives, s0 x 1 and 1 x s1,
    are among them.
    """
    meshes = [ShardFactor(s0, s1) for s1 in divisors(data_parallel.s1) for s0 in divisors(data_parallel.s0)]
    return [mesh for mesh in meshes if mesh.size > 1]


@dataclass(frozen=True)
class Profile:
    """Times of collectives on a cluster of ``nodes`` x ``gpus_per_node``, all sibling groups active together.

    Exactly one of ``entries`` (measured) and ``links`` (analytic) is given. A Broadcast's time is that of one out of
    as many as the group has ranks, one from each, issued together: the time of all of them divided by their number.

    host: what was measured or where the numbers are from. peak_flops, peak_flops_fp32: FLOP/s of a GPU in 16 bits and
    in fp32. gpu_memory: its bytes. memory_bandwidth: bytes/s that an optimizer's update reaches on it. host_seconds:
    for how long a collective keeps the thread that computes, which issues it and waits for it (gloo); None where a
    device computes, and its host is ahead of it.
    notes: for an analytic profile, what it rests on. extrapolates: whether meshes outside the data are answered for, by
    the ring model; not kept in files.
    """

    name: str
    gpus_per_node: int
    nodes: int
    entries: tuple[Entry, ...] = ()
    links: Links | None = None
    host: str = ""
    backend: str = ""
    versions: tuple[tuple[str, str], ...] = ()
    date: str = ""
    peak_flops: float | None = None
    peak_flops_fp32: float | None = None
    gpu_memory: float | None = None
    memory_bandwidth: float | None = None
    host_seconds: float | None = None
    notes: str = ""
    extrapolates: bool = False
    _curves: dict[tuple[Op, int, int, bool, Figure], Curve] = field(
        default_factory=dict, init=False, repr=False, compare=False, hash=False
    )
    _measured: dict[tuple[Op, Figure], Curves] = field(
        default_factory=dict, init=False, repr=False, compare=False, hash=False
    )

    def __post_init__(self) -> None:
        """Raises ProfileError, naming the entry."""
        profile_file.check(self.name, self.gpus_per_node, self.nodes, self.entries, self.links)

    @property
    def kind(self) -> str:
        """ "measured" or "analytic"."""
        return "measured" if self.links is None else "analytic"

    @property
    def data_parallel(self) -> ShardFactor:
        """(gpus_per_node, nodes)."""
        return ShardFactor(self.gpus_per_node, self.nodes)

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Read a file. Raises ProfileError in one line that names the file and the entry."""
        return cls(**profile_file.read(Path(path)))

    def save(self, path: str | Path) -> None:
        """Write a file in one go: a reader sees the old one or the whole new one. Raises ProfileError, OSError."""
        profile_file.write(self.as_dict(), Path(path))

    def as_dict(self) -> dict[str, object]:
        """As JSON values, times in seconds."""
        return profile_file.as_dict(self)

    def time(self, op: Op, bytes: float, mesh: ShardFactor, extrapolate: bool = False) -> float:
        """Seconds of a collective with all sibling groups active; 0 for an empty message or a lonely rank.

        Never falls with bytes. Above the largest measured message it goes on affinely; `extrapolated` says so.

        Args:
            bytes: the whole message, see `Op`.
            mesh: (GPUs of the group in one node, nodes of the group).
            extrapolate: for a mesh outside the data go on by the ring model from the nearest one, as a profile that
                ``extrapolates`` always does.

        Raises:
            ProfileError: mesh outside the data (or, whatever extrapolate says, without any mesh of its kind).
        """
        return self._figure(op, bytes, mesh, extrapolate, "seconds")

    def busy(self, op: Op, bytes: float, mesh: ShardFactor) -> float:
        """Seconds for which a collective keeps its links from the next one, at most what it takes: where one waits for
        an answer, or sends in one direction only, the next one can be under way. What it takes, where nobody has
        measured messages that are issued together; analytic profiles have one after the other. Raises as `time`."""
        return self._figure(op, bytes, mesh, False, "each")

    def _figure(self, op: Op, bytes: float, mesh: ShardFactor, extrapolate: bool, figure: Figure) -> float:
        if not 0 <= bytes < math.inf:
            raise ProfileError(f"profile {self.name}: {op.value} of {bytes!r} bytes makes no sense.")
        if bytes == 0 or mesh.size == 1:
            return 0.0
        extrapolate = extrapolate or self.extrapolates
        key = (op, mesh.s0, mesh.s1, extrapolate, figure)
        curve = self._curves.get(key)
        if curve is None:
            curve = self._curves[key] = self._curve(op, mesh, extrapolate, figure)
        return curve(bytes)

    def extrapolated(self, op: Op, bytes: float, mesh: ShardFactor) -> str:
        """Why time(..., extrapolate=True) goes beyond what was measured; "" if it does not."""
        if self.links is not None or bytes == 0 or mesh.size == 1:
            return ""
        curves = self._by_mesh(op)
        curve = between(op, curves, mesh)
        if curve is None:
            return f"{op.value} on {mesh} is outside the measured meshes ({', '.join(map(str, curves))})"
        if bytes > curve.largest:
            return (
                f"{op.value} on {mesh}: {bytes:.3g} bytes are above the largest measured message, {curve.largest:.3g}"
            )
        return ""

    def scaled(self, inter: float = 1.0, intra: float = 1.0) -> Profile:
        """With other links between nodes (``inter`` times as fast) and inside them (``intra``), to see what depends on
        them. Analytic: the bandwidths change. Measured: all times of meshes across nodes are divided by ``inter``,
        those of meshes in a node by ``intra``, latency included, since the parts cannot be told apart."""
        for name, value in (("inter", inter), ("intra", intra)):
            if not 0 < value < math.inf:
                raise ProfileError(f"profile {self.name}: {name} must be a number above 0, not {value!r}.")
        name = f"{self.name} (inter x{inter:g}, intra x{intra:g})"
        if self.links is not None:
            return replace(self, name=name, links=self.links.scaled(inter, intra))
        entries = tuple(entry.divided(inter if entry.mesh.s1 > 1 else intra) for entry in self.entries)
        return replace(self, name=name, entries=entries)

    def for_cluster(self, data_parallel: ShardFactor) -> Profile:
        """This profile for planning on a cluster of (gpus_per_node, nodes).

        An analytic one fits any; the bandwidth of a node's NICs stays. A measured one knows how many siblings shared
        a node's NICs, so gpus_per_node must be its own; meshes over more nodes than measured need extrapolation.

        Raises:
            ProfileError: measured with another gpus_per_node.
        """
        if self.links is None and data_parallel.s0 != self.gpus_per_node:
            raise ProfileError(
                f"profile {self.name} was measured with {self.gpus_per_node} GPUs a node, not {data_parallel.s0}: "
                f"measure this cluster (amsp profile)."
            )
        return replace(self, gpus_per_node=data_parallel.s0, nodes=data_parallel.s1)

    def _by_mesh(self, op: Op, figure: Figure = "seconds") -> Curves:
        key = (op, figure)
        if key not in self._measured:
            self._measured[key] = {e.mesh: Curve.through(e.of(figure)) for e in self.entries if e.op is op}
        return self._measured[key]

    def _curve(self, op: Op, mesh: ShardFactor, extrapolate: bool, figure: Figure) -> Curve:
        if mesh.s0 < 1 or mesh.s1 < 1 or mesh.s0 > self.gpus_per_node:
            raise ProfileError(f"profile {self.name}: no group is {mesh} with {self.gpus_per_node} GPUs a node.")
        if self.links is not None:
            return self.links.curve(op, mesh, self.gpus_per_node)
        curves = self._by_mesh(op, figure)
        curve = between(op, curves, mesh)
        if curve is not None:
            return curve
        start = nearest(curves, mesh)
        if start is None or not extrapolate:
            raise ProfileError(
                f"profile {self.name}: {op.value} on {mesh} is outside the measured meshes "
                f"({', '.join(map(str, curves)) or 'none'}): measure it (amsp profile --full)"
                f"{'' if start is None else ', or allow extrapolation (--extrapolate)'}."
            )
        return beyond(op, curves[start], start, mesh)
