"""Small models, clusters and profiles whose costs can be computed by hand."""

from __future__ import annotations

from typing import Any

from deepspeed_amsp.plan.factors import ShardFactor, Sharding
from deepspeed_amsp.plan.layout import ParamSpec
from deepspeed_amsp.plan.profile import Op
from deepspeed_amsp.plan.specs import ModelSpec, UnitSpec

RATES = {Op.ALL_GATHER: 1.0, Op.REDUCE_SCATTER: 2.0, Op.ALL_REDUCE: 3.0, Op.BROADCAST: 5.0}


class Paid:
    """A profile with prices: an op's rate, times bytes, times 10 across nodes. Primes tell terms apart.

    Args:
        latency: seconds of every message on top.
        busy: part of a message's time in which the next one cannot be under way.
        host: see `Profile.host_seconds`.
    """

    def __init__(self, latency: float = 0.0, busy: float = 1.0, host: float | None = None) -> None:
        self.latency = latency
        self.share = busy
        self.host_seconds = host

    def time(self, op: Op, bytes: float, mesh: ShardFactor, extrapolate: bool = False) -> float:
        assert mesh.size > 1, "what stays on a GPU is free and never asked for"
        return self.latency + RATES[op] * bytes * (10 if mesh.s1 > 1 else 1)

    def busy(self, op: Op, bytes: float, mesh: ShardFactor) -> float:
        return self.share * self.time(op, bytes, mesh)


def matrices(*rows: int, columns: int = 8, layers: tuple[int | None, ...] = ()) -> ModelSpec:
    """One unit a matrix; ``layers`` says to which block each belongs."""
    places = layers or (None,) * len(rows)
    units = tuple(
        UnitSpec(f"m{n}", (ParamSpec(f"m{n}.weight", (size, columns)),), layer, flops_per_token=2.0 * size * columns)
        for n, (size, layer) in enumerate(zip(rows, places, strict=True))
    )
    return ModelSpec("matrices", units, hidden=columns, vocab=columns)


def sharding(p: tuple[int, int], g: tuple[int, int], os: tuple[int, int], dp: tuple[int, int] = (2, 2)) -> Sharding:
    return Sharding(ShardFactor(*p), ShardFactor(*g), ShardFactor(*os), ShardFactor(*dp))


def priced(latency: float = 0.0, busy: float = 1.0, host: float | None = None) -> Any:
    return Paid(latency, busy, host)
