"""Our engine with any block: the planner's factors, or those of others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from deepspeed_amsp.compare.strategies.base import Held, Work
from deepspeed_amsp.compare.strategies.engine import Engine, common_config
from deepspeed_amsp.trace.clock import clock_for
from deepspeed_amsp.trace.recorder import Recorder


class AMSP(Engine):
    """An AMSPEngine; the only one that we can look into (`looked_into`)."""

    def __init__(self, work: Work) -> None:
        super().__init__(work, ds_config(work))

    def settle(self) -> None:
        self.engine.amsp.optimizer.wait_for_parameters()

    def held(self) -> Held:
        report = self.engine.amsp.memory_report()
        states = report["master"]["held"] + report["moments"]["held"]
        return Held(report["P"]["held"], report["G"]["held"], states)

    @contextmanager
    def looked_into(self) -> Iterator[Recorder]:
        """Record the collectives of every step inside; afterwards the recorder is closed and its clock has settled."""
        communicator = self.engine.amsp.comm
        recorder = communicator.recorder = Recorder(clock_for(self.engine.device.type))
        try:
            yield recorder
        finally:
            communicator.recorder = None
        recorder.close()
        recorder.clock.settle()


def ds_config(work: Work) -> dict[str, Any]:
    """The strategy's block, with the buckets of all others where it does not say."""
    strategy = work.strategy
    assert strategy.block is not None and strategy.plan is not None
    config = common_config(work)
    config["zero_optimization"]["stage"] = strategy.plan.sharding.stage
    config["amsp"] = {
        "bucket_bytes": work.config.bucket_bytes,
        **strategy.block,
        "topology": {"gpus_per_node": work.config.cluster.ranks_per_node},
    }
    return config
