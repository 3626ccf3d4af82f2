"""One rank of tests/bench/overlap.py: trains every row in every round, rank 0 prints what came out.

The rows of a launch run one after the other in the same processes, so that a round compares settings within
seconds of each other. Each run starts from the same weights and batches: losses can be compared bit by bit.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sys
import time
from collections.abc import Callable
from statistics import mean
from typing import Any

import torch
import torch.distributed as dist

from examples import cpu

cpu.prepare()

import deepspeed  # noqa: E402

import deepspeed_amsp  # noqa: E402
from deepspeed_amsp.compare.cluster import local_counters  # noqa: E402
from deepspeed_amsp.compare.compute import emulate_compute  # noqa: E402
from deepspeed_amsp.compare.llama import Llama  # noqa: E402
from tests.bench.rows import MODEL, NODES, RANKS_PER_NODE, RESULT, WARM_UP_STEPS, Row  # noqa: E402

WINDOW = 64  # tokens; the real computation of a step stays small beside the emulated one
SEED = 1


class Clock:
    """Marks of one rank: the start of every step, the seconds of each micro-batch's phases and of the update."""

    def __init__(self) -> None:
        self.starts: list[float] = []
        self.forward: list[float] = []
        self.backward: list[float] = []
        self.update: list[float] = []
        self.sent: dict[str, int] = {}
        self.cpu_s = 0.0

    def begin(self) -> None:
        """All ranks are ready to train. What building an engine sent (rank 0's weights) is not counted."""
        dist.barrier()
        self.sent = sent_bytes()
        self.cpu_s = time.process_time()

    def end(self) -> None:
        """Everything that this training sends has arrived on this rank."""
        self.cpu_s = time.process_time() - self.cpu_s
        dist.barrier()
        now = sent_bytes()
        self.sent = {link: now[link] - before for link, before in self.sent.items()}


def sent_bytes() -> dict[str, int]:
    """Bytes that this rank's node has sent, by interface."""
    return {link: counted.sent for link, counted in local_counters().items()}


def batches(step: int, micro_batches: int) -> list[torch.Tensor]:
    """This rank's windows of a step; no two ranks or steps have the same."""
    generator = torch.Generator().manual_seed(SEED + 1000 * step + dist.get_rank())
    return [torch.randint(MODEL.vocab, (1, WINDOW + 1), generator=generator) for _ in range(micro_batches)]


def model_with(forward_ms: float) -> Llama:
    """The model with the same weights for every row; forward_ms of emulated time a block."""
    torch.manual_seed(SEED)
    model = Llama(MODEL)
    emulate_compute(model.blocks, forward_ms)
    return model


def train_amsp(row: Row, steps: int, forward_ms: float, clock: Clock) -> tuple[list[torch.Tensor], str]:
    """Losses, and a digest of the parameters that this rank holds at the end."""
    engine, *_ = deepspeed.initialize(model=model_with(forward_ms), config=row.ds_config)
    assert isinstance(engine, deepspeed_amsp.AMSPEngine)
    losses = []
    clock.begin()
    for step in range(steps):
        clock.starts.append(time.perf_counter())
        for batch in batches(step, row.micro_batches):
            began = time.perf_counter()
            loss = engine(batch)
            clock.forward.append(time.perf_counter() - began)
            engine.backward(loss)
            clock.backward.append(time.perf_counter() - began - clock.forward[-1])
            stepping = time.perf_counter()
            engine.step()
            losses.append(loss.detach())
        clock.update.append(time.perf_counter() - stepping)
    clock.starts.append(time.perf_counter())
    engine.amsp.optimizer.wait_for_parameters()
    clock.end()
    held = hashlib.sha256()
    for unit in engine.amsp.units:
        for tensor in [unit.shard] if hasattr(unit, "shard") else [param.data for param in unit.parameters]:
            held.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    engine.destroy()
    return losses, held.hexdigest()


def train_plain(row: Row, steps: int, forward_ms: float, clock: Clock) -> tuple[list[torch.Tensor], str]:
    """The same training without communication: every gradient is local, the update is that of an owner of half.

    So the weights that this rank does not own stay as they were: the time is what is wanted here.
    """
    model = model_with(forward_ms).bfloat16()
    parameters = list(model.parameters())
    by_size = sorted(range(len(parameters)), key=lambda index: -parameters[index].numel())
    owned = [parameters[index] for index in by_size[dist.get_rank() % RANKS_PER_NODE :: RANKS_PER_NODE]]
    masters = [param.detach().float() for param in owned]
    optimizer = torch.optim.AdamW(masters, lr=1e-3, fused=True)
    losses = []
    clock.begin()
    for step in range(steps):
        clock.starts.append(time.perf_counter())
        for batch in batches(step, row.micro_batches):
            began = time.perf_counter()
            loss = model(batch)
            clock.forward.append(time.perf_counter() - began)
            (loss / row.micro_batches).backward()
            clock.backward.append(time.perf_counter() - began - clock.forward[-1])
            losses.append(loss.detach())
        began = time.perf_counter()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        for master, param in zip(masters, owned, strict=True):
            assert param.grad is not None
            master.grad = param.grad.float()
        optimizer.step()
        with torch.no_grad():
            for master, param in zip(masters, owned, strict=True):
                param.copy_(master)
        for param in parameters:
            param.grad = None
        clock.update.append(time.perf_counter() - began)
    clock.starts.append(time.perf_counter())
    clock.end()
    return losses, ""


def measure(row: Row, steps: int, forward_ms: float) -> dict[str, Any]:
    """Train one row; what rank 0 prints. Seconds are means over ranks, bytes the most of any node."""
    train: Callable[..., tuple[list[torch.Tensor], str]] = train_plain if row.factors is None else train_amsp
    clock, total = Clock(), WARM_UP_STEPS + steps
    losses, digest = train(row, total, forward_ms, clock)
    durations = [b - a for a, b in zip(clock.starts, clock.starts[1:], strict=False)][WARM_UP_STEPS:]
    mine = {
        "durations": durations,
        "phases": [mean(part[1:]) for part in (clock.forward, clock.backward, clock.update)],
        "sent": clock.sent,
        "cpu_s": clock.cpu_s / total,
        "values": ([float(loss).hex() for loss in losses], digest),
    }
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    nodes = [everyone[node * RANKS_PER_NODE] for node in range(NODES)]
    return {
        "durations": [mean(times) for times in zip(*(rank["durations"] for rank in everyone), strict=True)],
        "phases": [mean(times) for times in zip(*(rank["phases"] for rank in everyone), strict=True)],
        "sent": {link: max(node["sent"][link] for node in nodes) for link in clock.sent},
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
