"""The amsp block, the ZeRO stage next to it, and reading config files."""

from __future__ import annotations

import base64
import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_amsp.config import (
    AmspBlock,
    ConfigError,
    Problem,
    check_stage,
    is_missing_file,
    load_config,
    load_config_file,
    read_block,
)


def read(block: Any) -> AmspBlock:
    """An enabled block."""
    found = read_block({"amsp": block})
    assert found is not None
    return found


def problems_of_block(block: Any) -> dict[str, str]:
    """Path -> reason of everything that is wrong with a block."""
    with pytest.raises(ConfigError) as caught:
        read_block({"amsp": block})
    assert all(str(problem) in str(caught.value) for problem in caught.value.problems)
    return {problem.path: problem.reason for problem in caught.value.problems}


class TestBlock:
    """What is legal in the block."""

    def test_empty_block_asks_the_planner(self) -> None:
        block = read({})
        assert block.enabled
        assert block.sharding == "search"
        assert (block.reduce, block.publish) == ("two_level", "broadcast")
        assert block.overlap.model_dump() == dict.fromkeys(("gather", "reduce_scatter", "all_reduce", "publish"), True)
        assert block.topology.model_dump() == {"gpus_per_node": None, "leaf_switches": None}
        assert (block.profile, block.bucket_bytes, block.memory_limit_gb) == (None, None, None)
        assert (block.verify_every, block.prefetch_bytes, block.keep_after_forward) == (0, 64 * 2**20, "none")
        assert (block.hierarchical, block.merge_communicators) == (False, False)

    def test_the_block_of_the_design(self) -> None:
        block = read(
            {
                "sharding": {"parameters": [1, 1], "gradients": [1, 1], "optimizer_states": [8, 1]},
                "reduce": "two_level",
                "publish": "broadcast",
                "overlap": {"gather": True, "reduce_scatter": True, "all_reduce": True, "publish": True},
                "topology": {"gpus_per_node": 8, "leaf_switches": [["node1", "node2"], ["node3", "node4"]]},
                "profile": "profile.json",
            }
        )
        assert block.sharding.filled() == {  # type: ignore[union-attr]
            "parameters": (1, 1),
            "gradients": (1, 1),
            "optimizer_states": (8, 1),
        }
        assert block.topology.leaf_switches == (("node1", "node2"), ("node3", "node4"))
        assert block.profile == "profile.json"

    @pytest.mark.parametrize(
        ("given_members", "filled"),
        [
            ({"optimizer_states": 8}, (1, 1, 8)),
            ({"gradients": 4}, (1, 4, 4)),
            ({"parameters": [2, 1]}, ((2, 1), (2, 1), (2, 1))),
            ({"parameters": 2, "optimizer_states": [2, 2]}, (2, 2, (2, 2))),
            ({}, (1, 1, 1)),
        ],
    )
    def test_missing_members_shard_as_little_as_possible(self, given_members: Any, filled: tuple[Any, ...]) -> None:
        assert tuple(read({"sharding": given_members}).sharding.filled().values()) == filled  # type: ignore[union-attr]

    def test_absent_and_disabled(self) -> None:
        assert read_block({}) is None
        for off in (False, "false", "False"):
            assert read_block({"amsp": {"enabled": off, "anything": "auto"}}) is None
        for on in (True, "true", "True"):
            assert read({"enabled": on}).enabled is True

    def test_is_frozen_and_copies(self) -> None:
        source = {"sharding": {"parameters": [2, 1]}, "topology": {"leaf_switches": [["a"]]}}
        before = copy.deepcopy(source)
        block = read(source)
        with pytest.raises(ValueError, match="frozen"):
            block.reduce = "all_reduce"
        assert source == before
        assert hash(block) == hash(read(source))

    @pytest.mark.parametrize("value", ["none", "all", 0, 10_000, 1e4])
    def test_keep_after_forward(self, value: Any) -> None:
        assert read({"keep_after_forward": value}).keep_after_forward == value

    @pytest.mark.parametrize("block", [None, [], "zero1", 8, True, math.nan])
    def test_must_be_an_object(self, block: Any) -> None:
        assert "must be an object" in problems_of_block(block)["amsp"]


