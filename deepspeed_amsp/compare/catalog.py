"""The strategies that can be compared, by name. Pure: what they are, not how they train."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from deepspeed_amsp.compare import results
from deepspeed_amsp.config import ConfigError, read_block
from deepspeed_amsp.plan.factors import PRESETS, FactorError, preset
from deepspeed_amsp.plan.resolve import Plan, make_plan


class CatalogError(ValueError):
    """A strategy that is unknown, or that a world cannot use; one line."""


class Family(str, Enum):
    """Whose code trains."""

    LIMIT = "limit"
    DDP = "ddp"
    FSDP2 = "fsdp2"
    ZERO = "zero"
    MICS = "mics"
    AMSP = "amsp"


@dataclass(frozen=True)
class Strategy:
    """One row of the tables. plan and block: of our engine only; the block is what its ds_config holds."""

    name: str
    title: str
    family: Family
    block: Mapping[str, Any] | None = None
    plan: Plan | None = None

    @property
    def environment(self) -> str:
        """Where it runs: DeepSpeed's newest supported release, or that of MiCS."""
        return "mics" if self.family is Family.MICS else "main"


BUILT_IN: dict[str, tuple[str, Family]] = {
    results.LIMIT: ("no communication (limit)", Family.LIMIT),
    results.DDP: ("torch DDP", Family.DDP),
    results.FSDP2: ("torch FSDP2, fully sharded", Family.FSDP2),
    results.HSDP: ("torch FSDP2, HSDP", Family.FSDP2),
    results.ZERO1: ("DeepSpeed ZeRO-1", Family.ZERO),
    results.ZERO2: ("DeepSpeed ZeRO-2", Family.ZERO),
    results.ZERO3: ("DeepSpeed ZeRO-3", Family.ZERO),
    results.HPZ: ("DeepSpeed ZeRO++ hpZ", Family.ZERO),
    results.MICS: ("DeepSpeed MiCS", Family.MICS),
}
"""What others wrote, and the same work without communication."""

_NEEDS_NODES = {
    results.HSDP: "shards within a node and replicates across nodes",
    results.HPZ: "keeps a second copy of the parameters within a node",
    results.MICS: "shards within a node and replicates across nodes",
}


def built_in(name: str, shape: tuple[int, int]) -> Strategy:
    """A strategy by its name, for (ranks of a node, nodes).

    Raises:
        CatalogError: there is none, or the world is too small for it.
    """
    if name not in BUILT_IN:
        close = difflib.get_close_matches(name, BUILT_IN, n=1, cutoff=0.5)
        hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(BUILT_IN)}"
        ours = ' One of our engine is written as {name: ..., amsp: {"sharding": ...}}.'
        raise CatalogError(f"unknown strategy {name!r}; {hint}{ours}")
    ranks, nodes = shape
    if name in _NEEDS_NODES and (ranks < 2 or nodes < 2):
        raise CatalogError(f"{name} {_NEEDS_NODES[name]}: it needs at least 2 nodes of 2 ranks, not {nodes} of {ranks}")
    title, family = BUILT_IN[name]
    return Strategy(name, title, family)


def from_block(name: str, title: str | None, block: Mapping[str, Any], shape: tuple[int, int]) -> Strategy:
    """A strategy of our engine.

    Raises:
        CatalogError: the name is taken or not allowed, or the block is not legal in this world.
    """
    if not re.fullmatch(r"amsp(-[a-z0-9_.+-]+)?", name):
        raise CatalogError(f"{name!r}: strategies of our engine are called amsp, or amsp- and lower-case words")
    try:
        read = read_block({"amsp": dict(block)})
        if read is None:
            raise CatalogError(f"{name}: its amsp block is switched off")
        plan = make_plan(read, shape[0] * shape[1], shape[0])
        as_whom = name.removeprefix(f"{results.AMSP}-")
        if as_whom in PRESETS and plan.sharding != preset(as_whom, plan.sharding.data_parallel):
            raise CatalogError(f"{name}: is a name for the factors of {as_whom}, not for {short(plan)}")
    except (ConfigError, FactorError) as error:
        raise CatalogError(f"{name}: {' '.join(str(error).split())}") from error
    return Strategy(name, title or f"AMSP {short(plan)}", Family.AMSP, dict(block), plan)


def short(plan: Plan) -> str:
    """Factors as the documents write them, (1,1,2x1), and what differs from a plan's defaults."""
    factors = (plan.sharding.parameters, plan.sharding.gradients, plan.sharding.optimizer_states)
    text = ",".join("1" if factor.size == 1 else f"{factor.s0}x{factor.s1}" for factor in factors)
    overlap = str(plan.overlap)
    off = "" if overlap.count("+") == 3 else f", overlap {overlap}"
    return f"({text}){' two-stage' if plan.hierarchical else ''}{off}"
