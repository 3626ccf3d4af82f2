"""DeepSpeed's MiCS, in an environment of its own (`environments`)."""

from __future__ import annotations

from deepspeed_amsp.compare.scale import stage3_thresholds
from deepspeed_amsp.compare.strategies.base import Work
from deepspeed_amsp.compare.strategies.engine import Engine, common_config


class MiCS(Engine):
    """Shards within a node, replicas across nodes."""

    def __init__(self, work: Work) -> None:
        from deepspeed.runtime.zero.mics import MiCS_Init

        config = common_config(work)
        config["zero_optimization"] |= {
            "stage": 3,
            **stage3_thresholds(work.config.model),
            "mics_shard_size": work.config.cluster.ranks_per_node,
            "mics_hierarchical_params_gather": False,
        }
        model = work.model().module.bfloat16()
        MiCS_Init(module=model, config_dict_or_path=config)
        super().__init__(work, config, model)
