"""A training script that DeepSpeed's launcher starts once a slot; each rank writes what it saw to OUT/rank<N>.json."""

from __future__ import annotations

import argparse
import json
import os
import socket
from pathlib import Path

from examples import cpu

cpu.prepare()  # must come before deepspeed, which chooses its accelerator when it is imported

import deepspeed  # noqa: E402
import torch.distributed as dist  # noqa: E402

import deepspeed_amsp  # noqa: E402
from tests.support import models  # noqa: E402
from tests.support.jobs import Case, train_step  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    deepspeed.add_config_arguments(parser)
    args = parser.parse_args()
    deepspeed.init_distributed(dist_backend="gloo")
    model = models.make_model("mlp")
    optimizer = models.make_optimizer("adamw", model)
    engine, *_ = deepspeed.initialize(args=args, model=model, optimizer=optimizer)
    assert isinstance(engine, deepspeed_amsp.AMSPEngine)
    case = Case(None, 0, micro_batches=engine.gradient_accumulation_steps())
    losses = [train_step(engine, case, step) for step in range(args.steps)]
    seen = {
        "rank": dist.get_rank(),
        "local_rank": args.local_rank,
        "host": socket.gethostname(),
        "launched_with": {name: os.environ[name] for name in ("WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR")},
        "plan": str(engine.amsp.plan.describe()),
        "losses": losses,
    }
    args.out.joinpath(f"rank{dist.get_rank()}.json").write_text(json.dumps(seen), encoding="utf-8")
    engine.destroy()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
