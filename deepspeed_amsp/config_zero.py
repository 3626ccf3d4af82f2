"""What the keys under "zero_optimization" mean for our executor.

Every name exists with and without "stage3_"; DeepSpeed's parsed model has merged the spellings, dropped "auto"
and filled in its defaults, so values are read from there and only "did the user write it" from the ds_config.

Two rules. Where the amsp block has a key of the same meaning, a value written there wins. And a hint about
memory or speed counts only when it is written: unwritten, the block's own defaults hold, because these are
what the planner prices (DeepSpeed's 1e5 for persistence would keep whole small models gathered).

| key | here |
|---|---|
| reduce_bucket_size | honoured: elements of a bucket, unless amsp.bucket_bytes |
| allgather_bucket_size | honoured: an upper limit of the same buckets, because a bucket is published as it was reduced; 0 sets no limit (DeepSpeed divides by it) |
| overlap_comm | honoured: a written false switches off what amsp.overlap does not name; true and unwritten leave the block alone |
| reduce_scatter | honoured: false reduces by "all_reduce", unless amsp.reduce |
| prefetch_bucket_size | honoured: elements gathered ahead of use, unless amsp.prefetch_bytes |
| max_live_parameters | honoured: no gather is issued ahead that would exceed it; 0 gathers on demand. The unit in use is gathered whatever its size, as in DeepSpeed |
| max_reuse_distance | honoured: what is used again within that many elements stays gathered, unless amsp.keep_after_forward. Going back over the last k elements passes 2k, so half of it stays at the end of a forward |
| param_persistence_threshold | honoured: a unit (all parameters of one module, where DeepSpeed looks at single parameters) of at most so many elements stays gathered between steps |
| model_persistence_threshold | honoured: an upper limit of all that stays so, filled in forward order |
| compute_grad_norm | honoured: false skips the norm, get_global_grad_norm() is None; config_preflight refuses it with clipping, as DeepSpeed does |
| load_from_fp32_weights | honoured: false makes masters from the loaded 16-bit weights |
| gather_16bit_weights_on_model_save | honoured by DeepSpeed's own save_16bit_model, which asks our gathering |
| leaf_module | honoured: DeepSpeed marks the modules before units are found; a marked one is one unit |
| enable_sanity_checks | always on: ranks must have used the units in the same order, compared in every step |
| log_trace_cache_warnings | honoured: every change of the order of units is logged, not only the first |
| sub_group_size | no effect: the tile of DeepSpeed's update; ours goes bucket by bucket, element for element the same |
| contiguous_gradients | no effect: gradients always lie in a contiguous bucket; false changes no number in DeepSpeed either |
| round_robin_gradients | no effect: who owns what is balanced largest first; which rank updates a tensor changes no number |
| ignore_unused_parameters | no effect: DeepSpeed reads it only under optimizer offload, which is refused here |
| use_multi_rank_bucket_allreduce, allgather_partitions, parameter_alignment | no effect: ways to send and lay out the same numbers, which amsp.reduce and amsp.publish choose |
| module_granularity_threshold, use_all_reduce_for_fetch_params, allgather_sequential | no effect: ways to gather the same numbers |
| memory_efficient_linear, override_module_apply | no effect: parts of deepspeed.zero.Init |
"""  # noqa: E501 (a table row cannot be broken)

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

_OVERLAPS = ("gather", "reduce_scatter", "all_reduce", "publish")


@dataclass(frozen=True)
class ZeroSettings:
    """The table above as values. Sizes are elements; None: not written, or the amsp block decides.

    Attributes:
        reduce_bucket_numel: largest bucket of gradients.
        publish_bucket_numel: largest bucket of updated parameters; 0 (also when unwritten) sets no limit.
        reduce: "all_reduce" when reduce_scatter is false.
        overlap_off: switches of amsp.overlap that overlap_comm turns off.
        prefetch_numel, live_numel, reuse_numel: prefetch_bucket_size, max_live_parameters, max_reuse_distance.
        persistence_numel: units of at most this size stay gathered; 0 when unwritten.
        model_persistence_numel: upper limit of all that stays gathered.
        compute_grad_norm: whether the norm is wanted; without clipping and norm a step needs no reduction of it.
        load_from_fp32_weights: whether a load takes the masters of the checkpoint, or makes them from its weights.
        log_order_changes: log every change of the order of units.
    """

    reduce_bucket_numel: int
    publish_bucket_numel: int
    reduce: str | None
    overlap_off: tuple[str, ...]
    prefetch_numel: int | None
    live_numel: int | None
    reuse_numel: int | None
    persistence_numel: int
    model_persistence_numel: int
    compute_grad_norm: bool
    load_from_fp32_weights: bool
    log_order_changes: bool

    @property
    def bucket_numel(self) -> int:
        """Elements of a bucket when amsp.bucket_bytes does not say: it is reduced and published in one piece."""
        limits = (self.reduce_bucket_numel, self.publish_bucket_numel or self.reduce_bucket_numel)
        return min(limits)

    def prefetch_bytes(self, block: int, itemsize: int) -> int:
        """Bytes to gather ahead; ``block`` is what amsp.prefetch_bytes says, written or by default."""
        wanted = block if self.prefetch_numel is None else self.prefetch_numel * itemsize
        return wanted if self.live_numel is None else min(wanted, self.live_numel * itemsize)

    def kept_bytes(self, itemsize: int) -> int | None:
        """Bytes of gathered parameters that stay for the backward; None leaves it to amsp.keep_after_forward."""
        if self.reuse_numel is None:
            return None
        kept = self.reuse_numel // 2
        return itemsize * (kept if self.live_numel is None else min(kept, self.live_numel))

    def persistent(self, numels: Iterable[int]) -> list[bool]:
        """For units of these sizes in forward order: does it stay gathered between steps? As DeepSpeed counts."""
        total = 0
        stays = []
        for numel in numels:
            small = 0 < numel <= self.persistence_numel and total + numel <= self.model_persistence_numel
            total += numel if small else 0
            stays.append(small)
        return stays


