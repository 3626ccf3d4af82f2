"""The "amsp" block of a DeepSpeed config, and what may stand next to it. The only reader of ds_config.

Every problem of a config is collected and raised as one `ConfigError`; each names its JSON path. Nothing here
mutates a config. DeepSpeed ignores an unknown top-level key in silence, so a typo would train plain ZeRO:
hence the strictness (issues are those of deepspeedai/DeepSpeed, behaviour is that of 0.19.8).
"""

from __future__ import annotations

import base64
import difflib
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import hjson
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    PlainValidator,
    Tag,
    ValidationError,
)

from deepspeed_amsp.config_preflight import (
    ConfigError,
    Problem,
    beside_block,
    is_off,
    leaves,
    lookup,
    misplaced,
    misspelled,
    shown,
)

__all__ = [  # noqa: RUF022 (by topic)
    "AmspBlock", "FactorsBlock", "OverlapBlock", "TopologyBlock", "CheckpointBlock", "FactorValue", "SHARDING_NAMES",
    "ConfigError", "Problem", "read_block", "preflight", "check_stage",
    "load_config", "load_config_file", "is_missing_file",
]  # fmt: skip

SHARDING_NAMES: tuple[str, ...] = ("ddp", "zero1", "zero2", "zero3", "mics", "search")


# --- the block --------------------------------------------------------------------------------------------

FactorValue = int | tuple[int, int]


def _nearest(word: object, legal: tuple[str, ...]) -> str:
    return difflib.get_close_matches(str(word).lower(), legal, n=1, cutoff=0.0)[0]


def _whole(minimum: int) -> Callable[[Any], int]:
    """Accepts 2 and 2.0 (JSON writers make floats of integers); refuses true, "2", 2.5, NaN and infinity."""

    def check(value: Any) -> int:
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not math.isfinite(value) or value != int(value):
            raise ValueError("must be a whole number (not a string, not a boolean)")
        if value < minimum:
            raise ValueError(f"must be at least {minimum}")
        return int(value)

    return check


def _factor(value: Any) -> FactorValue:
    if not isinstance(value, (list, tuple)):
        return _whole(1)(value)
    if len(value) != 2:
        raise ValueError("must be a whole number of GPUs or a pair [GPUs in a node, nodes]")
    return (_whole(1)(value[0]), _whole(1)(value[1]))


def _switch(value: Any) -> bool:
    """JSON booleans and, as DeepSpeed does, "true" and "false"; 1, 0, "yes" and "on" are refused."""
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    if not isinstance(value, bool):
        raise ValueError("must be true or false")
    return value


def _one_of(*legal: str) -> Callable[[Any], str]:
    def check(value: Any) -> str:
        if value not in legal:
            hint = f'; did you mean "{_nearest(value, legal)}"?' if isinstance(value, str) else ""
            raise ValueError(f"must be one of {', '.join(map(shown, legal))}{hint}")
        return str(value)

    return check


def _kept(value: Any) -> str | int:
    return _one_of("none", "all")(value) if isinstance(value, str) else _whole(0)(value)


