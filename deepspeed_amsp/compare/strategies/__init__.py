"""How each family of strategies trains: one file a family, all with the surface of `base.Trainer`."""

from __future__ import annotations

from collections.abc import Callable

from deepspeed_amsp.compare.catalog import Family
from deepspeed_amsp.compare.strategies.base import Trainer, Work


def trainer_for(work: Work) -> Trainer:
    """Build a strategy on this rank, ready for its first step. Collective.

    Imports are here because the families do not live in one environment.
    """
    return _FAMILIES[work.strategy.family]()(work)


def _limit() -> Callable[[Work], Trainer]:
    from deepspeed_amsp.compare.strategies.limit import Limit

    return Limit


def _ddp() -> Callable[[Work], Trainer]:
    from deepspeed_amsp.compare.strategies.ddp import DDP

    return DDP


def _fsdp2() -> Callable[[Work], Trainer]:
    from deepspeed_amsp.compare.strategies.fsdp2 import FSDP2

    return FSDP2


def _zero() -> Callable[[Work], Trainer]:
    from deepspeed_amsp.compare.strategies.zero import Zero

    return Zero


def _mics() -> Callable[[Work], Trainer]:
    from deepspeed_amsp.compare.strategies.mics import MiCS

    return MiCS


def _amsp() -> Callable[[Work], Trainer]:
    from deepspeed_amsp.compare.strategies.amsp import AMSP

    return AMSP


_FAMILIES: dict[Family, Callable[[], Callable[[Work], Trainer]]] = {
    Family.LIMIT: _limit,
    Family.DDP: _ddp,
    Family.FSDP2: _fsdp2,
    Family.ZERO: _zero,
    Family.MICS: _mics,
    Family.AMSP: _amsp,
}
