"""The real engine as single ranks of 1024: what it sends, in which order, what it holds, and that nothing races."""

from __future__ import annotations

import os
from collections import Counter

import pytest

from tests.scale.conftest import FEW_LAYERS, Runs
from tests.scale.formulas import Expected
from tests.scale.support.cases import CASES, RANKS, Case
from tests.scale.support.measure import Figures

NIGHTLY = os.environ.get("AMSP_NIGHTLY") == "1"
FEW = [pytest.param(case.cut(FEW_LAYERS), id=str(case.cut(FEW_LAYERS))) for case in CASES]
FULL = [
    pytest.param(
        case,
        id=str(case),
        marks=[pytest.mark.slow, pytest.mark.skipif(not NIGHTLY, reason="the whole models: AMSP_NIGHTLY=1")],
    )
    for case in CASES
]
cases = pytest.mark.parametrize("case", FEW + FULL)
ranks = pytest.mark.parametrize("rank", RANKS)


@cases
@ranks
def test_a_step_issues_what_the_formulas_say(case: Case, rank: int, runs: Runs) -> None:
    found = Counter((e.op, e.purpose, e.axis, len(e.group), e.bytes) for e in runs(case, rank).schedule)
    assert found == Expected(case.plan, case.model, rank).schedule()


@cases
@ranks
def test_states_at_rest_are_what_the_formulas_say(case: Case, rank: int, runs: Runs) -> None:
    assert runs(case, rank).at_rest == Expected(case.plan, case.model, rank).at_rest()


@cases
@ranks
def test_buffers_stay_within_their_limits(case: Case, rank: int, runs: Runs) -> None:
    """At their peaks, during a step that is not the first."""
    peaks, limits = runs(case, rank).peaks, Expected(case.plan, case.model, rank).limits()
    over = {name: (peaks[name], limit) for name, limit in limits.items() if peaks.get(name, 0) > limit}
    assert not over, f"bytes (held, allowed): {over}"


@cases
def test_owner_loads_add_up_to_the_model(case: Case, runs: Runs) -> None:
    """The oracle itself: every element has one owner."""
    s = case.plan.sharding
    replica = [Expected(case.plan, case.model, rank) for rank in range(s.s_os)]
    assert sum(e.at_rest()["masters"] for e in replica) == 4 * sum(unit.size for unit in replica[0].units)


@cases
@ranks
def test_the_log_is_what_the_process_groups_saw(case: Case, rank: int, runs: Runs) -> None:
    """The log says what was meant; a ReduceScatter with unequal sections is one Reduce for each of them."""
    figures = runs(case, rank)
    logged, seen = Counter[tuple[int, ...]](), Counter[tuple[int, ...]]()
    for entry in figures.schedule:
        logged[entry.group] += entry.bytes
    for issued in figures.issued:
        seen[issued.ranks] += issued.bytes
    assert seen == logged


@cases
@ranks
def test_the_host_reads_nothing(case: Case, rank: int, runs: Runs) -> None:
    """As on an accelerator, without a check for overflow; the norm and the clip stay on the device."""
    assert runs(case, rank).host_reads == {}


@cases
def test_ranks_agree_on_the_order_of_what_they_share(case: Case, runs: Runs) -> None:
    """Not only within each group: two ranks that meet in several groups issue all of it in one order."""
    for left in RANKS:
        for right in RANKS:
            both = {left, right}
            mine, theirs = ([e for e in runs(case, r).schedule if both <= set(e.group)] for r in (left, right))
            assert mine == theirs, f"ranks {left} and {right}"
            assert mine, "all ranks meet at least in the agreement"


@cases
def test_corresponding_groups_carry_the_same_in_the_same_order(case: Case, runs: Runs) -> None:
    """Of one axis, on every rank. Only over replicas, and across nodes, each owner sends sections of its own."""
    sequences = {rank: by_axis(runs(case, rank)) for rank in RANKS}
    for rank in RANKS:
        replicated = sequences[rank].pop("replicate", [])
        if case.plan.reduce == "two_level":
            expected = Expected(case.plan, case.model, rank).replicated_sections()
            assert [size for _, _, size in replicated] == expected
        for axis in ("outer_cross", "optim_cross"):
            sequences[rank].pop(axis, None)
        assert sequences[rank] == sequences[RANKS[0]]


def by_axis(figures: Figures) -> dict[str, list[tuple[str, str, int]]]:
    sequences: dict[str, list[tuple[str, str, int]]] = {}
    for entry in figures.schedule:
        sequences.setdefault(entry.axis, []).append((entry.op, entry.label, entry.bytes))
    return sequences


@cases
@ranks
def test_it_fits_the_budget(case: Case, rank: int, runs: Runs) -> None:
    """Schedule and memory come from one run, of at most 30 s for a whole model. What is measured is processor time,
    which other work on the same core may double."""
    figures = runs(case, rank)
    assert figures.cpu_seconds < 60
    assert figures.rss_bytes < 2**30
