"""DeepSpeed's own ZeRO-1, ZeRO-2, ZeRO-3 and ZeRO++ hpZ."""

from __future__ import annotations

from typing import Any

from deepspeed_amsp.compare import results
from deepspeed_amsp.compare.scale import stage3_thresholds
from deepspeed_amsp.compare.strategies.base import Work
from deepspeed_amsp.compare.strategies.engine import Engine, common_config

STAGES = {results.ZERO1: 1, results.ZERO2: 2, results.ZERO3: 3, results.HPZ: 3}


class Zero(Engine):
    """A plain DeepSpeed engine."""

    def __init__(self, work: Work) -> None:
        super().__init__(work, ds_config(work))


def ds_config(work: Work) -> dict[str, Any]:
    """Stage 3 with thresholds that fit the model."""
    config = common_config(work)
    zero = config["zero_optimization"]
    zero["stage"] = STAGES[work.strategy.name]
    if zero["stage"] == 3:
        zero |= stage3_thresholds(work.config.model)
    elif work.device.type != "cpu":
        zero["overlap_comm"] = True  # stage 3's default; without streams, on a CPU, it changes nothing
    if work.strategy.name == results.HPZ:
        zero["zero_hpz_partition_size"] = work.config.cluster.ranks_per_node
    return config
