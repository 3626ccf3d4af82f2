"""Train a small byte-level LLaMA with DeepSpeed, sharded as the config's "amsp" block says.

    deepspeed --num_gpus 4 examples/train_llama.py --deepspeed --deepspeed_config configs/amsp_demo.json

It is an ordinary DeepSpeed script. Apart from `import deepspeed_amsp` nothing in it is about sharding, and
with a config that has no "amsp" block (configs/zero1.json) it trains with plain DeepSpeed.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import cpu

cpu.prepare()  # must come before deepspeed, which chooses its accelerator when it is imported

import deepspeed  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from bytes_data import (  # noqa: E402
    Corpus,
    TrainWindows,
    byte_frequency_loss,
    load_corpus,
    validation_windows,
)
from deepspeed.accelerator import get_accelerator  # noqa: E402
from report import Monitor, Summary, finish, gather_engine_facts  # noqa: E402
from torch import Tensor  # noqa: E402

import deepspeed_amsp  # noqa: E402  (from here on deepspeed.initialize obeys an "amsp" block)
from deepspeed_amsp.compare.llama import Llama, LlamaConfig, parameter_count  # noqa: E402


def parse_arguments() -> argparse.Namespace:
    """The script's own options, the launcher's --local_rank and DeepSpeed's --deepspeed_config."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--local_rank", type=int, default=-1, help="set by the launcher")
    parser.add_argument("--data", type=Path, help="folder of text (default: Python's standard library)")
    parser.add_argument("--max-bytes", type=int, default=16_000_000, help="read at most this much text")
    parser.add_argument("--run-dir", type=Path, help="where the results go (default: runs/<config name>)")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--max-seconds", type=float, default=math.inf, help="stop training after this long")
    parser.add_argument("--eval-every", type=int, default=25, help="steps between validations")
    parser.add_argument("--eval-windows", type=int, default=192, help="windows of validation text")
    parser.add_argument("--window", type=int, default=128, help="bytes of context")
    parser.add_argument("--dim", type=int, default=LlamaConfig.dim)
    parser.add_argument("--layers", type=int, default=LlamaConfig.layers)
    parser.add_argument("--heads", type=int, default=LlamaConfig.heads)
    parser.add_argument("--kv-heads", type=int, help="key/value heads (default: as many as heads)")
    parser.add_argument("--ffn", type=int, default=LlamaConfig.ffn)
    parser.add_argument("--recompute", action="store_true", help="recompute activations in backward")
    parser.add_argument("--seed", type=int, default=0)
    deepspeed.add_config_arguments(parser)
    args = parser.parse_args()
    if args.deepspeed_config is None:
        parser.error("--deepspeed_config FILE is needed")
    if not Path(args.deepspeed_config).is_file():
        parser.error(f"{args.deepspeed_config}: no such file")
    if args.data is not None and not args.data.is_dir():
        parser.error(f"--data {args.data}: no such folder")
    if args.run_dir is None:
        args.run_dir = Path("runs") / Path(args.deepspeed_config).stem
    return args


def model_config(args: argparse.Namespace) -> LlamaConfig:
    """The model that the options describe."""
    return LlamaConfig(
        dim=args.dim,
        layers=args.layers,
        heads=args.heads,
        kv_heads=args.kv_heads,
        ffn=args.ffn,
        recompute=args.recompute,
    )


def has_amsp_block(config_file: str) -> bool:
    """Whether the DeepSpeed config asks for the plugin."""
    block = json.loads(Path(config_file).read_text(encoding="utf-8")).get("amsp")
    return block is not None and block.get("enabled", True)


def mean_over_ranks(*values: float | Tensor) -> list[float]:
    """The mean over all ranks of a few numbers, in one small collective."""
    device = get_accelerator().current_device_name()
    packed = torch.stack([torch.as_tensor(v, dtype=torch.float64, device=device).detach() for v in values])
    dist.all_reduce(packed)
    return (packed / dist.get_world_size()).tolist()


