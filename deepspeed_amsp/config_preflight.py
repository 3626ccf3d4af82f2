"""What may not stand next to an enabled amsp block in a DeepSpeed config, and misspelled or misplaced blocks.

The rules behind `config.preflight`, apart from it because they are many. Every rule yields `Problem`s that
name the line by its JSON path and the fix; `preflight_warnings` has what is legal but probably not meant.
Nothing here mutates a config. Key spellings, and the ways in which DeepSpeed reads a value, are those of 0.19.8.
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


def _half(value: Any) -> bool:
    """A torch_autocast block in fp16, written out or (on a GPU) by torch's default."""
    if not isinstance(value, Mapping) or not _on(value.get("enabled")):
        return False
    return str(value.get("dtype")).lower() not in ("bfloat16", "bf16", "torch.bfloat16")


def _compiles_parallelism(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and any(name in ("autosp", "autotp") for name in value)


_ZERO = "zero_optimization"
_KEEP = 'states stay on the device; set "device": "none" and shard further instead'
_OLD_OFFLOAD = "offloading is not supported; remove it and shard further instead"
_FULL = "AMSP sends full-precision parameters and gradients; set it to false"
_NO_PIPELINE = "pipeline parallelism cannot stand beside an amsp block; set it to 1 or remove it"
_NO_AUTOTP = "AutoTP cuts parameters behind the engine; set it to 1, cut the model yourself and pass an mpu"
_SECOND = "parameters would have two owners; set it to 1 and give amsp.sharding.parameters the size you want"
_MASTERS = "AMSP keeps masters and optimizer states in fp32 at their owner; set it to false and shard further"
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
    _Refusal(f"{_ZERO}.legacy_stage1", _on, "DeepSpeed has dropped the old stage 1; set it to false"),
    _Refusal(f"{_ZERO}.elastic_checkpoint", _on, "it is for DeepSpeed's own shards; set it to false"),
    _Refusal(f"{_ZERO}.pipeline_loading_checkpoint", _on, "ranks load their own files at once; set it to false"),
    _Refusal("bf16.bf16_master_weights_and_grads", _on, _MASTERS),
    _Refusal("bf16.bf16_optimizer_states", _on, _MASTERS),
    _Refusal("bfloat16.bf16_master_weights_and_grads", _on, _MASTERS),
    _Refusal("bfloat16.bf16_optimizer_states", _on, _MASTERS),
    _Refusal("fp16.fp16_master_weights_and_grads", _on, _MASTERS),
    _Refusal("torch_autocast", _half, 'only autocast in bf16 is supported; set "dtype": "bfloat16"'),
    _Refusal("checkpoint.load_universal", _on, "universal checkpoints cannot be loaded; set it to false"),
    _Refusal("pipeline.stages", _above_one, _NO_PIPELINE),
    _Refusal("tensor_parallel.autotp_size", _above_one, _NO_AUTOTP),
    _Refusal("tensor_parallel.tensor_parallel.tp_size", _above_one, _NO_AUTOTP),
    _Refusal("tensor_parallel.tp.tp_size", _above_one, _NO_AUTOTP),
    _Refusal("expert_parallel.enabled", _on, "expert parallelism is not supported; set it to false"),
    _Refusal("hybrid_engine.enabled", _on, "the hybrid engine replaces the AMSP engine; set it to false"),
    _Refusal("compile.deepcompile", _on, "DeepCompile brings its own ZeRO passes; set it to false"),
    _Refusal("compile.passes", _compiles_parallelism, "remove autosp and autotp, they cut the model behind the engine"),
    _Refusal("weight_quantization", lambda v: _present(v) and not (isinstance(v, Mapping) and is_off(v)),
             "quantized weights are not supported; remove the block"),
    _Refusal("autotuning.enabled", _on, "the autotuner only knows ZeRO stages; set it to false"),
)  # fmt: skip
_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
# Left as "auto" these stop DeepSpeed at once, mostly with a TypeError (accelerate#1644, transformers#16495) ...
_FATAL: tuple[str, ...] = (
    *_BATCH, "bf16", "bfloat16", "fp16", "communication_data_type", "gradient_allreduce_op", "wall_clock_breakdown",
)  # fmt: skip
# ... and these end in silent fp32, in stage 0, in a switch that is on, or in an error at the first step.
_NEEDED: tuple[str, ...] = (
    *_FATAL, "gradient_clipping", "bf16.enabled", "bfloat16.enabled", "fp16.enabled", f"{_ZERO}.stage",
    "gradient_predivide_factor", "prescale_gradients", "steps_per_print", "memory_breakdown", "dump_state",
    "dataloader_drop_last", "disable_python_gc", "managed_gradient_accumulation", "zero_allow_untested_optimizer",
    "torch_autocast.enabled", "data_types.grad_accum_dtype", "data_types.param_dtype", "data_types.buffer_dtype",
)  # fmt: skip


