"""What may not stand next to an enabled amsp block in a DeepSpeed config, and misspelled or misplaced blocks.

The rules behind `config.preflight`, apart from it because they are many. Every rule yields `Problem`s that
name the line by its JSON path and the fix; nothing here mutates a config. Key spellings, and the ways in
which DeepSpeed reads a value, are those of 0.19.8.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong: its JSON path ("amsp.sharding.parameters") and a sentence with the fix."""

    path: str
    reason: str

    def __str__(self) -> str:
        """One line of the error."""
        return f"{self.path}: {self.reason}"


class ConfigError(ValueError):
    """All problems of a config at once; `problems` has them one by one."""

    def __init__(self, problems: list[Problem]) -> None:
        """Keep the problems and print them one to a line."""
        self.problems = tuple(problems)
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        super().__init__("\n  ".join([f"{count} in the DeepSpeed config:", *map(str, problems)]))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[list[Problem]]]:
        """Pickled by its problems: an exception that travels between processes is rebuilt from its arguments."""
        return type(self), (list(self.problems),)


def shown(value: object) -> str:
    """A value as JSON spells it."""
    return json.dumps(value, default=repr)


def is_off(block: Mapping[str, Any]) -> bool:
    """Whether a block says "enabled": false, as a boolean or as the string that DeepSpeed accepts too."""
    enabled = block.get("enabled", True)
    return enabled is False or (isinstance(enabled, str) and enabled.lower() == "false")


def leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """(dotted path, value) of everything that is neither an object nor a list."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from leaves(item, f"{path}.{key}")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from leaves(item, f"{path}.{index}")
    else:
        yield path, value


class _Refusal(NamedTuple):
    path: str
    refused: Callable[[Any], bool]
    fix: str


def _on(value: Any) -> bool:
    """What DeepSpeed's models read as true."""
    return str(value).lower() in ("true", "1", "1.0", "yes", "on", "t", "y")


def _above_one(value: Any) -> bool:
    """Above 1 as a number; DeepSpeed's models read "8" as 8."""
    try:
        return not isinstance(value, bool) and float(value) > 1
    except (TypeError, ValueError):
        return False


def _offloads(value: Any) -> bool:
    return value is not None and str(value).lower() not in ("none", "auto")  # its models drop "auto"


def _present(value: Any) -> bool:
    return value is not None and value is not False


