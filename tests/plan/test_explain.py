"""Explanations say what the search found, and leave nothing out."""

from __future__ import annotations

import json
import math
from collections import Counter

import pytest

from deepspeed_amsp.config import check_stage, read_block
from deepspeed_amsp.plan.api import RequestError, parse_sharding, plan
from deepspeed_amsp.plan.block import ds_config, merged, new_config
from deepspeed_amsp.plan.explain import (
    as_dict,
    batch_tokens,
    beside,
    best_table,
    illegal,
    memory_table,
    mfu,
    overview,
    pareto,
    rejected_table,
    rejections,
    time_table,
    verdict,
)
from deepspeed_amsp.plan.factors import FactorError, ShardFactor, Sharding, enumerate_shardings, preset
from deepspeed_amsp.plan.report import Table, duration, markdown, percent, size
from deepspeed_amsp.plan.resolve import make_plan
from deepspeed_amsp.plan.solver import Search, search, space
from tests.plan.planning import HIDDEN, LAYERS, PEAK, VOCAB, small_problem


def factors_of(s: Sharding) -> str:
    return f"{s.parameters} | {s.gradients} | {s.optimizer_states}"


SEARCHED = {factors_of(s) for s in enumerate_shardings(ShardFactor(4, 2), "paper")}


@pytest.fixture(scope="module")
def fits() -> Search:
    return search(small_problem())