_DEFAULTS: dict[str, int | bool | None] = {
    "reduce_bucket_size": 500_000_000, "allgather_bucket_size": 500_000_000, "prefetch_bucket_size": 50_000_000,
    "max_live_parameters": 1_000_000_000, "max_reuse_distance": 1_000_000_000,
    "param_persistence_threshold": 100_000, "model_persistence_threshold": sys.maxsize,
    "overlap_comm": None, "reduce_scatter": True, "compute_grad_norm": True, "load_from_fp32_weights": True,
    "log_trace_cache_warnings": False,
}  # fmt: skip
"""DeepSpeed's own, of the keys that are read here."""


def parsed_zero(ds_config: Mapping[str, Any]) -> SimpleNamespace:
    """What `read_zero_settings` needs of ``zero_optimization`` as DeepSpeed parses it, for who cannot wait for
    DeepSpeed's import.

    Raises:
        ValueError: a value of another type than DeepSpeed takes; names the key.
    """
    zero = _mapping(ds_config.get("zero_optimization"))
    values: dict[str, Any] = {}
    for name, default in _DEFAULTS.items():
        values[name] = default
        for spelling in (name, f"stage3_{name}"):
            if zero.get(spelling) not in (None, "auto"):
                is_switch = default is None or isinstance(default, bool)
                values[name] = _switch(spelling, zero[spelling]) if is_switch else _size(spelling, zero[spelling])
    return SimpleNamespace(**values)


def _switch(key: str, value: Any) -> bool:
    if isinstance(value, bool):
        return value
    raise ValueError(f"zero_optimization.{key} must be true or false, not {value!r}")


def _size(key: str, value: Any) -> int:
    if isinstance(value, int | float) and not isinstance(value, bool) and value >= 0 and value == value // 1:
        return int(value)
    raise ValueError(f"zero_optimization.{key} must be a whole number of at least 0, not {value!r}")


def read_zero_settings(ds_config: Mapping[str, Any], zero_config: Any) -> ZeroSettings:
    """The settings of a config.

    Args:
        ds_config: the whole config as the user wrote it.
        zero_config: DeepSpeed's parsed ``zero_optimization`` (``DeepSpeedConfig.zero_config``), or `parsed_zero`.
    """
    zero = _mapping(ds_config.get("zero_optimization"))
    block = _mapping(ds_config.get("amsp"))
    overlap = _mapping(block.get("overlap"))

    def hint(name: str, ours: str | None = None) -> int | None:
        """A size that only counts when written; ``ours`` is the key of the block that wins over it."""
        return int(getattr(zero_config, name)) if _written(zero, name) and ours not in block else None

    # The parsed value is never None: DeepSpeed puts "stage is 3" in place of an unwritten key.
    no_overlap = _written(zero, "overlap_comm") and not zero_config.overlap_comm
    return ZeroSettings(
        reduce_bucket_numel=int(zero_config.reduce_bucket_size),
        publish_bucket_numel=hint("allgather_bucket_size") or 0,
        reduce="all_reduce" if not zero_config.reduce_scatter and "reduce" not in block else None,
        overlap_off=tuple(name for name in _OVERLAPS if name not in overlap) if no_overlap else (),
        prefetch_numel=hint("prefetch_bucket_size", "prefetch_bytes"),
        live_numel=hint("max_live_parameters"),
        reuse_numel=hint("max_reuse_distance", "keep_after_forward"),
        persistence_numel=hint("param_persistence_threshold") or 0,
        model_persistence_numel=int(zero_config.model_persistence_threshold),
        compute_grad_norm=bool(getattr(zero_config, "compute_grad_norm", True)),  # newer than 0.19.5
        load_from_fp32_weights=bool(zero_config.load_from_fp32_weights),
        log_order_changes=bool(zero_config.log_trace_cache_warnings),
    )


def _written(zero: Mapping[str, Any], name: str) -> bool:
    """Whether the user gave the key a value, in any spelling; "auto" is none, DeepSpeed drops it."""
    spellings = (name, f"stage3_{name}")
    return any(zero.get(spelling) not in (None, "auto") for spelling in spellings)


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