def lookup(ds_config: Any, path: str) -> Any:
    """The value at a dotted path, None when it is not there."""
    for key in path.split("."):
        ds_config = ds_config.get(key) if isinstance(ds_config, Mapping) else None
    return ds_config


def beside_block(
    ds_config: Mapping[str, Any], *, filled: bool = True, world_size: int | None = None
) -> Iterator[Problem]:
    """Everything that an enabled block cannot run next to.

    Args:
        ds_config: the whole config.
        filled: False while the Trainer or Accelerate may still fill in an "auto": transformers hands such a
            config to deepspeed.zero.Init. Then they are only refused where DeepSpeed itself would stop.
        world_size: number of ranks with samples of their own, for the batch sizes (`model_parallel.batch_ranks`);
            None when it is not known yet.
    """
    for path, refused, fix in _REFUSALS:
        value = lookup(ds_config, path)
        if refused(value):
            yield Problem(path, f"{shown(value)} does not work next to an amsp block: {fix}")
    for rule in (_mics, _swallowed, _offload_company, _precision, _clipping, _no_norm):
        yield from rule(ds_config)
    yield from _autos(ds_config, filled)
    yield from _batch(ds_config, world_size)


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


def _swallowed(ds_config: Mapping[str, Any]) -> Iterator[Problem]:
    """A top-level key inside zero_optimization (#2721); DeepSpeed says "extra inputs are not permitted"."""
    zero = lookup(ds_config, _ZERO)
    for key in zero if isinstance(zero, Mapping) else ():
        if key in TOP_LEVEL_KEYS and key != "amsp":  # the block has a rule of its own
            yield Problem(f"{_ZERO}.{key}", f'"{key}" is a top-level key; move it out of "{_ZERO}"')


def _offload_company(ds_config: Mapping[str, Any]) -> Iterator[Problem]:
    """Keys that are about offload; alone they say nothing (Lightning writes an aio block into every config)."""
    devices = [lookup(ds_config, f"{_ZERO}.{name}.device") for name in ("offload_optimizer", "offload_param")]
    if any(_offloads(device) for device in devices) or _on(lookup(ds_config, f"{_ZERO}.cpu_offload")):
        if _on(ds_config.get("zero_force_ds_cpu_optimizer")):
            yield Problem("zero_force_ds_cpu_optimizer", "is about offload, which is not supported; remove it")
        if ds_config.get("aio"):
            yield Problem("aio", "tunes NVMe offload, which is not supported; remove it")


def _precision(ds_config: Mapping[str, Any]) -> Iterator[Problem]:
    if "bf16" in ds_config and "bfloat16" in ds_config:
        yield Problem("bfloat16", 'DeepSpeed ignores this block in silence next to "bf16"; keep one of them')
    accumulation = lookup(ds_config, "data_types.grad_accum_dtype")
    if str(accumulation).lower() in ("int8", "torch.int8"):  # in DeepSpeed's list of dtypes
        yield Problem("data_types.grad_accum_dtype", f"{shown(accumulation)} cannot hold gradients; write fp32 or bf16")
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


def _no_norm(ds_config: Mapping[str, Any]) -> Iterator[Problem]:
    value = lookup(ds_config, f"{_ZERO}.compute_grad_norm")
    if value is not None and value != "auto" and not _on(value) and ds_config.get("gradient_clipping") != 0:
        yield Problem(f"{_ZERO}.compute_grad_norm", 'clipping needs the norm; write "gradient_clipping": 0.0 as well')