class TestUnknownKeys:
    """One error with path, value and nearest key, for everything at once."""

    @pytest.mark.parametrize(
        ("block", "path", "nearest"),
        [
            ({"sharding": {"paramters": 2}}, "amsp.sharding.paramters", "parameters"),
            ({"sharding": {"optimiser_states": 2}}, "amsp.sharding.optimiser_states", "optimizer_states"),
            ({"shardings": "ddp"}, "amsp.shardings", "sharding"),
            ({"enable": False}, "amsp.enable", "enabled"),
            ({"overlap": {"allreduce": True}}, "amsp.overlap.allreduce", "all_reduce"),
            ({"topology": {"gpu_per_node": 2}}, "amsp.topology.gpu_per_node", "gpus_per_node"),
        ],
    )
    def test_path_and_nearest_key(self, block: Any, path: str, nearest: str) -> None:
        reason = problems_of_block(block)[path]
        assert reason.startswith("unknown key (value ")
        assert f'did you mean "{nearest}"?' in reason

    def test_every_legal_key_is_listed(self) -> None:
        assert "Legal: enabled, sharding, reduce, publish" in problems_of_block({"paramters": 2})["amsp.paramters"]

    def test_all_at_once(self) -> None:
        block = {
            "sharding": {"paramters": [2, 1], "gradients": True, "optimizer_states": "auto"},
            "reduce": "twolevel",
            "overlap": {"gater": 1},
            "verify_every": -1,
        }
        assert set(problems_of_block(block)) == {
            "amsp.sharding.paramters",
            "amsp.sharding.gradients",
            "amsp.sharding.optimizer_states",
            "amsp.reduce",
            "amsp.overlap.gater",
            "amsp.verify_every",
        }

    def test_value_is_shown_as_json(self) -> None:
        assert "(value [2, 1])" in problems_of_block({"sharding": {"paramters": [2, 1]}})["amsp.sharding.paramters"]

    def test_non_string_key(self) -> None:
        assert "unknown key" in problems_of_block({1: 2})["amsp.1"]

    @pytest.mark.parametrize(("key", "value", "nearest"), [
        ("sharding", "zero4", "zero3"), ("sharding", "ZeRO1", "zero1"), ("sharding", "plan", "ddp"),
        ("reduce", "twolevel", "two_level"), ("publish", "allgather", "all_gather"),
        ("keep_after_forward", "al", "all"),
    ])  # fmt: skip
    def test_nearest_name(self, key: str, value: str, nearest: str) -> None:
        reason = problems_of_block({key: value})[f"amsp.{key}"]
        assert "must be one of" in reason
        assert json.dumps(value) in reason
        if value != "plan":
            assert f'did you mean "{nearest}"?' in reason

    @pytest.mark.parametrize("key", ["sharding", "overlap", "topology"])
    @pytest.mark.parametrize("value", [8, None, [1, 1], True])
    def test_objects_are_objects(self, key: str, value: Any) -> None:
        reason = problems_of_block({key: value})[f"amsp.{key}"]
        assert "an object with" in reason
        assert reason.endswith(f"not {json.dumps(value)}")


class TestAuto:
    """Accelerate fills "auto", and it does not know our keys."""

    @pytest.mark.parametrize(
        ("block", "path"),
        [
            ({"sharding": "auto"}, "amsp.sharding"),
            ({"sharding": {"parameters": "auto"}}, "amsp.sharding.parameters"),
            ({"sharding": {"parameters": ["auto", 1]}}, "amsp.sharding.parameters.0"),
            ({"bucket_bytes": "auto"}, "amsp.bucket_bytes"),
            ({"profile": "auto"}, "amsp.profile"),
            ({"unknown": "auto"}, "amsp.unknown"),
        ],
    )
    def test_inside_the_block(self, block: Any, path: str) -> None:
        assert '"sharding": "search"' in problems_of_block(block)[path]


class TestBooleans:
    """DeepSpeed's strings are taken, numbers and other words are not."""

    @pytest.mark.parametrize(("value", "expected"), [(True, True), ("true", True), ("FALSE", False), (False, False)])
    def test_taken(self, value: Any, expected: bool) -> None:
        assert read({"overlap": {"gather": value}}).overlap.gather is expected
        assert read({"hierarchical": value}).hierarchical is expected

    @pytest.mark.parametrize("value", [1, 0, "yes", "on", "", None, [True]])
    def test_refused(self, value: Any) -> None:
        reason = problems_of_block({"enabled": value, "overlap": {"gather": value}, "hierarchical": value})
        assert set(reason) == {"amsp.enabled", "amsp.overlap.gather", "amsp.hierarchical"}
        assert reason["amsp.hierarchical"] == f"must be true or false, not {json.dumps(value)}"


