"""What a comparison's file may say; everything else is one line before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("yaml")

from deepspeed_amsp.compare.catalog import BUILT_IN
from deepspeed_amsp.compare.config import CompareConfigError, check, load, only

ROOT = Path(__file__).resolve().parents[2]
OURS = {"name": "amsp", "amsp": {"sharding": {"optimizer_states": [2, 1]}}}


def config(**changes: Any) -> dict[str, Any]:
    return {"strategies": ["ddp", "zero1", OURS], **changes}


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (config(round=2), "round: unknown key; did you mean 'rounds'?"),
        (config(cluster={"nodez": 2}), "cluster.nodez: unknown key; did you mean 'nodes'?"),
        (config(model={"llama": {"dims": 2}}), "model.llama.dims: unknown key; did you mean 'dim'?"),
        (config(rounds=0), "rounds: input should be greater than or equal to 1, not 0"),
        (config(rounds=True), "rounds: input should be a valid integer, not True"),
        (config(cluster={"nic_mbit": []}), "cluster.nic_mbit: "),
        (config(cluster={"emulate": "perhaps"}), "cluster.emulate: "),
        (config(model={"llama": {"dim": 448, "heads": 6}}), "dim must be an even multiple of heads"),
        (config(model={"factory": "a.b:c"}), "factory needs vocab"),
        (config(model={"hf": "x", "factory": "a:b", "vocab": 2}), "name one of llama, hf and factory"),
        (config(strategies=[]), "strategies: "),
        (config(strategies=["ddp", "ddp"]), "ddp is listed more than once"),
        (config(strategies=["zero_1"]), "unknown strategy 'zero_1'; did you mean 'zero1'?"),
        (config(strategies=[{"name": "mine", "amsp": {}}]), "strategies of our engine are called amsp"),
        (config(strategies=[{"name": "amsp", "amsp": {"shardin": "ddp"}}]), 'did you mean "sharding"?'),
        (config(strategies=[{"name": "amsp", "amsp": {"sharding": {"optimizer_states": [3, 1]}}}]), "amsp: "),
        (config(strategies=[{"name": "amsp", "amsp": {"sharding": "search"}}]), "the planner finds them"),
        (config(strategies=[{"name": "amsp", "amsp": {"sharding": "ddp"}, "titel": "x"}]), "did you mean 'title'?"),
        (config(strategies=[{"name": "amsp"}]), "strategies.0.amsp: missing"),
        (config(strategies=[{"name": "amsp-mics", "amsp": {"sharding": "zero1"}}]), "not for (1,1,2x2)"),
        (config(strategies=[3]), "strategies.0: input should be a valid string, not 3"),
        (config(micro_batches=[1, 1]), "micro_batches: a value is listed more than once"),
        (config(cluster={"nic_mbit": [500, 500.0]}), "cluster.nic_mbit: a value is listed more than once"),
        (config(cluster={"nodes": 1}, strategies=["mics"]), "mics shards within a node and replicates across nodes"),
        (config(cluster={"ranks_per_node": 1}, strategies=["hpz"]), "it needs at least 2 nodes of 2 ranks"),
        ([], "must be a mapping"),
    ],
)
def test_mistakes_are_one_line(values: Any, said: str) -> None:
    with pytest.raises(CompareConfigError) as error:
        check(values, "ab.yaml")
    assert str(error.value).startswith("ab.yaml: ") and "\n" not in str(error.value)
    assert said in str(error.value)


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(CompareConfigError, match="no such file"):
        load(tmp_path / "absent.yaml")
    path = tmp_path / "bad.yaml"
    path.write_text("strategies: [ddp", encoding="utf-8")
    with pytest.raises(CompareConfigError, match="cannot be read") as error:
        load(path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("name", "nodes"), [("ab.yaml", 2), ("ab_full.yaml", 4)])
def test_the_files_that_come_along_have_every_strategy(name: str, nodes: int) -> None:
    found = load(ROOT / "configs" / name)
    names = [strategy.name for strategy in found.resolved()]
    assert set(BUILT_IN) <= set(names) and found.cluster.nodes == nodes
    assert {"amsp", "amsp-ddp", "amsp-zero1", "amsp-zero3", "amsp-mics", "amsp-no-overlap"} <= set(names)


def test_only() -> None:
    found = check(config(), "x")
    assert [strategy.name for strategy in only(found, ["zero1", "ddp"]).resolved()] == ["ddp", "zero1"]
    with pytest.raises(CompareConfigError, match="--only zero2: not in this comparison; did you mean 'zero1'"):
        only(found, ["zero2"])


def test_a_config_travels_as_json() -> None:
    found = check(config(cluster={"nic_mbit": [500, 250]}, micro_batches=[1, 4]), "x")
    assert check(found.as_json(), "again") == found
