"""One rank of tests/bench/overlap.py: trains every row in every round, rank 0 prints what came out.

The rows of a launch run one after the other in the same processes, so that a round compares settings within
seconds of each other. Each run starts from the same weights and batches: losses can be compared bit by bit.
Models, data and training are those of `amsp compare`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sys
import time
from itertools import pairwise
from statistics import mean
from typing import Any

import torch
import torch.distributed as dist

from examples import cpu

cpu.prepare()

import deepspeed  # noqa: E402

from deepspeed_amsp.comm import from_every_rank  # noqa: E402
from deepspeed_amsp.compare.cluster import local_counters  # noqa: E402
from deepspeed_amsp.compare.measure import Clock, Data, train_step  # noqa: E402
from deepspeed_amsp.compare.strategies import trainer_for  # noqa: E402
from deepspeed_amsp.compare.strategies.base import Work  # noqa: E402
from tests.bench.rows import CONFIG, RANKS_PER_NODE, RESULT, WARM_UP_STEPS, Row  # noqa: E402


def sent_bytes() -> dict[str, int]:
    """Bytes that this rank's node has sent, by interface."""
    return {link: counted.sent for link, counted in local_counters().items()}


def digest_of(trainer: Any) -> str:
    """Of the parameters that this rank holds, where our engine trained them."""
    held = hashlib.sha256()
    for unit in trainer.engine.amsp.units if hasattr(trainer, "engine") else ():
        for tensor in [unit.shard] if hasattr(unit, "shard") else [param.data for param in unit.parameters]:
            held.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return held.hexdigest()


def measure(row: Row, steps: int, forward_ms: float) -> dict[str, Any]:
    """Train one row; what rank 0 prints. Seconds are means over ranks, bytes the most of any node."""
    nodes = dist.get_world_size() // RANKS_PER_NODE
    work = Work(row.strategy(nodes), CONFIG, row.micro_batches, torch.device("cpu"), (forward_ms, 2 * forward_ms))
    trainer, data = trainer_for(work), Data(work, dist.get_rank())
    clock, losses, total = Clock(), [], WARM_UP_STEPS + steps
    from_every_rank(None)  # what building an engine sent is not counted
    sent, cpu_s = sent_bytes(), time.process_time()
    for step in range(total):
        clock.begin_step()
        losses.append(train_step(trainer, clock, data.step(step))[0])
    clock.steps.append(time.perf_counter())
    trainer.settle()
    cpu_s = time.process_time() - cpu_s
    from_every_rank(None)  # everything that this training sends has arrived on every rank
    now = sent_bytes()
    mine = {
        "durations": [b - a for a, b in pairwise(clock.steps)][WARM_UP_STEPS:],
        "phases": [mean(clock.phases[phase][1:]) for phase in ("forward", "backward", "update")],
        "sent": {link: now[link] - before for link, before in sent.items()},
        "cpu_s": cpu_s / total,
        "values": ([float(loss).hex() for loss in losses], digest_of(trainer)),
    }
    trainer.close()
    everyone = from_every_rank(mine)
    first_of_nodes = everyone[::RANKS_PER_NODE]
    return {
        "durations": [mean(times) for times in zip(*(rank["durations"] for rank in everyone), strict=True)],
        "phases": [mean(times) for times in zip(*(rank["phases"] for rank in everyone), strict=True)],
        "sent": {link: max(rank["sent"][link] for rank in first_of_nodes) for link in sent},
        "steps": total,
        "cpu_s": mean(rank["cpu_s"] for rank in everyone),
        "last_loss": mean(float.fromhex(rank["values"][0][-1]) for rank in everyone),
        "digest": hashlib.sha256(json.dumps([rank["values"] for rank in everyone]).encode()).hexdigest(),
    }


def main() -> None:
    """sys.argv[1] is the job: {"rows", "rounds", "steps", "forward_ms"}."""
    job = json.loads(sys.argv[1])
    rows = [Row.from_dict(values) for values in job["rows"]]
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    for number in range(job["rounds"]):
        # There and back: a drift of the machine's speed then favours nobody.
        for index in range(len(rows)) if number % 2 == 0 else reversed(range(len(rows))):
            result = measure(rows[index], job["steps"], job["forward_ms"])
            if dist.get_rank() == 0:
                print(RESULT + json.dumps({"row": index, "round": number, **result}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