@pytest.fixture(scope="module")
def tight(fits: Search) -> Search:
    """Half of what was needed by all: some plans fit, some do not."""
    peaks = sorted(found.memory.peak for found in fits.ranked)
    result = search(small_problem(memory=peaks[len(peaks) // 2]))
    assert result.ranked and result.rejected
    return result


def test_every_searched_sharding_is_the_best_or_has_a_reason(tight: Search) -> None:
    assert tight.best is not None
    reasons = Counter(where for where, _, _ in rejections(tight))
    reasons[factors_of(tight.best.plan.sharding)] += 1
    assert reasons == Counter(SEARCHED)
    assert all(why.startswith(("slower by", "needs", "as fast")) for _, _, why in rejections(tight))


def test_reasons_are_those_numbers(tight: Search) -> None:
    told = {where: why for where, _, why in rejections(tight)}
    chosen = tight.ranked[0].objective
    for where, why in told.items():
        own = [found.objective for found in tight.ranked if factors_of(found.plan.sharding) == where]
        if why.startswith("slower by"):
            part = float(why.removeprefix("slower by ").removesuffix(" %")) / 100
            # A sharding is shown with its first modes, which may be those of less memory within a tie of 1 ms.
            assert part == pytest.approx(min(own) / chosen - 1, abs=1e-3 / chosen + 6e-4)
        elif why.endswith("more"):
            (entry,) = (entry for entry in tight.rejected if factors_of(entry.plan.sharding) == where)
            assert not own and why == f"needs {size(entry.memory.peak - tight.problem.capacity)} more"


def test_illegal_triples_are_counted_as_the_space_counts_them() -> None:
    """8 x 128: 32,768 triples of divisors, of which 286 are legal (the paper's section IV-D)."""
    data_parallel = ShardFactor(8, 128)
    rules = Counter(rule.partition(" (")[0] for _, rule in illegal(data_parallel))
    assert sum(rules.values()) == 32_768 - 286
    assert rules == Counter(space(data_parallel).broken) and rules["whole nodes"] == 32_768 - 1_331


def test_what_is_near_is_within_two_percent(fits: Search) -> None:
    limit = fits.ranked[0].objective * 1.02
    expected = {str(f.plan.sharding) for f in fits.ranked if f.objective <= limit}
    assert {str(f.plan.sharding) for f in fits.within(0.02)} == expected
    assert len(best_table(fits).rows) == len(expected)


def test_memory_terms_add_up_and_the_margin_is_free(fits: Search) -> None:
    values = as_dict(fits)["best"]["memory"]
    assert sum(term["bytes"] for term in values["terms"]) == values["peak_bytes"]
    assert values["free_bytes"] == 2e9 - values["peak_bytes"]
    with_margin = as_dict(search(small_problem(margin=0.25)))
    assert with_margin["capacity_bytes"] == 1.5e9
    assert memory_table(fits).rows[-1][:2] == ("free", size(values["free_bytes"]))


def test_step_terms_add_up(fits: Search) -> None:
    step = as_dict(fits)["best"]["step"]
    parts = step["compute"] + step["update"] + sum(step["exposed"].values())
    assert step["seconds"] == pytest.approx(parts, rel=1e-9)
    assert [row[0] for row in time_table(fits).rows][:2] == ["compute", "exposed gather"]


def test_mfu_and_tokens_by_hand(fits: Search) -> None:
    best = fits.ranked[0]
    matrices = LAYERS * 8 * HIDDEN**2 + VOCAB * HIDDEN  # an embedding is looked up
    flops = 3 * 2 * matrices * 256 * 4
    assert mfu(fits, best) == pytest.approx(flops / best.step.seconds / PEAK)
    assert best.tokens_per_gpu_second == pytest.approx(256 * 4 / best.step.seconds)
    assert batch_tokens(fits, best.train) == 256 * 4 * 8


def test_the_pareto_front_is_what_nothing_beats(fits: Search) -> None:
    front = {(f.objective, f.memory.peak) for f in pareto(fits)}
    points = {(f.objective, f.memory.peak) for f in fits.ranked}
    unbeaten = {p for p in points if not any(q != p and q[0] <= p[0] and q[1] <= p[1] for q in points)}
    assert front == unbeaten


def test_values_are_json(fits: Search, tight: Search) -> None:
    for result in (fits, tight, search(small_problem(memory=1e6))):
        assert json.loads(json.dumps(as_dict(result), allow_nan=False))["version"] == 1


def test_nothing_fits_says_need_and_term() -> None:
    result = search(small_problem(memory=1e6))
    need = min(entry.memory.peak for entry in result.rejected)
    nearest = next(entry for entry in result.rejected if entry.memory.peak == need)
    largest = max(nearest.memory.terms(), key=lambda term: term[2])
    said = verdict(result)
    assert f"smallest need is {size(need)}" in said and f"largest term is {largest[0]} ({size(largest[2])})" in said
    assert as_dict(result)["smallest_need_bytes"] == need and as_dict(result)["best"] is None
    assert memory_table(result).rows[-1][0] == "missing" and not time_table(result).rows


def test_overview_says_what_was_asked(fits: Search) -> None:
    text = "\n".join(overview(fits))
    assert "2 nodes x 4 GPUs of 2.0 GB" in text and "M 4" in text and "8,192 tokens a step" in text


def test_a_named_sharding_is_shown_beside(fits: Search) -> None:
    there = preset("zero3", ShardFactor(4, 2))
    assert beside(fits, there).startswith("P | G | OS = 4x2 | 4x2 | 4x2: ")
    assert beside(fits, fits.ranked[0].plan.sharding).endswith("chosen")


def test_a_page_of_markdown_escapes_its_bars(fits: Search) -> None:
    page = markdown("amsp plan", overview(fits), [best_table(fits), rejected_table(fits)], "{}")
    rows = [line for line in page.splitlines() if line.startswith("| ")]
    counts = {line.replace("\\|", "").count("|") for line in rows}
    assert counts == {12, 4} and "```json\n{}\n```" in page


def test_a_table_checks_its_rows() -> None:
    with pytest.raises(ValueError, match="1 cells in a row of 2"):
        Table("t", ("a", "b"), (("1",),))


@pytest.mark.parametrize(
    ("text", "made"),
    [("94.4 MB", size(94.4e6)), ("1,234.6 GB", size(1_234.56e9)), ("0.0 GB", size(0)), ("12.5 ms", duration(0.0125)),
     ("2.000 s", duration(2)), ("+3.1 %", percent(0.031, signed=True))],
)  # fmt: skip
def test_numbers_have_units(text: str, made: str) -> None:
    assert made == text


# --- the ds_config --------------------------------------------------------------------------------------------


def test_the_engine_reads_back_the_plan(tight: Search) -> None:
    for found in tight.ranked:
        config = ds_config(found.plan, found.train)
        block = read_block(config)
        assert block is not None
        assert make_plan(block, 8, 4) == found.plan
        check_stage(config, found.plan.sharding.stage, found.plan.sharding.stage_reason)


def test_writing_into_a_config_keeps_every_other_key(fits: Search) -> None:
    best = fits.ranked[0]
    existing = {
        "train_batch_size": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1.5}},
        "zero_optimization": {"stage": 0, "reduce_bucket_size": 7},
        "amsp": {"verify_every": 3, "sharding": "zero3", "topology": {"leaf_switches": [["a"]]}},
    }
    before = json.loads(json.dumps(existing))
    result = merged(existing, best.plan, best.train)
    assert existing == before
    assert result["optimizer"] == existing["optimizer"]
    assert result["zero_optimization"] == {"stage": best.plan.sharding.stage, "reduce_bucket_size": 7}
    assert result["amsp"]["verify_every"] == 3 and result["amsp"]["sharding"] == best.plan.sharding.as_dict()
    assert result["amsp"]["topology"] == {"leaf_switches": [["a"]], "gpus_per_node": 4}
    assert result["train_batch_size"] == 1 * 4 * 8  # micro-batch x M x replicas
    assert new_config(best.plan, best.train)["bf16"] == {"enabled": True}


# --- from Python ----------------------------------------------------------------------------------------------


def test_plan_in_python() -> None:
    found = plan("llama-7b", nodes=1, gpus_per_node=2, gpu_memory=80, global_batch_tokens=2 * 4096 * 3)
    (train,) = found.problem.trainings
    assert train.micro_batches == 3 and found.problem.model.numel == 6_738_415_616
    assert {str(f.plan.sharding.data_parallel) for f in found.ranked} <= {"2x1"}


def test_micro_batch_and_m_are_chosen_together() -> None:
    from deepspeed_amsp.plan.api import Request

    problem = Request("llama-7b", nodes=1, global_batch_tokens=8 * 4096 * 12, micro_batch="auto").problem()
    assert [(t.micro_batch, t.micro_batches) for t in problem.trainings] == [(1, 12), (2, 6), (4, 3)]
    assert math.isclose(problem.cluster.gpu_memory, 80e9)  # the profile's


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"nodes": True}, "nodes: must be a whole number"),
        ({"gpu_memory": 81920}, "gpu_memory: 81920 looks like MB; it is in GB .*: 81.92"),
        ({"optimizer": "Adam"}, "did you mean adamw"),
        ({"model": "a.b:c"}, "probe_factory"),
        ({"margin": 1.0}, "margin: must be a part"),
        ({"micro_batch": "auto"}, "global_batch_tokens: is needed"),
        ({"global_batch_tokens": 40_000}, "Nearest: 32768 or 65536"),
    ],
)
def test_wrong_arguments_are_named(changed: dict[str, object], says: str) -> None:
    arguments: dict[str, object] = {"model": "llama-7b", "nodes": 1, **changed}
    with pytest.raises(RequestError, match=says):
        plan(**arguments)  # type: ignore[arg-type]


def test_shardings_in_words() -> None:
    there = ShardFactor(8, 4)
    assert parse_sharding("1,1,16", there).as_dict()["optimizer_states"] == [8, 2]
    assert parse_sharding("2x1, 2x1, 8x4", there).s_os == 32
    assert parse_sharding("mics", there) == preset("mics", there)
    with pytest.raises(RequestError, match="no factor"):
        parse_sharding("axb,1,1", there)
    with pytest.raises(FactorError, match="dependency"):
        parse_sharding("4,2,8", there)
