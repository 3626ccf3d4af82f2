"""What the keys of zero_optimization mean for us, and that no key was forgotten."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from deepspeed_amsp import config_preflight, config_zero
from deepspeed_amsp.config_zero import ZeroSettings, parsed_zero, read_zero_settings

PARSED: list[dict[str, Any]] = [
    {},
    {"overlap_comm": False, "reduce_scatter": False, "reduce_bucket_size": 1e6, "allgather_bucket_size": 5},
    {"stage3_prefetch_bucket_size": 7, "stage3_max_live_parameters": 1e8, "max_reuse_distance": 0},
    {"prefetch_bucket_size": "auto", "overlap_comm": "auto", "stage3_param_persistence_threshold": 1000},
    {"param_persistence_threshold": 10, "model_persistence_threshold": 30, "log_trace_cache_warnings": True},
]


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("keys", PARSED, ids=str)
def test_without_deepspeed_it_is_read_alike(keys: dict[str, Any], stage: int) -> None:
    config = {"zero_optimization": {"stage": stage, **keys}}
    assert read_zero_settings(config, parsed_zero(config)) == read(stage=stage, **keys)


@pytest.mark.parametrize("value", ["many", -1, 0.5, True, [1]])
def test_without_deepspeed_a_wrong_size_is_named(value: Any) -> None:
    with pytest.raises(ValueError, match=r"zero_optimization\.max_live_parameters must be a whole number"):
        parsed_zero({"zero_optimization": {"max_live_parameters": value}})
    with pytest.raises(ValueError, match=r"zero_optimization\.overlap_comm must be true or false"):
        parsed_zero({"zero_optimization": {"overlap_comm": "no"}})


def read(*, stage: int = 3, block: dict[str, Any] | None = None, **keys: Any) -> ZeroSettings:
    from deepspeed.runtime.zero.config import get_zero_config

    config = {"zero_optimization": {"stage": stage, **keys}, "amsp": block or {}}
    return read_zero_settings(config, get_zero_config(config))


def test_defaults() -> None:
    assert read() == ZeroSettings(
        reduce_bucket_numel=500_000_000,
        publish_bucket_numel=0,
        reduce=None,
        overlap_off=(),
        prefetch_numel=None,
        live_numel=None,
        reuse_numel=None,
        persistence_numel=0,
        model_persistence_numel=sys.maxsize,
        compute_grad_norm=True,
        load_from_fp32_weights=True,
        log_order_changes=False,
    )


@pytest.mark.parametrize("prefix", ["", "stage3_"])
@pytest.mark.parametrize(
    ("key", "field", "value"),
    [
        ("prefetch_bucket_size", "prefetch_numel", 7),
        ("prefetch_bucket_size", "prefetch_numel", 0),
        ("param_persistence_threshold", "persistence_numel", 1e4),
        ("model_persistence_threshold", "model_persistence_numel", 1e6),
        ("max_live_parameters", "live_numel", 0),
        ("max_live_parameters", "live_numel", 1e9),
        ("max_reuse_distance", "reuse_numel", 3e7),
    ],
)
def test_both_spellings(prefix: str, key: str, field: str, value: Any) -> None:
    written: dict[str, Any] = {prefix + key: value}
    auto: dict[str, Any] = {prefix + key: "auto"}
    assert getattr(read(**written), field) == value
    assert getattr(read(**auto), field) == getattr(read(), field)


@pytest.mark.parametrize(
    ("key", "field", "value"),
    [
        ("reduce_bucket_size", "reduce_bucket_numel", 5e7),
        ("allgather_bucket_size", "publish_bucket_numel", 2e8),
        ("load_from_fp32_weights", "load_from_fp32_weights", False),
        ("log_trace_cache_warnings", "log_order_changes", True),
        ("reduce_scatter", "reduce", "all_reduce"),
    ],
)
def test_one_spelling(key: str, field: str, value: Any) -> None:
    written: dict[str, Any] = {key: False if key == "reduce_scatter" else value}
    assert getattr(read(**written), field) == value


def test_the_norm_may_be_switched_off() -> None:
    assert not read(stage=1, compute_grad_norm=False).compute_grad_norm


class TestTheBlockWins:
    """A key of the block with the same meaning, written there."""

    def test_prefetch(self) -> None:
        assert read(prefetch_bucket_size=5).prefetch_bytes(100, 2) == 10
        assert read(block={"prefetch_bytes": 100}, prefetch_bucket_size=5).prefetch_bytes(100, 2) == 100
        assert read().prefetch_bytes(100, 2) == 100

    def test_live_parameters_limit_both(self) -> None:
        assert read(max_live_parameters=3).prefetch_bytes(100, 2) == 6
        assert read(block={"prefetch_bytes": 100}, max_live_parameters=0).prefetch_bytes(100, 2) == 0
        assert read(max_live_parameters=9, prefetch_bucket_size=4).prefetch_bytes(100, 2) == 8

    def test_reduce(self) -> None:
        assert read(reduce_scatter=False).reduce == "all_reduce"
        assert read(block={"reduce": "two_level"}, reduce_scatter=False).reduce is None

    @pytest.mark.parametrize(
        ("written", "overlap", "off"),
        [
            (False, {}, ("gather", "reduce_scatter", "all_reduce", "publish")),
            ("false", {}, ("gather", "reduce_scatter", "all_reduce", "publish")),
            (False, {"gather": True, "publish": False}, ("reduce_scatter", "all_reduce")),
            (True, {}, ()),
            (None, {}, ()),
            ("auto", {}, ()),
        ],
    )
    @pytest.mark.parametrize("stage", [1, 3])
    def test_overlap(self, written: Any, overlap: dict[str, bool], off: tuple[str, ...], stage: int) -> None:
        """Unwritten, DeepSpeed puts false at stages 1 and 2; that is not the user's wish."""
        block = {"overlap": overlap} if overlap else {}
        assert read(stage=stage, block=block, overlap_comm=written).overlap_off == off

    def test_kept(self) -> None:
        assert read().kept_bytes(2) is None
        assert read(max_reuse_distance=10).kept_bytes(2) == 10
        assert read(max_reuse_distance=10, max_live_parameters=2).kept_bytes(2) == 4
        assert read(block={"keep_after_forward": "none"}, max_reuse_distance=10).kept_bytes(2) is None


