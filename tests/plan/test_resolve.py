"""From the block to a Plan."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_amsp.config import SHARDING_NAMES, AmspBlock, read_block
from deepspeed_amsp.plan.factors import PRESETS, FactorError, ShardFactor, Sharding, legal_factors, preset
from deepspeed_amsp.plan.resolve import (
    Overlap,
    Plan,
    PublishMode,
    ReduceMode,
    make_plan,
    resolve_sharding,
)


def block(**keys: Any) -> AmspBlock:
    """An enabled block with these keys."""
    read = read_block({"amsp": keys})
    assert read is not None
    return read


def resolved(sharding: Any, world_size: int, gpus_per_node: int) -> str:
    """The factors that "sharding" gives, as text."""
    return str(resolve_sharding(block(sharding=sharding), world_size, gpus_per_node))


class TestResolve:
    """What "sharding" may be."""

    @pytest.mark.parametrize("name", PRESETS)
    def test_presets(self, name: str) -> None:
        assert resolve_sharding(block(sharding=name), 32, 8) == preset(name, ShardFactor(8, 4))

    def test_config_and_plan_know_the_same_names(self) -> None:
        # config must not import plan, so the names are written in both.
        assert (*PRESETS, "search") == SHARDING_NAMES

    @pytest.mark.parametrize(
        ("sharding", "expected"),
        [
            ({"optimizer_states": 8}, "P 1x1 | G 1x1 | OS 8x1 of 8x4"),
            ({"optimizer_states": [8, 1]}, "P 1x1 | G 1x1 | OS 8x1 of 8x4"),
            ({"optimizer_states": 16}, "P 1x1 | G 1x1 | OS 8x2 of 8x4"),
            ({"optimizer_states": 32.0}, "P 1x1 | G 1x1 | OS 8x4 of 8x4"),
            ({"gradients": 8}, "P 1x1 | G 8x1 | OS 8x1 of 8x4"),
            ({"parameters": 8}, "P 8x1 | G 8x1 | OS 8x1 of 8x4"),
            (
                {"parameters": 2, "gradients": [4, 1], "optimizer_states": [8, 2]},
                "P 2x1 | G 4x1 | OS 8x2 of 8x4",
            ),
            ({}, "P 1x1 | G 1x1 | OS 1x1 of 8x4"),
        ],
    )
    def test_factors(self, sharding: Any, expected: str) -> None:
        assert resolved(sharding, 32, 8) == expected

    @given(st.integers(1, 12), st.integers(1, 12), st.data())
    def test_integers_are_the_sizes_of_legal_factors(self, per_node: int, nodes: int, data: st.DataObject) -> None:
        legal = {one.size: one for one in legal_factors(ShardFactor(per_node, nodes))}
        size = data.draw(st.one_of(st.sampled_from(sorted(legal)), st.integers(1, 150)))
        asked = block(sharding={"optimizer_states": size})
        if size in legal:
            found = resolve_sharding(asked, per_node * nodes, per_node)
            assert found.optimizer_states == legal[size]
        else:
            with pytest.raises(FactorError, match=f"optimizer_states = {size} GPUs"):
                resolve_sharding(asked, per_node * nodes, per_node)


class TestRefusals:
    """The error names W, the factor and the legal values."""

    @pytest.mark.parametrize(
        ("value", "world", "per_node", "legal"),
        [
            (4, 6, 3, "1, 3, 6"),
            (4, 6, 6, "1, 2, 3, 6"),
            (3, 4, 4, "1, 2, 4"),
            (3, 4, 2, "1, 2, 4"),
            (2, 1, 1, "1"),
        ],
    )
    def test_impossible_integer(self, value: int, world: int, per_node: int, legal: str) -> None:
        with pytest.raises(FactorError) as caught:
            resolved({"optimizer_states": value}, world, per_node)
        text = str(caught.value)
        assert f"optimizer_states = {value} GPUs" in text
        assert f"W = {world}, gpus_per_node = {per_node}, nodes = {world // per_node}" in text
        assert text.endswith(f"Legal values of optimizer_states: {legal}.")

    def test_impossible_pair(self) -> None:
        with pytest.raises(FactorError, match=r"optimizer_states \[3, 1\].*W = 4.*\[1, 1\], \[2, 1\], \[4, 1\]\."):
            resolved({"optimizer_states": [3, 1]}, 4, 4)

    def test_one_gpu_takes_every_preset(self) -> None:
        assert {resolved(name, 1, 1) for name in PRESETS} == {"P 1x1 | G 1x1 | OS 1x1 of 1x1"}

    @pytest.mark.parametrize(("world", "per_node"), [(6, 4), (4, 8)])
    def test_uneven_world(self, world: int, per_node: int) -> None:
        with pytest.raises(FactorError, match=rf"gpus_per_node = {per_node} does not divide .* W = {world}") as caught:
            resolved("ddp", world, per_node)
        assert str([d for d in range(1, world + 1) if world % d == 0]) in str(caught.value)

    @pytest.mark.parametrize(("world", "per_node"), [(0, 1), (4, 0), (4, True), (4.0, 2)])
    def test_senseless_world(self, world: Any, per_node: Any) -> None:
        with pytest.raises(FactorError, match="must be a positive integer"):
            resolved("ddp", world, per_node)

    def test_search_is_the_planners(self) -> None:
        with pytest.raises(FactorError, match="the planner finds them"):
            make_plan(block(), 6, 3)
        found = preset("mics", ShardFactor(3, 2))
        assert make_plan(block(), 6, 3, found).sharding == found


class TestPlan:
    """The plan itself."""

    def test_defaults_of_block_and_plan_agree(self) -> None:
        plan = make_plan(block(sharding="zero1"), 4, 2)
        assert plan == Plan(preset("zero1", ShardFactor(2, 2)))
        assert (plan.reduce, plan.publish) == (ReduceMode.TWO_LEVEL, PublishMode.BROADCAST)
        assert plan.overlap == Overlap(True, True, True, True)

    def test_everything_arrives(self) -> None:
        plan = make_plan(
            block(
                sharding="mics",
                reduce="all_reduce",
                publish="all_gather",
                overlap={"gather": False, "publish": "false"},
                hierarchical=True,
                merge_communicators=True,
                bucket_bytes=1000,
                prefetch_bytes=0,
                keep_after_forward=5,
            ),
            4,
            2,
        )
        assert plan == Plan(
            sharding=preset("mics", ShardFactor(2, 2)),
            reduce=ReduceMode.ALL_REDUCE,
            publish=PublishMode.ALL_GATHER,
            overlap=Overlap(gather=False, reduce_scatter=True, all_reduce=True, publish=False),
            hierarchical=True,
            merge_communicators=True,
            bucket_bytes=1000,
            prefetch_bytes=0,
            keep_after_forward=5,
        )

    def test_fingerprint_is_json_and_tells_plans_apart(self) -> None:
        first = make_plan(block(sharding="zero1"), 4, 2)
        second = make_plan(block(sharding="zero1", overlap={"gather": False}), 4, 2)
        third = make_plan(block(sharding="zero1"), 4, 4)
        printed = [json.dumps(plan.fingerprint(), sort_keys=True) for plan in (first, second, third)]
        assert len(set(printed)) == 3
        read = json.loads(printed[0])
        assert read == first.fingerprint()
        assert read["world_size"] == 4
        assert read["sharding"] == {"parameters": [1, 1], "gradients": [1, 1], "optimizer_states": [2, 2]}
        again = {name: ShardFactor(*pair) for name, pair in read["sharding"].items()}
        assert Sharding(**again, data_parallel=ShardFactor(*read["data_parallel"])) == first.sharding

    def test_describe_is_one_line(self) -> None:
        plan = make_plan(block(sharding="mics", overlap={"gather": False}, hierarchical=True), 4, 2)
        assert plan.describe() == (
            "P 2x1 | G 2x1 | OS 2x1 of 2x2, stage 3, reduce two_level, publish broadcast, "
            "overlap reduce_scatter+all_reduce+publish, hierarchical"
        )
        assert str(Overlap(False, False, False, False)) == "none"

    def test_node_order(self) -> None:
        plan = make_plan(block(sharding="ddp"), 8, 2)
        assert plan.nodes == (0, 1, 2, 3) and "order" not in plan.describe()
        placed = replace(plan, node_order=(0, 2, 1, 3))
        assert placed.nodes == (0, 2, 1, 3) == tuple(placed.fingerprint()["node_order"])
        assert placed.describe().endswith("nodes in order 0-2-1-3")
        assert plan.fingerprint() == replace(plan, node_order=(0, 1, 2, 3)).fingerprint()

    @pytest.mark.parametrize(("kept", "limit"), [("none", 0), ("all", math.inf), (0, 0), (7, 7)])
    def test_kept_bytes(self, kept: str | int, limit: float) -> None:
        assert Plan(preset("ddp", ShardFactor(1)), keep_after_forward=kept).kept_bytes == limit

    @pytest.mark.parametrize(
        "bad",
        [
            {"bucket_bytes": 0},
            {"prefetch_bytes": -1},
            {"keep_after_forward": -1},
            {"keep_after_forward": "some"},
            {"node_order": (1, 1)},
        ],
    )
    def test_ranges(self, bad: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match=next(iter(bad))):
            Plan(preset("ddp", ShardFactor(1)), **bad)

    def test_modes_are_enums(self) -> None:
        with pytest.raises(TypeError, match="ReduceMode"):
            Plan(preset("ddp", ShardFactor(1)), reduce="two_level")  # type: ignore[arg-type]
