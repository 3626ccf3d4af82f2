"""Traces of real engines on four ranks: complete, well-formed, and without an effect on the training."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed_amsp.plan.factors import ShardFactor, Sharding
from deepspeed_amsp.trace.reading import KINDS
from tests.parity.cases import case_for
from tests.support.jobs import Case, train
from tests.support.pool import RankError, pool
from tests.trace import jobs
from tests.trace.checks import load, row_names, slices

WORLD = 4


def case(parameters: int, states: tuple[int, int], **overrides: Any) -> Case:
    factors = ShardFactor(parameters, 1), ShardFactor(2, 1), ShardFactor(*states), ShardFactor(2, 2)
    choices = {"reduce": "two_level", "publish": "broadcast", "micro_batches": 2, "clip": 0.4}
    return case_for(Sharding(*factors), choices, **{"steps": 4, "model": "mlp", **overrides})


def staged(plain: Case) -> Case:
    """Two-stage collectives: a second stage is issued by a thread of its own."""
    return replace(plain, amsp={**(plain.amsp or {}), "hierarchical": True})


CASES = {
    "whole parameters": case(1, (2, 2)),
    "sharded, recomputed": case(2, (2, 2), model="recomputed"),
    "in stages": staged(case(1, (2, 2))),
    "replicas, adversarial": case(2, (2, 1), adversarial=True, model="attention"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_trace_is_complete_and_changes_nothing(name: str, tmp_path: Path) -> None:
    out = tmp_path / "trace.json"
    traced = pool(WORLD).run(jobs.train_traced, CASES[name], out, skip=1, steps=2)
    plain = pool(WORLD).run(train, CASES[name])
    document = load(out)
    assert not list(tmp_path.glob("*rank*")), "the ranks' own files went into one"
    assert traced[0].joined == WORLD and document["otherData"]["clock"] == "host"
    for rank, (run, untraced) in enumerate(zip(traced, plain, strict=True)):
        _same_training(run.report, untraced)
        for number, log in enumerate(run.logs, start=1):
            _every_collective_once(document, rank, number, log)
        _rows_of_computation(document, rank, CASES[name])


def _same_training(one: Any, other: Any) -> None:
    """Bit by bit, by the same collectives; which of them are issued first may depend on which land first."""
    assert (one.losses, one.norms, sorted(one.log)) == (other.losses, other.norms, sorted(other.log))
    for held in ("parameters", "shards", "masters"):
        mine, theirs = getattr(one, held), getattr(other, held)
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[key], theirs[key]) for key in mine)


def _every_collective_once(document: dict[str, Any], rank: int, step: int, log: list[jobs.Fact]) -> None:
    found = []
    for kind in KINDS:
        for event in slices(document, rank, kind):
            facts = event["args"]
            assert event["cat"] == kind
            assert facts["exposed_us"] >= 0 and facts["hidden_us"] >= 0
            assert facts["exposed_us"] + facts["hidden_us"] == pytest.approx(event["dur"], abs=0.01)
            if facts["step"] == step:
                found.append((facts["seq"], facts["op"], kind, event["name"], facts["bytes"]))
    assert sorted(found) == sorted(log) and log


def _rows_of_computation(document: dict[str, Any], rank: int, trained: Case) -> None:
    compute = slices(document, rank, "compute")
    phases = [event["name"] for event in compute if event["cat"] == "phase"]
    assert phases == ["forward", "backward", "step"] * trained.micro_batches * 2
    names: dict[str, set[str]] = defaultdict(set)
    for event in compute:
        names[event["cat"]].add(event["name"])
    assert {"embed", "norm" if trained.model == "attention" else "head"} <= names["forward"]
    assert "embed" in names["backward"] and any(name.startswith("update ") for name in names["update"])
    assert [event["name"] for event in slices(document, rank, "step")] == ["step 1", "step 2"]


@pytest.mark.parametrize("keep_going", [False, True])
def test_a_requested_trace_ends_the_script_after_its_steps(keep_going: bool, tmp_path: Path) -> None:
    """Recorded are steps 2 and 3; in the fourth the last publishes are waited for."""
    out = tmp_path / "trace.json"
    trained = case(1, (2, 2), steps=6)
    for rank, (begun, logs) in enumerate(pool(WORLD).run(jobs.train_requested, trained, out, 1, 2, keep_going)):
        assert begun == (6 if keep_going else 4)
        document = load(out)
        for step in (2, 3):
            _every_collective_once(document, rank, step, logs[step - 1])
        assert all(event["args"]["waited"] for kind in KINDS for event in slices(document, rank, kind))
        assert [event["name"] for event in slices(document, rank, "step")] == ["step 2", "step 3"]


@pytest.mark.alone
def test_overlap_hides_what_is_exposed_without(tmp_path: Path) -> None:
    """Every collective takes 12 ms longer; the computation of a layer takes 8 ms and, in backward, 16."""
    shares = {}
    for on in (False, True):
        amsp = {
            "sharding": {"parameters": [2, 1], "gradients": [2, 1], "optimizer_states": [2, 2]},
            "topology": {"gpus_per_node": 2},
            "bucket_bytes": 1200,
            "overlap": dict.fromkeys(("gather", "reduce_scatter", "all_reduce", "publish"), on),
        }
        ranks = pool(WORLD).run(jobs.exposure, amsp, 3, tmp_path / f"{on}.json", 0.012, 0.008)
        shares[on] = sum(ranks) / WORLD
    assert shares[False] > 0.9, shares
    assert shares[True] < 0.7 * shares[False], shares


def test_a_recorder_keeps_no_buffer_alive() -> None:
    assert pool(WORLD).run(jobs.buffers_live_on, recorded=False) == [False] * WORLD
    assert pool(WORLD).run(jobs.buffers_live_on, recorded=True) == [False] * WORLD


def test_two_traces_at_once_are_refused_and_an_error_leaves_nothing_behind(tmp_path: Path) -> None:
    messages = pool(WORLD).run(jobs.refuses_a_second_trace, case(2, (2, 2)), tmp_path / "trace.json")
    assert all("is being traced already" in message for message in messages)
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]


def test_ranks_of_other_hosts_keep_files_of_their_own(tmp_path: Path) -> None:
    """Ranks 2 and 3 are on a host that shares no folder with the first."""
    hosts = ["a", "a", "b", "b"]
    for host in set(hosts):
        tmp_path.joinpath(host).mkdir()
    per_rank = [{"host": host, "out": tmp_path / host / "t.json"} for host in hosts]
    results = pool(WORLD).run(jobs.on_two_hosts, case(1, (2, 2)), per_rank=per_rank)
    assert results[0] == (2, [f"b:{tmp_path}/a/t.rank{rank}.json" for rank in (2, 3)])
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.glob("*/*")) == [
        "a/t.json", "b/t.rank2.json", "b/t.rank3.json"
    ]  # fmt: skip
    assert {pid for pid, _ in row_names(load(tmp_path / "a" / "t.json"))} == {0, 1}
    assert {pid for pid, _ in row_names(load(tmp_path / "b" / "t.rank3.json"))} == {3}


def test_a_folder_that_does_not_exist_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="No such file"):
        pool(WORLD).run(
            jobs.train_traced, replace(CASES["whole parameters"], steps=1), tmp_path / "no" / "t.json", 0, 1
        )