def _gigabytes(value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ValueError("must be a finite number above 0, in GB (1e9 bytes), or null")
    return float(value)


def _path(value: Any) -> str | None:
    if value is not None and not (isinstance(value, (str, os.PathLike)) and str(value)):
        raise ValueError("must be the path of a profile, or null")
    return None if value is None else str(value)


def _switches(value: Any) -> tuple[tuple[str, ...], ...] | str | None:
    if value is None or (isinstance(value, str) and value):
        return value
    rows: list[Any] = list(value) if isinstance(value, (list, tuple)) else [None]
    if not all(isinstance(row, (list, tuple)) and all(isinstance(h, str) and h for h in row) for row in rows):
        raise ValueError("must be lists of host names, one list per leaf switch, or the path of a table, or null")
    if not all(rows):
        raise ValueError("has a leaf switch without a host; remove that list")
    hosts = [host for row in rows for host in row]
    twice = sorted({host for host in hosts if hosts.count(host) > 1})
    if twice:
        raise ValueError(f"names {', '.join(twice)} more than once")
    return tuple(tuple(row) for row in rows)


def _optional(check: Callable[[Any], int]) -> Callable[[Any], int | None]:
    return lambda value: None if value is None else check(value)


Switch = Annotated[bool, PlainValidator(_switch)]
Count = Annotated[int | None, PlainValidator(_optional(_whole(1)))]
Whole = Annotated[int, PlainValidator(_whole(0))]
Factor = Annotated[FactorValue | None, PlainValidator(_factor)]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class FactorsBlock(_Frozen):
    """amsp.sharding as an object. None: not given."""

    parameters: Factor = None
    gradients: Factor = None
    optimizer_states: Factor = None

    def filled(self) -> dict[str, FactorValue]:
        """All three factors. What is missing takes the least sharding that the dependency rule allows:
        parameters 1, gradients as parameters, optimizer_states as gradients."""
        parameters = 1 if self.parameters is None else self.parameters
        gradients = parameters if self.gradients is None else self.gradients
        states = gradients if self.optimizer_states is None else self.optimizer_states
        return {"parameters": parameters, "gradients": gradients, "optimizer_states": states}


class OverlapBlock(_Frozen):
    """amsp.overlap: which collectives hide under computation (Table V of the paper)."""

    gather: Switch = True
    reduce_scatter: Switch = True
    all_reduce: Switch = True
    publish: Switch = True


class TopologyBlock(_Frozen):
    """amsp.topology. gpus_per_node null: what the launcher says.

    leaf_switches: lists of host names, or the path of a table with one switch a line (`leaf_table`).
    """

    gpus_per_node: Count = None
    leaf_switches: Annotated[tuple[tuple[str, ...], ...] | str | None, PlainValidator(_switches)] = None


class CheckpointBlock(_Frozen):
    """amsp.checkpoint. save_rng: each rank's random states, too. async_save: training goes on while it is written."""

    save_rng: Switch = False
    async_save: Switch = False


class AmspBlock(_Frozen):
    """The block. bucket_bytes null follows zero_optimization.reduce_bucket_size (in elements).

    prefetch_bytes: gathers are issued ahead until this many bytes are in flight; 0 gathers on demand.
    keep_after_forward: how much gathered P stays for the backward. verify_every: steps between checks that
    replicas are equal, 0 for never. The planner (sharding "search") may use memory_limit_gb, GB (1e9 bytes) of a GPU,
    and takes sequence_length for the tokens of a sample; null: all there is, and what the model's config says.
    """

    enabled: Switch = True
    sharding: Annotated[
        Annotated[str, BeforeValidator(_one_of(*SHARDING_NAMES)), Tag("<name>")]
        | Annotated[FactorsBlock, Tag("<object>")],
        Discriminator(lambda value: "<name>" if isinstance(value, str) else "<object>"),
    ] = "search"
    reduce: Annotated[str, PlainValidator(_one_of("two_level", "all_reduce"))] = "two_level"
    publish: Annotated[str, PlainValidator(_one_of("broadcast", "all_gather"))] = "broadcast"
    overlap: OverlapBlock = OverlapBlock()
    topology: TopologyBlock = TopologyBlock()
    profile: Annotated[str | None, PlainValidator(_path)] = None
    verify_every: Whole = 0
    unused_parameters: Annotated[str, PlainValidator(_one_of("skip", "zero_fill"))] = "skip"
    hierarchical: Switch = False
    prefetch_bytes: Whole = 64 * 1024 * 1024
    bucket_bytes: Count = None
    merge_communicators: Switch = False
    keep_after_forward: Annotated[str | int, PlainValidator(_kept)] = "none"
    sequence_length: Count = None
    memory_limit_gb: Annotated[float | None, PlainValidator(_gigabytes)] = None
    checkpoint: CheckpointBlock = CheckpointBlock()


def read_block(ds_config: Mapping[str, Any]) -> AmspBlock | None:
    """The checked block; None when it is absent or "enabled": false (then nothing else in it is looked at).

    Raises ConfigError with every problem of the block.
    """
    if "amsp" not in ds_config:
        return None
    block = _plain(ds_config["amsp"])
    if not isinstance(block, dict):
        reason = f'must be an object such as {{"sharding": "zero1"}}, not {shown(block)}'
        raise ConfigError([Problem("amsp", reason)])
    if is_off(block):
        return None
    problems = {path: Problem(path, _AUTO_INSIDE) for path, value in leaves(block, "amsp") if value == "auto"}
    try:
        read = AmspBlock.model_validate(block)
    except ValidationError as error:
        for entry in error.errors():
            keys = [str(part) for part in entry["loc"] if part not in ("<name>", "<object>")]
            path = ".".join(["amsp", *keys])
            problems.setdefault(path, Problem(path, _reason(path, entry)))
    else:
        if not problems:  # "auto" may stand where any string is legal
            return read
    raise ConfigError(list(problems.values()))


_AUTO_INSIDE = '"auto" is not legal inside the block (Accelerate refuses it too); "sharding": "search" plans'
_MODELS: dict[str, type[BaseModel]] = {
    "amsp": AmspBlock,
    "amsp.sharding": FactorsBlock,
    "amsp.overlap": OverlapBlock,
    "amsp.topology": TopologyBlock,
    "amsp.checkpoint": CheckpointBlock,
}


def _reason(path: str, entry: Any) -> str:
    """A pydantic error in our words: what is wrong, the value, the nearest legal key."""
    value = shown(entry["input"])
    if entry["type"] in ("extra_forbidden", "invalid_key"):
        parent, _, key = path.rpartition(".")
        legal = tuple(_MODELS[parent].model_fields)
        hint = f'did you mean "{_nearest(key, legal)}"?'
        return f"unknown key (value {value}); {hint} Legal: {', '.join(legal)}"
    if entry["type"] == "model_type":
        named = f"a name ({', '.join(SHARDING_NAMES)}) or " if path == "amsp.sharding" else ""
        return f"must be {named}an object with {', '.join(_MODELS[path].model_fields)}, not {value}"
    return f"{entry.get('ctx', {}).get('error', entry['msg'])}, not {value}"


def _plain(value: Any) -> Any:
    """A copy made of dicts and lists, whatever mappings the caller uses."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


# --- the rest of the config -------------------------------------------------------------------------------


def preflight(ds_config: Mapping[str, Any], *, filled: bool = True, world_size: int | None = None) -> None:
    """Refuses what an enabled block cannot run next to, and blocks that are misspelled or misplaced.

    Without an enabled block only the last two are looked for. Raises one ConfigError with every problem.
    ``filled`` and ``world_size`` are those of `beside_block`.
    """
    problems = [*misplaced(ds_config), *misspelled(ds_config, set(AmspBlock.model_fields))]
    if has_block(ds_config):
        problems += beside_block(ds_config, filled=filled, world_size=world_size)
    if problems:
        raise ConfigError(problems)


def has_block(ds_config: Mapping[str, Any]) -> bool:
    """Whether there is a block that is not switched off, right or wrong."""
    block = ds_config.get("amsp")
    return "amsp" in ds_config and not (isinstance(block, Mapping) and is_off(block))


def check_stage(ds_config: Mapping[str, Any], stage: int, because: str) -> None:
    """zero_optimization.stage must be `stage`; pass Sharding.stage and Sharding.stage_reason.

    Raises ConfigError with the line to write. "zero_optimization": true is DeepSpeed's old way to write 1.
    """
    zero = ds_config.get("zero_optimization")
    found = zero if isinstance(zero, bool) else lookup(ds_config, "zero_optimization.stage")
    if _stage_number(found) == stage:
        return
    is_now = "absent, which is stage 0" if found is None else shown(found)
    write = f'"zero_optimization": {{"stage": {stage}}}'
    raise ConfigError([Problem("zero_optimization.stage", f"is {is_now}; write {write}, because {because}")])


def _stage_number(value: Any) -> int | None:
    """As DeepSpeed's model reads it: true is 1, "3" is 3; None when it is no whole number."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return int(number) if number.is_integer() else None


# --- files ------------------------------------------------------------------------------------------------


def load_config_file(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The config in a file, read as DeepSpeed does (hjson), with the path of duplicate keys in the error.

    Raises FileNotFoundError with the absolute path; DeepSpeed says "Invalid base64-encoded string" there.
    """
    file = Path(path)
    if not file.exists():
        raise FileNotFoundError(f"no such file: {file.absolute()}")
    return _parse(file.read_text(encoding="utf-8-sig"))


def load_config(config: str) -> dict[str, Any]:
    """What DeepSpeed takes as a string: the path of a file, or base64 of its text.

    Duplicate keys are refused in both; DeepSpeed 0.19.8 itself lets the last one win in base64.
    """
    return load_config_file(config) if os.path.exists(config) or is_missing_file(config) else _decode(config)


def is_missing_file(config: str) -> bool:
    """Whether the string is neither an existing file nor a config in base64: surely a mistyped path."""
    if os.path.exists(config):
        return False
    if not config.strip():  # hjson reads nothing as an empty object
        return True
    try:
        return not isinstance(hjson.loads(base64.urlsafe_b64decode(config).decode("utf-8")), dict)
    except (ValueError, RecursionError):  # bad base64, bad UTF-8, bad hjson are all ValueErrors
        return True


def _decode(config: str) -> dict[str, Any]:
    return _parse(base64.urlsafe_b64decode(config).decode("utf-8"))


def _parse(text: str) -> dict[str, Any]:
    """hjson with duplicate keys refused at any depth. The hook sees objects inside out and without their
    path, so it marks them and a walk over the result finds where they are."""
    repeated: dict[int, list[str]] = {}

    def build(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        built = dict(pairs)
        names = [key for key, _ in pairs]
        twice = sorted({key for key in names if names.count(key) > 1})
        if twice:
            repeated[id(built)] = twice
            kept_alive.append(built)
        return built

    kept_alive: list[Any] = []  # a shadowed object must not give its id to another one
    parsed = hjson.loads(text, object_pairs_hook=build)
    if not isinstance(parsed, dict):
        raise ConfigError([Problem("(top level)", f"must be an object, not {shown(parsed)}")])
    if repeated:
        raise ConfigError(list(_duplicates(parsed, "", repeated)))
    return parsed


def _duplicates(value: Any, path: str, repeated: Mapping[int, list[str]]) -> Iterator[Problem]:
    items: Any = enumerate(value) if isinstance(value, list) else ()
    if isinstance(value, dict):
        items = value.items()
    for key in repeated.get(id(value), ()):
        yield Problem(f"{path}{key}", "written more than once in this object; keep one")
    for key, item in items:
        yield from _duplicates(item, f"{path}{key}.", repeated)