words = st.sampled_from(["auto", "true", "none", "all", "zero1", "search", "two_level", "gather", "parameters", ""])
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 9) | st.floats() | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=6,
)


class TestNumbers:
    """Whole numbers are whole numbers; 2.0 counts as one, true does not."""

    keys = ("parameters", "gradients", "optimizer_states")

    @pytest.mark.parametrize("key", keys)
    @pytest.mark.parametrize(
        ("value", "expected"),
        [(2, 2), (2.0, 2), (1000.0, 1000), ([2, 1], (2, 1)), ([2.0, 1.0], (2, 1)), ((4, 2), (4, 2))],
    )
    def test_factors_taken(self, key: str, value: Any, expected: Any) -> None:
        found = getattr(read({"sharding": {key: value}}).sharding, key)
        assert found == expected
        assert all(type(number) is int for number in (found if isinstance(found, tuple) else (found,)))

    @pytest.mark.parametrize("key", keys)
    @pytest.mark.parametrize(
        "value",
        [2.5, "2", "", True, False, 0, -1, None, math.nan, math.inf, -math.inf, [2], [], [1, 1, 1],
         [True, 1], [1, "1"],
         [2, 0], [1.5, 1], [[1, 1]], {"s0": 1}],
    )  # fmt: skip
    def test_factors_refused(self, key: str, value: Any) -> None:
        reason = problems_of_block({"sharding": {key: value}})[f"amsp.sharding.{key}"]
        assert reason.startswith("must be ")
        assert reason.endswith(f"not {json.dumps(value)}")

    @pytest.mark.parametrize("path", ["verify_every", "prefetch_bytes", "bucket_bytes", "topology.gpus_per_node"])
    @pytest.mark.parametrize("value", [2.5, "2", True, -1, math.nan, [2]])
    def test_other_counts_refused(self, path: str, value: Any) -> None:
        assert f"amsp.{path}" in problems_of_block(nested(path, value))

    @pytest.mark.parametrize(("path", "zero"), [("verify_every", True), ("prefetch_bytes", True),
                                                ("bucket_bytes", False),
                                                ("topology.gpus_per_node", False)])  # fmt: skip
    def test_zero(self, path: str, zero: bool) -> None:
        if zero:
            read(nested(path, 0))
        else:
            assert f"amsp.{path}" in problems_of_block(nested(path, 0))

    @pytest.mark.parametrize("value", [80, 76.5, None])
    def test_memory_limit(self, value: Any) -> None:
        assert read({"memory_limit_gb": value}).memory_limit_gb == value

    @pytest.mark.parametrize("value", [0, -1, True, "80", math.nan, math.inf])
    def test_memory_limit_refused(self, value: Any) -> None:
        assert "GB" in problems_of_block({"memory_limit_gb": value})["amsp.memory_limit_gb"]

    def test_leaf_switches_from_a_file(self) -> None:
        assert read({"topology": {"leaf_switches": "switches"}}).topology.leaf_switches == "switches"

    @pytest.mark.parametrize("value", [["a"], [[1]], [[""]], [["a"], ["b", "a"]], [["a"], []], "", {}])
    def test_leaf_switches_refused(self, value: Any) -> None:
        assert "amsp.topology.leaf_switches" in problems_of_block({"topology": {"leaf_switches": value}})

    @pytest.mark.parametrize("value", [1, "", True, ["profile.json"]])
    def test_profile_refused(self, value: Any) -> None:
        assert "path of a profile" in problems_of_block({"profile": value})["amsp.profile"]

    @given(st.dictionaries(st.sampled_from([*AmspBlock.model_fields, "paramters"]), json_values, max_size=4))
    def test_any_block_is_read_or_refused_with_paths(self, block: dict[str, Any]) -> None:
        problems: tuple[Problem, ...] | None = None
        try:
            read_block({"amsp": block})
        except ConfigError as error:
            problems = error.problems
        assert problems is None or (problems and all(each.path.startswith("amsp") for each in problems))


def nested(path: str, value: Any) -> dict[str, Any]:
    """{"a": {"b": value}} for "a.b"."""
    for key in reversed(path.split(".")):
        value = {key: value}
    return value  # type: ignore[no-any-return]