def _compiles_parallelism(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and any(name in ("autosp", "autotp") for name in value)


_ZERO = "zero_optimization"
_KEEP = 'states stay on the device; set "device": "none" and shard further instead'
_OLD_OFFLOAD = "offloading is not supported; remove it and shard further instead"
_FULL = "AMSP sends full-precision parameters and gradients; set it to false"
_DATA_ONLY = "AMSP shards over pure data parallelism; set it to 1 or remove it"
_SECOND = "parameters would have two owners; set it to 1 and give amsp.sharding.parameters the size you want"
_REFUSALS: tuple[_Refusal, ...] = (
    _Refusal(f"{_ZERO}.offload_optimizer.device", _offloads, _KEEP),
    _Refusal(f"{_ZERO}.offload_optimizer.super_offload", _on, "SuperOffload is not supported; remove it"),
    _Refusal(f"{_ZERO}.offload_param.device", _offloads, _KEEP),
    _Refusal(f"{_ZERO}.cpu_offload", _on, _OLD_OFFLOAD),
    _Refusal(f"{_ZERO}.cpu_offload_param", _on, _OLD_OFFLOAD),
    _Refusal(f"{_ZERO}.cpu_offload_params", _on, _OLD_OFFLOAD),
    _Refusal(f"{_ZERO}.cpu_offload_use_pin_memory", _on, _OLD_OFFLOAD),
    _Refusal(f"{_ZERO}.zero_hpz_partition_size", _above_one, _SECOND),
    _Refusal(f"{_ZERO}.zero_quantized_weights", _on, _FULL),
    _Refusal(f"{_ZERO}.zero_quantized_gradients", _on, _FULL),
    _Refusal(f"{_ZERO}.zero_quantized_nontrainable_weights", _on, _FULL),
    _Refusal(f"{_ZERO}.zenflow", _present, "ZenFlow has its own optimizer; remove it"),
    _Refusal("pipeline.stages", _above_one, _DATA_ONLY),
    _Refusal("tensor_parallel.autotp_size", _above_one, _DATA_ONLY),
    _Refusal("tensor_parallel.tensor_parallel.tp_size", _above_one, _DATA_ONLY),
    _Refusal("tensor_parallel.tp.tp_size", _above_one, _DATA_ONLY),
    _Refusal("sequence_parallel_size", _above_one, _DATA_ONLY),
    _Refusal("expert_parallel.enabled", _on, "expert parallelism is not supported; set it to false"),
    _Refusal("hybrid_engine.enabled", _on, "the hybrid engine replaces the AMSP engine; set it to false"),
    _Refusal("compile.deepcompile", _on, "DeepCompile brings its own ZeRO passes; set it to false"),
    _Refusal("compile.passes", _compiles_parallelism, "remove autosp and autotp, AMSP is data-parallel only"),
    _Refusal("weight_quantization", lambda v: _present(v) and not (isinstance(v, Mapping) and is_off(v)),
             "quantized weights are not supported; remove the block"),
    _Refusal("autotuning.enabled", _on, "the autotuner only knows ZeRO stages; set it to false"),
)  # fmt: skip
# Left as "auto" these end in a TypeError, or in silent fp32 or stage 0 (accelerate#1644, transformers#16495).
_NEEDED: tuple[str, ...] = (
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping",
    "bf16", "bfloat16", "fp16", "bf16.enabled", "bfloat16.enabled", "fp16.enabled", f"{_ZERO}.stage",
)  # fmt: skip


def lookup(ds_config: Any, path: str) -> Any:
    """The value at a dotted path, None when it is not there."""
    for key in path.split("."):
        ds_config = ds_config.get(key) if isinstance(ds_config, Mapping) else None
    return ds_config


def beside_block(ds_config: Mapping[str, Any]) -> Iterator[Problem]:
    """Everything that an enabled block cannot run next to."""
    for path, refused, fix in _REFUSALS:
        value = lookup(ds_config, path)
        if refused(value):
            yield Problem(path, f"{shown(value)} does not work next to an amsp block: {fix}")
    for rule in (_mics, _precision, _clipping, _autos):
        yield from rule(ds_config)


def misplaced(ds_config: Mapping[str, Any]) -> Iterator[Problem]:
    """A block inside another one, mostly zero_optimization (as aio in #2721)."""
    for key, value in ds_config.items():
        if key != "amsp" and isinstance(value, Mapping) and "amsp" in value:
            yield Problem(f"{key}.amsp", f'"amsp" is a top-level block; move it out of "{key}" to the top')


def misspelled(ds_config: Mapping[str, Any], legal_keys: set[str]) -> Iterator[Problem]:
    """Conservative: the name must be close and the value look like our block. "amp" was Apex's key."""
    if "amsp" in ds_config:
        return
    for key, value in ds_config.items():
        name = str(key).lower()
        close = "amsp" in name or difflib.SequenceMatcher(None, name, "amsp").ratio() >= 0.75
        if not close or not isinstance(value, Mapping):
            continue
        telling = (legal_keys - {"enabled"}) & set(value)
        if telling or (name != "amp" and set(value) <= legal_keys):
            yield Problem(str(key), 'unknown top-level block, which DeepSpeed ignores; did you mean "amsp"?')


def _mics(ds_config: Mapping[str, Any]) -> Iterator[Problem]:
    """MiCS was removed from DeepSpeed (#8489); the block can say the same."""
    zero = lookup(ds_config, _ZERO)
    names = ("mics_shard_size", "mics_hierarchical_params_gather")
    found = [name for name in names if name in zero] if isinstance(zero, Mapping) else []
    if not found:
        return
    block: dict[str, Any] = {}
    size = zero.get("mics_shard_size")
    if _above_one(size):
        number = int(float(size))
        block["sharding"] = {"parameters": number, "gradients": number, "optimizer_states": number}
    if _on(zero.get("mics_hierarchical_params_gather")):
        block["hierarchical"] = True
    advice = f'the equivalent is "amsp": {json.dumps(block)}' if block else "it asks for nothing"
    path = f"{_ZERO}.{found[0]}"
    yield Problem(path, f"MiCS keys do not work next to an amsp block; remove them, {advice}")


def _precision(ds_config: Mapping[str, Any]) -> Iterator[Problem]:
    if "bf16" in ds_config and "bfloat16" in ds_config:
        yield Problem("bfloat16", 'DeepSpeed ignores this block in silence next to "bf16"; keep one of them')
    bf16 = next((name for name in ("bf16", "bfloat16") if _on(lookup(ds_config, f"{name}.enabled"))), None)
    if bf16 and _on(lookup(ds_config, "fp16.enabled")):
        yield Problem("fp16.enabled", f"{bf16}.enabled is true as well; set one of the two to false")


def _clipping(ds_config: Mapping[str, Any]) -> Iterator[Problem]:
    """DeepSpeed takes -1, null, true and "1.0" as they are; absent means 1.0 there."""
    value = ds_config.get("gradient_clipping", 1.0)
    if value == "auto":  # listed with the other leftovers
        return
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value < 0:
        yield Problem("gradient_clipping", f"must be a number, 0.0 for no clipping, not {shown(value)}")


def _autos(ds_config: Mapping[str, Any]) -> Iterator[Problem]:
    left = [path for path in _NEEDED if lookup(ds_config, path) == "auto"]
    for section in ("optimizer", "scheduler"):
        left += [path for path, value in leaves(lookup(ds_config, f"{section}.params"), f"{section}.params")
                 if value == "auto"]  # fmt: skip
    if left:
        reason = 'still "auto"; the Trainer and Accelerate fill these in, without them write the values'
        yield Problem(", ".join(left), reason)
