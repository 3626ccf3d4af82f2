"""Advice is checked by doing what it says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from deepspeed_amsp.plan.advice import Remedy, on_nodes, remedies, remedies_table
from deepspeed_amsp.plan.explain import extrapolations, time_table
from deepspeed_amsp.plan.factors import ShardFactor, preset
from deepspeed_amsp.plan.profile import ProfileError
from deepspeed_amsp.plan.report import size
from deepspeed_amsp.plan.solver import Problem, Search, search, smallest_need
from deepspeed_amsp.plan.specs import OPTIMIZERS, TrainSpec
from deepspeed_amsp.plan.whatif import Shift, crossover, crossover_table, sensitivity, sensitivity_table, to_memory
from tests.plan.planning import measured_problem, small_problem

HEAVY = TrainSpec(sequence=256, micro_batch=8, micro_batches=2, gradient_bytes=4)


def just_too_small(train: TrainSpec, part: float) -> Search:
    need = smallest_need(search(small_problem(memory=1e3, train=train)))
    result = search(small_problem(memory=need * part, train=train))
    assert result.best is None
    return result


@pytest.fixture(scope="module")
def tight() -> Search:
    return just_too_small(HEAVY, 0.97)


@pytest.fixture(scope="module")
def advised(tight: Search) -> tuple[Remedy, ...]:
    return remedies(tight)


def done(problem: Problem, option: str) -> Problem:
    """What the option says, in our own words."""
    words = option.split()
    trainings = problem.trainings
    while words:
        word = words.pop(0)
        if word == "--recompute":
            trainings = tuple(replace(t, recompute=True) for t in trainings)
            continue
        value = words.pop(0)
        if word == "--grad-dtype":
            trainings = tuple(replace(t, gradient_bytes={"bf16": 2}[value]) for t in trainings)
        elif word == "--optimizer":
            trainings = tuple(replace(t, optimizer=OPTIMIZERS[value]) for t in trainings)
        elif word == "--micro-batch":
            b = int(value)
            trainings = tuple(
                replace(t, micro_batch=b, micro_batches=t.micro_batch * t.micro_batches // b) for t in trainings
            )
        elif word == "--gpu-memory":
            problem = replace(problem, cluster=replace(problem.cluster, gpu_memory=float(value) * 1e9))
        elif word == "--margin":
            problem = replace(problem, margin=float(value))
        else:
            assert word == "--nodes"
            problem = on_nodes(replace(problem, trainings=trainings), int(value))
            trainings = problem.trainings
    return replace(problem, trainings=trainings)


def test_what_is_advised_makes_it_fit(tight: Search, advised: tuple[Remedy, ...]) -> None:
    assert {remedy.option.split()[0] for remedy in advised} >= {"--recompute", "--micro-batch", "--gpu-memory"}
    for remedy in advised:
        again = search(done(tight.problem, remedy.option))
        assert again.best is not None, remedy.option
        assert again.best.step.seconds <= remedy.best.step.seconds * (1 + 1e-9)


def test_the_cheapest_comes_first(advised: tuple[Remedy, ...]) -> None:
    costs = [
        remedy.best.step.seconds * remedy.gpus
        / (remedy.best.train.sequence * remedy.best.train.micro_batch * remedy.best.train.micro_batches * remedy.gpus)
        for remedy in advised
    ]  # fmt: skip
    assert costs == sorted(costs) and [r.gpu_seconds_per_token for r in advised] == pytest.approx(costs)


def test_memory_that_is_advised_is_enough_and_no_more(tight: Search, advised: tuple[Remedy, ...]) -> None:
    (remedy,) = (r for r in advised if r.option.startswith("--gpu-memory"))
    gigabytes = float(remedy.option.split()[1])
    assert search(done(tight.problem, f"--gpu-memory {gigabytes - 0.1}")).best is None


def test_changes_are_taken_together_where_none_is_enough() -> None:
    result = just_too_small(replace(HEAVY, gradient_bytes=2), 0.25)
    found = remedies(result)
    assert found
    for remedy in found:
        assert search(done(result.problem, remedy.option)).best is not None, remedy.option


def test_a_margin_is_something_to_give_up() -> None:
    need = smallest_need(search(small_problem(memory=1e3, train=HEAVY)))
    result = search(small_problem(memory=need * 1.05, margin=0.1, train=HEAVY))
    assert result.best is None and "--margin 0" in {remedy.option for remedy in remedies(result)}


def test_no_advice_is_said(advised: tuple[Remedy, ...]) -> None:
    table = remedies_table(())
    assert not table.rows and "no single change" in table.notes[0]
    assert len(remedies_table(advised).rows) == len(advised)


@pytest.mark.parametrize(
    ("nodes", "micro_batches", "tokens"),
    [(1, 8, 8 * 4), (2, 4, 4 * 8), (4, 2, 2 * 16), (8, 1, 32), (16, 1, 64)],
)
def test_tokens_stay_until_m_is_one(nodes: int, micro_batches: int, tokens: int) -> None:
    problem = on_nodes(small_problem(), nodes)
    (train,) = problem.trainings
    assert train.micro_batches == micro_batches
    assert train.micro_batches * train.micro_batch * problem.data_parallel.size == tokens
    assert (problem.profile.nodes, problem.profile.gpus_per_node) == (nodes, 4)


# --- sensitivity and crossover --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fits() -> Search:
    return search(small_problem())


def test_more_or_less_memory_is_a_search_with_it(fits: Search) -> None:
    assert fits.best is not None
    tight = search(small_problem(memory=fits.best.memory.peak * 1.2))
    for shift in to_memory(tight):
        fresh = search(small_problem(memory=tight.problem.cluster.gpu_memory * shift.factor)).best
        assert (fresh is None) == (shift.best is None)
        if fresh and shift.best:
            assert shift.best.objective == pytest.approx(fresh.objective, abs=1e-3)
        assert (shift.staying is None) == (shift.factor * 1.2 < 1)


@pytest.fixture(scope="module")
def shifts(fits: Search) -> tuple[Shift, ...]:
    return sensitivity(fits)


def test_other_bandwidth_is_a_search_with_it(fits: Search, shifts: tuple[Shift, ...]) -> None:
    assert fits.best is not None
    assert [s.factor for s in shifts] == [0.5, 0.9, 1.1, 1.5] * 3
    for shift in shifts[:8]:
        links = {"inter" if shift.what.startswith("inter") else "intra": shift.factor}
        profile = fits.problem.profile.scaled(**links)
        fresh = search(replace(fits.problem, profile=profile))
        assert shift.best is not None and fresh.best is not None and shift.staying is not None
        assert shift.best.objective == pytest.approx(fresh.best.objective, abs=1e-3)
        own = min(f.objective for f in fresh.ranked if f.plan.sharding == fits.best.plan.sharding)
        assert shift.staying == pytest.approx(own / fresh.best.objective - 1, abs=0.02)
    assert len(sensitivity_table(shifts).rows) == 12


def test_faster_links_never_cost_time(shifts: tuple[Shift, ...]) -> None:
    times = [shift.best.objective for shift in shifts[:4] if shift.best]
    assert times == sorted(times, reverse=True)


def test_crossover_is_a_search_at_every_scale(fits: Search) -> None:
    scales = crossover(fits, most=32)
    assert [scale.gpus for scale in scales] == [8, 16, 32]
    for scale in scales:
        fresh = search(on_nodes(fits.problem, scale.gpus // 4))
        assert fresh.best is not None and scale.best is not None
        assert scale.best.objective == pytest.approx(fresh.best.objective, abs=1e-3)
        for rival in scale.rivals:
            sharding = preset(rival.name, ShardFactor(4, scale.gpus // 4))
            own = [f.objective for f in fresh.ranked if f.plan.sharding == sharding]
            assert (rival.slower is None) == (not own)
            if own and rival.slower is not None:
                assert rival.slower == pytest.approx(min(own) / fresh.best.objective - 1, abs=0.05)
    assert len(crossover_table(scales).rows) == 3


def test_strategies_that_do_not_fit_say_what_they_miss(fits: Search) -> None:
    ddp = min(
        entry.memory.peak
        for entry in search(replace(small_problem(memory=1e3), shardings=(preset("ddp", ShardFactor(4, 2)),))).rejected
    )
    result = search(small_problem(memory=ddp - 50e6))
    (scale,) = crossover(result, most=8)
    rival = next(r for r in scale.rivals if r.name == "ddp")
    assert rival.slower is None and rival.missing == pytest.approx(50e6, rel=0.2)
    assert f"needs {size(rival.missing or 0)} more" in crossover_table((scale,)).rows[0]


def test_whole_tensors_have_advice_and_a_crossover_too() -> None:
    """Their optimizers rule out zero3 and mics; that is no error, and no rival either."""
    muon = TrainSpec(sequence=256, micro_batches=4, optimizer=OPTIMIZERS["muon"])
    result = just_too_small(muon, 0.9)
    found = remedies(result)
    assert any(remedy.option.startswith("--nodes") for remedy in found), remedies_table(found).rows
    scales = crossover(search(small_problem(train=muon)), most=16)
    refused = {rival.name for scale in scales for rival in scale.rivals if rival.slower is rival.missing is None}
    assert refused == {"zero3", "mics"}
    assert "needs tensors cut" in {cell for row in crossover_table(scales).rows for cell in row}


def test_nodes_that_were_not_measured_are_no_advice() -> None:
    problem = measured_problem(memory=1e6)
    assert not any("--nodes" in remedy.option for remedy in remedies(search(problem)))


def test_other_memory_may_mean_other_modes() -> None:
    """The choice is what a search with that much memory finds, also where its fastest modes do not fit any more."""
    problem = small_problem()
    peaks = sorted({found.memory.peak for found in search(problem).ranked})
    for peak in peaks[:: max(len(peaks) // 4, 1)]:
        cluster = replace(problem.cluster, gpu_memory=peak * 1.01)
        result = search(replace(problem, cluster=cluster))
        for shift in to_memory(result):
            there = search(replace(problem, cluster=replace(cluster, gpu_memory=cluster.gpu_memory * shift.factor)))
            assert (shift.best and shift.best.plan.sharding) == (there.best and there.best.plan.sharding)
            assert shift.factor < 1 or shift.staying is not None


def test_a_measured_profile_extrapolates_if_told_to() -> None:
    problem = on_nodes(measured_problem(), 8)
    with pytest.raises(ProfileError, match="--extrapolate"):
        search(problem)
    told = search(replace(problem, profile=replace(problem.profile, extrapolates=True)))
    assert told.best is not None
    notes = [why for why in extrapolations(told.ranked[-1]) if "is outside the measured meshes" in why]
    assert notes
    assert extrapolations(told.best) == tuple(n.removeprefix("extrapolated: ") for n in time_table(told).notes)