class TestStage:
    """zero_optimization.stage follows from the factors."""

    @pytest.mark.parametrize(
        ("zero", "stage"),
        [({"stage": 1}, 1), ({"stage": 2}, 2), ({"stage": 3}, 3), (True, 1), ({"stage": True}, 1),
         ({"stage": "3"}, 3),
         ({"stage": 2.0}, 2)],
    )  # fmt: skip
    def test_matches(self, zero: Any, stage: int) -> None:
        check_stage({"zero_optimization": zero}, stage, "of the factors")
        for other in {1, 2, 3} - {stage}:
            with pytest.raises(ConfigError) as caught:
                check_stage({"zero_optimization": zero}, other, "of the factors")
            assert f'write "zero_optimization": {{"stage": {other}}}, because of the factors' in str(caught.value)

    @pytest.mark.parametrize(
        "config",
        [{}, {"zero_optimization": {}}, {"zero_optimization": False}, {"zero_optimization": {"stage": 0}},
         {"zero_optimization": {"stage": "auto"}}, {"zero_optimization": {"stage": 1.5}},
         {"zero_optimization": {"stage": None}}, {"zero_optimization": {"stage": math.nan}},
         {"zero_optimization": 1}],
    )  # fmt: skip
    def test_stage_0_and_nonsense(self, config: dict[str, Any]) -> None:
        with pytest.raises(ConfigError, match=r'write "zero_optimization": \{"stage": 1\}'):
            check_stage(config, 1, "of the factors")


class TestFiles:
    """Duplicate keys and the missing file."""

    def test_reads_what_deepspeed_reads(self, tmp_path: Path) -> None:
        file = tmp_path / "ds.json"
        file.write_text('\ufeff{"amsp": {"sharding": "zero1",}, // comment\n "train_batch_size": 4}', encoding="utf-8")
        assert load_config_file(file) == {"amsp": {"sharding": "zero1"}, "train_batch_size": 4}
        assert load_config(str(file)) == load_config_file(file)

    @pytest.mark.parametrize(
        ("text", "paths"),
        [
            ('{"amsp": {}, "amsp": {"sharding": "ddp"}}', ["amsp"]),
            ('{"amsp": {"reduce": "all_reduce", "reduce": "two_level"}}', ["amsp.reduce"]),
            (
                '{"amsp": {"sharding": {"optimizer_states": 2, "gradients": 1, "optimizer_states": 4}}}',
                ["amsp.sharding.optimizer_states"],
            ),
            ('{"a": [{"b": 1, "b": 1}], "c": {"d": 1, "d": 2, "e": 1, "e": 2}}', ["a.0.b", "c.d", "c.e"]),
            # the repeated object inside is shadowed and must not be mistaken for one that is built later
            ('{"x": {"a": {"q": 1, "q": 2}, "a": 1}, "y": {"q": 1}, "z": {"q": 1}}', ["x.a"]),
        ],
    )
    def test_duplicates_at_any_depth(self, tmp_path: Path, text: str, paths: list[str]) -> None:
        file = tmp_path / "ds.json"
        file.write_text(text, encoding="utf-8")
        encoded = base64.urlsafe_b64encode(text.encode()).decode()
        for config in (str(file), encoded):
            with pytest.raises(ConfigError) as caught:
                load_config(config)
            assert [problem.path for problem in caught.value.problems] == paths

    def test_missing_file(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        for load in (load_config_file, load_config):
            with pytest.raises(FileNotFoundError, match="no such file") as caught:
                load("configs/ds.json")
            assert str(tmp_path / "configs" / "ds.json") in str(caught.value)

    @pytest.mark.parametrize(
        "name",
        ["ds_config.json", "configs/ds_zero1.json", "/no/where", "abcd", "abcdefgh", "ds_z", "", " ", "é"],
    )  # fmt: skip
    def test_is_missing(self, name: str) -> None:
        assert is_missing_file(name)

    def test_is_not_missing(self, tmp_path: Path) -> None:
        file = tmp_path / "ds.json"
        file.write_text("{}", encoding="utf-8")
        assert not is_missing_file(str(file))
        encoded = base64.urlsafe_b64encode(b'{"train_batch_size": 4}').decode()
        assert not is_missing_file(encoded)
        assert load_config(encoded) == {"train_batch_size": 4}

    def test_not_an_object(self, tmp_path: Path) -> None:
        file = tmp_path / "ds.json"
        file.write_text("[1]", encoding="utf-8")
        with pytest.raises(ConfigError, match="must be an object"):
            load_config_file(file)
