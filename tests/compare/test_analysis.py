"""The analysis of a comparison against values worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest

from deepspeed_amsp.compare.analysis import Figure, Row, Setting, State, Table, analyse
from deepspeed_amsp.compare.results import Exposed, Memory, Results, Run
from deepspeed_amsp.compare.verdicts import TARGETS, Outcome, ablation, verdicts
from tests.compare.figures import LOSSES, failed, mixed, rounds, run, setup


def table(*runs: list[Run], **changes: Any) -> Table:
    (only,) = analyse(Results(setup(**changes), [one for strategy in runs for one in strategy]))
    return only


def row(found: Table, strategy: str) -> Row:
    made = found.row(strategy)
    assert made is not None
    return made


# ---- one strategy -----------------------------------------------------------------------------------------------


def test_medians_over_steps_then_over_rounds() -> None:
    slow = rounds("ddp", 1.0, 1.0, 1.0, step_s=[1.0, 1.2, 9.0])
    slow[0] = run("ddp", 1.0, 0, step_s=[1.1, 1.0, 1.05])
    found = row(table(slow), "ddp")
    assert found.step_s.values == (1.05, 1.2, 1.2)
    assert found.step_s.median == 1.2 and found.step_s.spread == pytest.approx(0.15 / 1.2)
    assert found.tokens_per_s == pytest.approx(256 / 1.2)
    assert found.tokens_per_gpu_s is None and found.mfu is None, "says nothing where compute is emulated"


def test_tgs_and_mfu_on_gpus() -> None:
    on_gpus = {"device": "H200", "emulated": False, "flops_per_token": 6e9, "peak_flops": 1e12, "nodes": 1}
    found = row(table(rounds("ddp", 0.5, tokens_per_step=100), **on_gpus), "ddp")
    assert found.tokens_per_gpu_s == 100 and found.mfu == pytest.approx(0.6)


def test_memory_exposure_and_bytes_over_rounds() -> None:
    runs = [
        run("amsp", 1.0, 0, memory=Memory(1, 2, 3, 10), exposed_s=Exposed(0.1, 0.2, 0.3), sent_bytes_per_node=40e6),
        run("amsp", 1.0, 1, memory=Memory(1, 2, 4, 20), exposed_s=Exposed(0.3, 0.2, 0.5), sent_bytes_per_node=42e6),
        run("amsp", 1.0, 2, memory=None, exposed_s=None, sent_bytes_per_node=43.5e6),
    ]
    found = row(table(runs), "amsp")
    assert found.memory == Memory(1, 2, 4, 20)
    exposed = found.exposed
    assert exposed is not None
    assert (exposed.gather, exposed.reduce, exposed.publish) == pytest.approx((0.2, 0.2, 0.4))
    assert found.sent_bytes == 42e6 and found.bytes_agree


@pytest.mark.parametrize(
    ("sent", "theory", "agree"),
    [(104.9e6, 100e6, True), (105.1e6, 100e6, False), (94.9e6, 100e6, False), (9e4, 0, True), (2e5, 0, False)],
)
def test_bytes_are_within_five_percent_of_theory(sent: float, theory: float, agree: bool) -> None:
    runs = rounds("ddp", 1.0, sent_bytes_per_node=sent, theory_bytes_per_node=theory)
    assert row(table(runs), "ddp").bytes_agree is agree


def test_without_a_counter_bytes_say_nothing() -> None:
    assert row(table(rounds("ddp", 1.0, sent_bytes_per_node=None)), "ddp").bytes_agree is None


# ---- against others ---------------------------------------------------------------------------------------------


def test_ratios_are_those_of_neighbours() -> None:
    """The machine is three times slower in round 1: unpaired medians would give 2 * 4 / (1 + 3) or nothing like 2."""
    found = table(rounds("zero1", 2.0, 6.0, 2.2), rounds("amsp", 1.0, 3.0, 1.0))
    ratio = row(found, "amsp").ratios["zero1"]
    assert ratio.values == pytest.approx((2.0, 2.0, 2.2))
    assert ratio.median == pytest.approx(2.0) and ratio.spread == pytest.approx(0.1)
    assert row(found, "zero1").ratios == {}


def test_a_round_without_its_neighbour_gives_no_ratio() -> None:
    found = table([run("zero1", 2.0, 0), failed("zero1", 1)], rounds("amsp", 1.0, 1.0))
    assert row(found, "amsp").ratios["zero1"].values == (2.0,)
    assert row(found, "amsp").ratios["zero1"].spread is None
    assert len(row(found, "zero1").errors) == 1 and row(found, "zero1").state.ranked


def test_settings_are_never_mixed() -> None:
    runs = [
        *rounds("zero1", 2.0),
        *rounds("amsp", 1.0, nic_mbit=250),
        *rounds("zero1", 3.0, nic_mbit=250),
        *rounds("zero1", 9.0, micro_batches=4),
    ]
    found = analyse(Results(setup(), runs))
    assert [one.setting for one in found] == [Setting(1, 500), Setting(1, 250), Setting(4, 500)]
    assert row(found[1], "amsp").ratios["zero1"].values == (3.0,)


def test_losses_are_held_against_ddp() -> None:
    found = table(
        rounds("ddp", 1.0),
        rounds("zero1", 1.0, losses=[5.51, 5.25, 5.01]),
        [run("zero2", 1.0, 0), run("zero2", 1.0, 1, losses=[5.5, 5.3, 5.0])],
        rounds("zero3", 1.0, losses=[5.5, math.nan, 5.0]),
        rounds("hpz", 1.0, losses=LOSSES[:2]),
        rounds("limit", 0.1, losses=[9.0, 9.0, 9.0]),
        [failed("mics")],
    )
    expected = {
        "ddp": (State.RIGHT, 0.0),
        "zero1": (State.RIGHT, pytest.approx(0.01)),
        "zero2": (State.WRONG, pytest.approx(0.05)),
        "zero3": (State.WRONG, math.inf),
        "hpz": (State.WRONG, math.inf),
        "mics": (State.FAILED, None),
    }
    assert {name: (row(found, name).state, row(found, name).loss_difference) for name in expected} == expected
    assert row(found, "limit").state is State.LIMIT
    assert [one.strategy for one in found.rows] == ["limit", "ddp", "zero1", "zero2", "zero3", "hpz", "mics"]
    assert found.baselines == ["ddp", "zero1", "limit"], "nothing is compared with what is wrong"
    assert set(row(found, "zero1").ratios) == {"ddp", "limit"}


def test_what_is_no_number_is_wrong_and_no_reference() -> None:
    """A DDP that went wrong makes nobody right, and a NaN needs no DDP to be wrong."""
    broken = [5.5, math.nan, math.nan]
    found = table(rounds("ddp", 1.0, losses=broken), rounds("zero1", 1.0), rounds("zero3", 0.5, losses=broken))
    assert [(one.strategy, one.state) for one in found.rows] == [
        ("zero1", State.UNCHECKED), ("zero3", State.WRONG), ("ddp", State.WRONG),
    ]  # fmt: skip


def test_losses_that_even_the_limit_has_tell_nothing() -> None:
    close, far = [5.5, 5.26, 5.01], [5.5, 5.26, 5.03]
    for limit, tell in ((close, False), (far, True)):
        assert table(rounds("ddp", 1.0), rounds("limit", 0.9, losses=limit)).losses_tell is tell
    assert table(rounds("ddp", 1.0)).losses_tell


def test_without_ddp_nobody_is_right_or_wrong() -> None:
    found = table([failed("ddp")], rounds("zero1", 1.0))
    assert row(found, "zero1").state is State.UNCHECKED and found.ranked == [row(found, "zero1")]


def test_a_spread_of_ten_percent_is_noise() -> None:
    assert Figure((1.0, 1.05, 1.1)).spread == pytest.approx(0.1 / 1.05) and not Figure((1.0, 1.05, 1.1)).noisy
    assert Figure((1.0, 1.0, 1.1)).noisy and not Figure((1.0,)).noisy
    (found,) = analyse(mixed())
    assert {(one.strategy, baseline) for one, baseline, _ in found.noisy} == {
        ("amsp", "hsdp"), ("ddp", "hsdp"), ("zero1", "hsdp"), ("hsdp", "ddp"), ("hsdp", "zero1"), ("hsdp", "limit"),
    }  # fmt: skip


# ---- targets and ablation ---------------------------------------------------------------------------------------


def test_the_best_plan_is_ours_and_as_we_would_use_it() -> None:
    found = table(
        rounds("ddp", 1.1),
        rounds("amsp-no-publish", 0.7),
        rounds("amsp-mics", 0.8),
        rounds("amsp-wrong", 0.5, losses=[9.0, 9.0, 9.0]),
        rounds("amsp-two-stage", 0.9),
        rounds("amsp", 1.0),
    )
    assert found.best_plan is row(found, "amsp-two-stage")


def test_targets() -> None:
    runs = [
        *rounds("ddp", 1.149, 1.149),
        *rounds("zero1", 1.9, 1.9),
        *rounds("zero3", 1.0, 1.0, losses=[9.0, 9.0, 9.0]),
        *rounds("hsdp", 1.3, 1.6),
        *rounds("mics", 1.6, 1.9),
        *rounds("amsp-mics", 1.3, 1.4),
        *rounds("limit", 1 / 1.12, 1 / 1.12),
        *rounds("amsp", 1.0, 1.0),
    ]
    results = Results(setup(), runs)
    found = verdicts(analyse(results), results.setup)
    assert {one.target.nic_mbit for one in found} == {500}
    outcomes = {(one.target.subject, one.target.baseline): one.outcome for one in found}
    assert outcomes == {
        (None, "ddp"): Outcome.MISSED,
        (None, "zero1"): Outcome.MET,
        (None, "zero3"): Outcome.UNKNOWN,
        (None, "hsdp"): Outcome.NOISY,
        (None, "mics"): Outcome.MET,  # noisy, but each round says so
        ("amsp-mics", "mics"): Outcome.MET,
        (None, "limit"): Outcome.MET,
    }


def test_targets_are_those_of_their_cluster() -> None:
    assert len(TARGETS) == 13
    for changes in ({"nodes": 4}, {"emulated": False}):
        results = Results(setup(**changes), [*rounds("zero1", 2.0), *rounds("amsp", 1.0)])
        assert verdicts(analyse(results), results.setup) == []


def test_the_three_way_ablation() -> None:
    three = [rounds("mics", 1.5, 1.8), rounds("amsp-mics", 1.25, 1.5), rounds("amsp", 1.0, 1.25)]
    found = ablation(table(rounds("ddp", 1.2, 1.2), *three))
    assert found is not None
    assert found.engine.values == pytest.approx((1.2, 1.2))
    assert found.factors.values == pytest.approx((1.25, 1.2))
    assert found.both.values == pytest.approx((1.5, 1.44))
    assert ablation(table(*three[1:])) is None