def _batch(ds_config: Mapping[str, Any], world_size: int | None) -> Iterator[Problem]:
    """DeepSpeed's verdict, in a sentence: all data-parallel ranks count, whatever the sharding factors."""
    given = {name: ds_config[name] for name in _BATCH if ds_config.get(name) is not None}
    if "auto" in given.values():  # listed with the other leftovers
        return
    wrong = {name: value for name, value in given.items() if not _is_count(value)}
    for name, value in wrong.items():
        yield Problem(name, f"must be a whole number of at least 1, not {shown(value)}")
    if wrong or world_size is None:
        return
    total, micro, steps = (given.get(name) for name in _BATCH)
    if total is None and micro is None:
        yield Problem(_BATCH[1], "must be given, or train_batch_size, or both")
    elif total is not None:
        unit = (micro or 1) * (steps or 1) * world_size
        fits = total == unit if micro and steps else total % unit == 0
        if not fits:
            nearest = [unit] if micro and steps else sorted({max(total // unit, 1) * unit, (total // unit + 1) * unit})
            factors = f"{micro or '?'} a GPU x {steps or '?'} accumulation steps x {world_size} GPUs"
            yield Problem(
                _BATCH[0],
                f"{total} is not {factors} (the data-parallel ones, whatever the sharding); "
                f"nearest values that fit: {', '.join(map(str, nearest))}",
            )


def _is_count(value: Any) -> bool:
    """A whole number from 1; DeepSpeed takes 2.0, too."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and math.isfinite(value) and value >= 1 and value == int(value)


def _autos(ds_config: Mapping[str, Any], filled: bool) -> Iterator[Problem]:
    if not filled and not any(lookup(ds_config, path) == "auto" for path in _FATAL):
        return
    left = [path for path in _NEEDED if lookup(ds_config, path) == "auto"]
    for section in ("optimizer", "scheduler"):
        left += [path for path, value in leaves(lookup(ds_config, f"{section}.params"), f"{section}.params")
                 if value == "auto"]  # fmt: skip
    if left:
        reason = 'still "auto"; the Trainer and Accelerate fill these in, without them write the values'
        yield Problem(", ".join(left), reason)


# --- warnings ---------------------------------------------------------------------------------------------

TOP_LEVEL_KEYS: frozenset[str] = frozenset((
    "activation_checkpointing", "aio", "allgather_size", "amsp", "autotuning", "bf16", "bfloat16", "checkpoint",
    "comet", "comms_logger", "communication_data_type", "compile", "csv_monitor", "data_efficiency",
    "data_parallel_size", "data_types", "dataloader_drop_last", "datastates_ckpt", "disable_allgather",
    "disable_python_gc", "dump_state", "expert_parallel", "flops_profiler", "fp16", "gradient_accumulation_steps",
    "gradient_allreduce_op", "gradient_clipping", "gradient_predivide_factor", "hybrid_engine", "log_level",
    "managed_gradient_accumulation", "memory_breakdown", "optimizer", "pipeline", "prescale_gradients", "scheduler",
    "seq_parallel_communication_data_type", "sequence_parallel_size", "steps_per_print", "tensor_parallel",
    "tensorboard", "timers", "torch_autocast", "train_batch_size", "train_micro_batch_size_per_gpu",
    "use_data_before_expert_parallelism", "vocabulary_size", "wall_clock_breakdown", "wandb", "weight_quantization",
    "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "zero_optimization", "amp",
    "compression_training", "curriculum_learning", "eigenvalue", "elasticity", "graph_harvesting", "nebula",
    "progressive_layer_drop", "quantize_training", "sparse_attention", "sparse_gradients",
))  # fmt: skip
"""Keys that DeepSpeed 0.19.8 reads at the top of a config; the removed ones only to refuse them."""

_ZERO_KEYS: frozenset[str] = frozenset((
    "allgather_bucket_size", "allgather_partitions", "contiguous_gradients", "offload_optimizer", "offload_param",
    "overlap_comm", "reduce_bucket_size", "reduce_scatter", "round_robin_gradients", "stage", "sub_group_size",
    "zero_hpz_partition_size",
))  # fmt: skip


def preflight_warnings(ds_config: Mapping[str, Any], effective_clip: float = 1.0) -> list[str]:
    """What DeepSpeed accepts in silence and the user hardly means, one line each, for the log of one rank.

    Args:
        ds_config: the whole config.
        effective_clip: what DeepSpeed makes of an absent gradient_clipping (``DeepSpeedConfig.gradient_clipping``).
    """
    lines = []
    if "gradient_clipping" not in ds_config and effective_clip:
        lines.append(
            f"gradient_clipping is absent, which means {effective_clip:g} in this DeepSpeed; "
            f"write the value that you want, 0.0 for no clipping"
        )
    idle = [_idle(str(key)) for key in ds_config if key not in TOP_LEVEL_KEYS]
    if idle:
        lines.append(f"these have no effect at the top level: {', '.join(idle)}")
    return lines


def _idle(key: str) -> str:
    """A key that DeepSpeed does not know at the top level, and where it may belong."""
    if key in _ZERO_KEYS or key.startswith("stage3_"):
        return f'"{key}" (it belongs in "{_ZERO}")'
    near = difflib.get_close_matches(key.lower(), TOP_LEVEL_KEYS, n=1, cutoff=0.85)
    return f'"{key}" (did you mean "{near[0]}"?)' if near else f'"{key}"'