@torch.no_grad()
def validate(engine: Any, windows: Tensor, batch: int) -> float:
    """The mean loss over the validation windows, each rank scoring its share of them."""
    rank, world = dist.get_rank(), dist.get_world_size()
    # Every rank must call forward equally often: with sharded parameters a forward is a collective.
    mine = windows[: len(windows) // world * world][rank::world]
    engine.eval()
    total = sum(engine(part.to(engine.device)).double() * len(part) for part in mine.split(batch))
    engine.train()
    return mean_over_ranks(total / len(mine))[0]


def train(engine: Any, args: argparse.Namespace, corpus: Corpus, held_out: Tensor, monitor: Monitor) -> None:
    """The training loop. Stops early when time is up or the loss is no longer a number."""
    rank, world = dist.get_rank(), dist.get_world_size()
    data = TrainWindows(corpus.train, args.window, engine.train_batch_size(), args.seed, rank, world)
    started = time.perf_counter()
    for step in range(1, args.steps + 1):
        step_started = time.perf_counter()
        losses = []
        for batch in data.micro_batches(step, engine.gradient_accumulation_steps()):
            loss = engine(batch.to(engine.device))
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach())
        late = time.perf_counter() - started > args.max_seconds
        mean_loss, any_late = mean_over_ranks(torch.stack(losses).mean(), float(late))
        now = time.perf_counter()
        tokens = data.global_batch * args.window
        monitor.step(step, mean_loss, engine.get_lr()[0], tokens, now - step_started, now - started)
        last = step == args.steps or any_late > 0 or not math.isfinite(mean_loss)
        if last or step % args.eval_every == 0:
            batch_size = max(engine.train_micro_batch_size_per_gpu(), 8)
            monitor.validated(step, validate(engine, held_out, batch_size))
        if last:
            return


def summarise(engine: Any, args: argparse.Namespace, monitor: Monitor, baseline: float) -> Summary:
    """The result of the run; every rank takes part in gathering it."""
    history = monitor.history
    return Summary(
        config=args.deepspeed_config,
        engine=type(engine).__name__,
        world_size=dist.get_world_size(),
        parameters=parameter_count(model_config(args)),
        steps=len(history.steps),
        training_loss=history.training_loss(),
        validation_loss=history.validation[-1][1],
        byte_frequency_loss=baseline,
        tokens_per_second=history.tokens_per_second(),
        seconds=sum(row["seconds"] for row in history.steps),
        facts=gather_engine_facts(engine),
    )


def main() -> int:
    """Train, validate, report. The exit status is 1 when the loss is not a number."""
    args = parse_arguments()
    torch.manual_seed(args.seed)  # every rank starts from the same weights
    model = Llama(model_config(args))
    engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
    if has_amsp_block(args.deepspeed_config):
        # DeepSpeed ignores a block that it does not know: without the plugin this would train plain ZeRO.
        assert isinstance(engine, deepspeed_amsp.AMSPEngine), "the amsp block was not obeyed"

    corpus = load_corpus(args.data, args.max_bytes, args.window)
    held_out = validation_windows(corpus.valid, args.window, args.eval_windows)
    baseline = byte_frequency_loss(corpus.train, held_out[:, 1:])
    with Monitor(args.run_dir, args.steps, writes=dist.get_rank() == 0) as monitor:
        monitor.say(f"{len(corpus.train):,} + {len(corpus.valid):,} bytes of text from {corpus.source}")
        monitor.say(f"byte-frequency model: {baseline:.3f} nats per byte of the validation text")
        train(engine, args, corpus, held_out, monitor)
    summary = summarise(engine, args, monitor, baseline)
    if dist.get_rank() == 0:
        finish(args.run_dir, summary, monitor.history)
    dist.destroy_process_group()
    return 0 if math.isfinite(summary.training_loss + summary.validation_loss) else 1


if __name__ == "__main__":
    sys.exit(main())
