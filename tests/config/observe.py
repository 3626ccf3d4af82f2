"""What a run shows to its user, under plain DeepSpeed and under ours: the material of test_keys."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from tests.config.trial import base, fp16_on_the_cpu, merged, start, window
from tests.support import models

NAN = float("nan")
PLANS = {"zero1": 1, "ddp": 1, "zero2": 2, "mics": 3, "zero3": 3}
"""Plans by name, with the stage of plain DeepSpeed to compare with (and to write next to the block)."""


@dataclass
class Seen:
    """One engine, window by window.

    Attributes:
        losses: of this rank.
        norms: get_global_grad_norm(); None where DeepSpeed has none.
        rates: learning rates of the parameter groups after each window.
        counters: global_steps, skipped_steps, global_samples, micro_steps, was_step_applied(), the loss scale in fp16.
        facts: what the engine says about its configuration.
        log: lines of DeepSpeed's logger from the first window on.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float | None] = field(default_factory=list)
    rates: list[list[float]] = field(default_factory=list)
    counters: list[tuple[Any, ...]] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    log: list[str] = field(default_factory=list)


FACTS = (
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping",
    "steps_per_print", "optimizer_name", "optimizer_params", "scheduler_name", "bfloat16_enabled", "fp16_enabled",
    "get_data_types", "postscale_gradients", "gradient_predivide_factor", "dataloader_drop_last",
    "wall_clock_breakdown", "memory_breakdown", "dump_state", "managed_gradient_accumulation", "log_level",
    "is_gradient_accumulation_boundary", "get_mom", "use_node_local_storage", "zero_optimization_stage",
)  # fmt: skip
ATTRIBUTES = ("communication_data_type", "dp_world_size", "gradient_average", "enable_backward_allreduce")


@contextmanager
def listening() -> Iterator[list[str]]:
    """Lines of DeepSpeed's logger, whatever its level was."""
    from deepspeed.utils import logger

    lines: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    listener, level, handlers = Listener(), logger.level, list(logger.handlers)
    logger.handlers[:] = [listener]
    logger.setLevel("INFO")
    try:
        yield lines
    finally:
        logger.handlers[:] = handlers
        logger.setLevel(level)


def plain(config: Mapping[str, Any], stage: int) -> dict[str, Any]:
    return merged(config, {"amsp": None, "zero_optimization": {"stage": stage}})


def ours(config: Mapping[str, Any], plan: str) -> dict[str, Any]:
    block = {"sharding": plan, "topology": {"gpus_per_node": 2 if plan == "mics" else 1}}
    return merged(plain(config, PLANS[plan]), {"amsp": block})


BOTH = {"plain": ("", 1), "zero1": ("zero1", 1), "zero3": ("zero3", 3), "plain 3": ("", 3)}


def configs(changes: Mapping[str, Any], *labels: str) -> dict[str, dict[str, Any]]:
    """The config of each label of BOTH; plain stage 1 and our zero1 by default."""
    whole = merged(base(), changes)
    made = {}
    for label in labels or ("plain", "zero1"):
        plan, stage = BOTH[label]
        made[label] = ours(whole, plan) if plan else plain(whole, stage)
    return made


def watch(config: Mapping[str, Any], windows: int, scales: Sequence[float], **kwargs: Any) -> Seen:
    """Train ``windows`` windows; window i's loss is multiplied by scales[i], on rank 0 alone when that is NaN."""
    seen = Seen()
    with listening() as lines:
        engine = start(copy.deepcopy(dict(config)), **kwargs)
        seen.facts = {name: copy.deepcopy(getattr(engine, name)()) for name in FACTS}
        seen.facts |= {name: getattr(engine, name) for name in ATTRIBUTES}
        lines.clear()
        for step in range(windows):
            scale = scales[step] if step < len(scales) else 1.0
            if scale != scale and dist.get_rank() != 0:
                scale = 1.0
            seen.losses.append(window(engine, step, scale))
            norm = engine.get_global_grad_norm()
            seen.norms.append(None if norm is None else float(norm))
            seen.rates.append([float(rate) for rate in engine.get_lr()])
            seen.counters.append((
                engine.global_steps, engine.skipped_steps, engine.global_samples, engine.micro_steps,
                engine.was_step_applied(), engine._get_optimizer_loss_scale() if engine.fp16_enabled() else None,
            ))  # fmt: skip
        seen.log = list(lines)
        engine.destroy()
    return seen


@dataclass(frozen=True)
class Run:
    """A config, the plans to try it under, and how to train."""

    config: Mapping[str, Any]
    plans: tuple[str, ...] = ("zero1",)
    windows: int = 3
    scales: tuple[float, ...] = ()
    model: str = "mlp"


def watch_all(runs: Mapping[str, Run]) -> dict[str, dict[str, Any]]:
    """For every run, what plain DeepSpeed (under its stage) and each plan shows; an error is its text."""
    with fp16_on_the_cpu():
        return {name: _watch_one(run) for name, run in runs.items()}


def _watch_one(run: Run) -> dict[str, Any]:
    configs: dict[str, dict[str, Any]] = {f"stage {PLANS[p]}": plain(run.config, PLANS[p]) for p in run.plans}
    configs |= {plan: ours(run.config, plan) for plan in run.plans}
    found: dict[str, Any] = {}
    for label, config in configs.items():
        try:
            found[label] = watch(config, run.windows, run.scales, model_name=run.model)
        except Exception as error:  # noqa: BLE001 - a refusal is an outcome, too
            found[label] = f"{type(error).__name__}: {error}"
    return found


class Constant(torch.nn.Module):
    """One parameter whose gradient is what is fed in: sums of gradients in the open."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(1, 1, bias=False)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return self.linear(value.to(self.linear.weight.dtype)).sum()


def summed(config: Mapping[str, Any], feeds: Sequence[Sequence[float]]) -> float | str:
    """The gradient norm when rank r's micro-batches have gradients feeds[r] (times accumulation, so: their sum)."""
    import deepspeed

    import deepspeed_amsp  # noqa: F401

    model = Constant()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    try:
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=copy.deepcopy(dict(config)))
        for value in feeds[dist.get_rank()]:
            engine.backward(engine(torch.tensor([value])) * engine.gradient_accumulation_steps())
            engine.step()
        norm = float(engine.get_global_grad_norm())
        engine.destroy()
    except Exception as error:  # noqa: BLE001 - the outcome
        return f"{type(error).__name__}: {error}"
    return norm


def summed_all(cases: Mapping[str, tuple[Mapping[str, Any], Sequence[Sequence[float]]]]) -> dict[str, float | str]:
    return {name: summed(*case) for name, case in cases.items()}


def unmanaged(config: Mapping[str, Any]) -> tuple[list[float], list[float], list[tuple[int, int]]]:
    """Accumulation that belongs to the caller: windows of 3, 1 and 2 micro-batches, then step()."""
    engine = start(copy.deepcopy(dict(config)))
    rank, world = dist.get_rank(), dist.get_world_size()
    losses, norms, counters = [], [], []
    for step, length in enumerate((3, 1, 2)):
        for micro in range(length):
            tokens = models.batch(step, micro, world)[rank * models.SAMPLES : (rank + 1) * models.SAMPLES]
            loss = models.loss_of(engine(tokens[:, :-1]), tokens)
            engine.backward(loss)
            losses.append(float(loss.detach()))
        engine.step()
        norms.append(float(engine.get_global_grad_norm()))
        counters.append((engine.global_steps, engine.global_samples))
    engine.destroy()
    return losses, norms, counters
