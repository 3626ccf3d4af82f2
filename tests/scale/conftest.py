"""Runs of single ranks, each made once a session; those of one depth are made together, two at a time."""

from __future__ import annotations

import pytest

from tests.scale.support.cases import CASES, RANKS, Case
from tests.scale.support.forks import in_processes
from tests.scale.support.measure import Figures, measure_here

FEW_LAYERS = 2
"""Of the normal suite, of the true width: there are buckets of every kind, and matrices with several owners."""


class Runs:
    """Figures by case and rank."""

    def __init__(self) -> None:
        self._made: dict[tuple[Case, int], Figures | BaseException] = {}

    def __call__(self, case: Case, rank: int) -> Figures:
        if (case, rank) not in self._made:
            siblings = [other.cut(case.model.layers) for other in CASES] if case.model.layers == FEW_LAYERS else [case]
            wanted = [(sibling, number) for sibling in siblings for number in RANKS]
            calls = [(sibling.plan, sibling.model, number) for sibling, number in wanted]
            self._made.update(zip(wanted, in_processes(measure_here, calls), strict=True))
        figures = self._made[case, rank]
        if isinstance(figures, BaseException):
            raise figures
        return figures


@pytest.fixture(scope="session")
def runs() -> Runs:
    return Runs()