def test_a_bucket_is_as_small_as_the_smaller_limit() -> None:
    assert read(reduce_bucket_size=100).bucket_numel == 100
    assert read(reduce_bucket_size=100, allgather_bucket_size=30).bucket_numel == 30
    assert read(reduce_bucket_size=100, allgather_bucket_size=0).bucket_numel == 100
    assert read(reduce_bucket_size=1e9).bucket_numel == 1e9, "an unwritten limit is none"


def test_units_that_stay() -> None:
    assert read().persistent([1, 5]) == [False, False]
    assert read(param_persistence_threshold=10).persistent([10, 11, 0, 3]) == [True, False, False, True]
    small = read(param_persistence_threshold=10, model_persistence_threshold=12)
    assert small.persistent([10, 3, 2]) == [True, False, True], "one that does not fit does not stop the next"


def test_old_ways_to_write_the_section() -> None:
    from deepspeed.runtime.zero.config import get_zero_config

    for config in ({"zero_optimization": True}, {}):
        assert read_zero_settings(config, get_zero_config(config)).reduce_bucket_numel == 500_000_000


REFUSED = {
    "stage", "offload_param", "offload_optimizer", "zenflow", "cpu_offload", "cpu_offload_param",
    "cpu_offload_use_pin_memory", "legacy_stage1", "elastic_checkpoint", "pipeline_loading_checkpoint",
    "zero_hpz_partition_size", "zero_quantized_weights", "zero_quantized_gradients",
    "zero_quantized_nontrainable_weights",
}  # fmt: skip
"""Keys that config_preflight (or check_stage) looks after."""
ELSEWHERE = {
    "stage3_gather_fp16_weights_on_model_save": "the old name of gather_16bit_weights_on_model_save",
    "save_muon_momentum_buffer_in_memory": "only about NVMe offload, which is refused",
}


def test_every_key_of_deepspeed_is_in_the_table_or_refused() -> None:
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    assert config_zero.__doc__ is not None
    rows = [line.split("|")[1] for line in config_zero.__doc__.splitlines() if line.startswith("| ")]
    table = {name.strip() for row in rows for name in row.split(",")} - {"key"}
    known = set(DeepSpeedZeroConfig.model_fields)
    assert known == table | REFUSED | set(ELSEWHERE)
    assert not table & REFUSED


def test_the_list_of_top_level_keys_is_deepspeeds() -> None:
    """Whatever DeepSpeed looks for at the top of a config must not be called unknown."""
    from deepspeed.runtime.config import DeepSpeedConfig

    asked: set[str] = set()

    class Spy(dict):  # type: ignore[type-arg]
        def get(self, key: Any, default: Any = None) -> Any:
            asked.add(key)
            return super().get(key, default)

        def __getitem__(self, key: Any) -> Any:
            asked.add(key)
            return super().__getitem__(key)

        def __contains__(self, key: Any) -> bool:
            asked.add(key)
            return super().__contains__(key)

        def keys(self) -> Any:
            return Watched(super().keys())

    class Watched(list):  # type: ignore[type-arg]
        def __contains__(self, key: Any) -> bool:
            asked.add(key)
            return super().__contains__(key)

    DeepSpeedConfig(Spy(train_batch_size=1, zero_optimization={"stage": 1}))
    asked -= {"amps"}
    read_elsewhere = {"sequence_parallel_size", "data_parallel_size", "allgather_size", "amsp"}
    assert asked <= config_preflight.TOP_LEVEL_KEYS
    assert asked | read_elsewhere >= config_preflight.TOP_LEVEL_KEYS


def test_zero_keys_at_the_top_are_zero_keys() -> None:
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    assert set(DeepSpeedZeroConfig.model_fields) >= config_preflight._ZERO_KEYS
    assert not config_preflight._ZERO_KEYS & config_preflight.TOP_LEVEL_KEYS
