"""``"sharding": "search"``: the planner is asked when the engine starts, for the model and cluster that are there."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch import nn

from deepspeed_amsp.config import AmspBlock, ConfigError, Problem
from deepspeed_amsp.config_zero import ZeroSettings
from deepspeed_amsp.module_spec import model_spec
from deepspeed_amsp.plan.api import cluster_of
from deepspeed_amsp.plan.builtin_profiles import find_profile
from deepspeed_amsp.plan.curves import ProfileError
from deepspeed_amsp.plan.factors import ShardFactor, Sharding, enumerate_shardings, preset
from deepspeed_amsp.plan.owners import BUCKET_NUMEL
from deepspeed_amsp.plan.resolve import make_plan, with_zero_settings
from deepspeed_amsp.plan.solver import Modes, Search, search, smallest_need
from deepspeed_amsp.plan.solver import Problem as Question
from deepspeed_amsp.plan.specs import GB, OPTIMIZERS, Optimizer, SpecError, TrainSpec

DEFAULT_PROFILE = "a800-hdr"
"""The paper's cluster, where ``amsp.profile`` names no other."""

DEFAULT_SEQUENCE = 2048
"""Tokens of a sample, where neither the block nor the model's config says it."""


@dataclass(frozen=True)
class Asked:
    """What the ds_config says about training. dtype: of the working copies; stage: zero_optimization.stage; zero: what
    else that object says, which the engine's plan follows where the block is silent."""

    micro_batch: int
    micro_batches: int
    stage: int
    dtype: torch.dtype
    gradient_dtype: torch.dtype
    optimizer: str
    clipping: bool
    bucket_elements: int = BUCKET_NUMEL
    zero: ZeroSettings | None = None


def searched(
    block: AmspBlock,
    model: nn.Module,
    asked: Asked,
    data_parallel: ShardFactor,
    everywhere: Callable[[Any], list[Any]],
) -> tuple[Sharding, str]:
    """The planner's factors within what the stage permits, and one line for the log. Collective.

    The block's modes and overlap switches are kept. Activations are estimated (34*s*b*h bytes a layer): a model is
    not run before it trains; `amsp plan` can.

    Args:
        everywhere: all-gathers a picklable value, in rank order.

    Raises on every rank:
        ConfigError: nothing fits, nothing fits with this stage, or the profile cannot be used.
    """
    memory = min(everywhere(_memory(block, data_parallel)))
    try:
        answer: tuple[str, Any] = ("", _search(block, model, asked, data_parallel, memory))
    except (ProfileError, SpecError, ConfigError) as error:
        answer = (str(error), None)
    answers = everywhere((answer[0], answer[1] and answer[1][0].as_dict()))
    failed = {text: rank for rank, (text, _) in reversed(list(enumerate(answers))) if text}
    if failed:
        text, rank = min(failed.items(), key=lambda entry: entry[1])
        problem = text.removeprefix("amsp.sharding: ")
        raise ConfigError([Problem("amsp.sharding", f'"search" failed on rank {rank}: {problem}')])
    differing = [rank for rank, (_, factors) in enumerate(answers) if factors != answers[0][1]]
    if differing:
        reason = f"ranks {differing} find other factors than rank 0: is {block.profile!r} the same file on every host?"
        raise ConfigError([Problem("amsp.profile", reason)])
    sharding, line = answer[1]
    return sharding, line


def _search(
    block: AmspBlock, model: nn.Module, asked: Asked, data_parallel: ShardFactor, memory: float
) -> tuple[Sharding, str]:
    profile = find_profile(block.profile or DEFAULT_PROFILE).for_cluster(data_parallel)
    sequence, source = _sequence(block, model)
    any_plan = make_plan(block, data_parallel.size, data_parallel.s0, preset("ddp", data_parallel))
    if asked.zero is not None:
        any_plan = with_zero_settings(any_plan, asked.zero, asked.dtype.itemsize)
    question = Question(
        model=model_spec(model, type(model).__name__),
        cluster=cluster_of(profile, data_parallel, memory),
        trainings=(_training(model, asked, sequence),),
        profile=profile,
        modes=Modes(
            reduce=(any_plan.reduce,),
            publish=(any_plan.publish,),
            hierarchical=(any_plan.hierarchical,),
            overlap=any_plan.overlap,
            bucket_bytes=block.bucket_bytes or asked.bucket_elements * asked.dtype.itemsize,
            prefetch_bytes=any_plan.prefetch_bytes,
            keep_after_forward=any_plan.keep_after_forward,
        ),
    )
    permitted = [s for s in enumerate_shardings(data_parallel, question.gradients) if s.stage == asked.stage]
    found = search(replace(question, shardings=tuple(permitted))) if permitted else None
    if found is None or found.best is None:
        raise ConfigError([Problem("amsp.sharding", _refusal(search(question), asked.stage))])
    best = found.best
    line = (
        f'"sharding": "search" took {best.plan.sharding}, the best of {len(found.ranked)} that fit at stage '
        f"{asked.stage}: {best.memory.peak / GB:.1f} of {memory / GB:.1f} GB, step {best.step.seconds:.3g} s "
        f"({profile.name}, sequences of {sequence} tokens from {source})"
    )
    return best.plan.sharding, line


def _refusal(everything: Search, stage: int) -> str:
    if everything.best is None:
        need, term = smallest_need(everything), max(everything.rejected[0].memory.terms(), key=lambda term: term.bytes)
        return (
            f'"search" finds no plan that fits: the least that any needs is {need / GB:.1f} GB a GPU, of which '
            f"{term.bytes / GB:.1f} GB are {term.name}. Run amsp plan to see what would make it fit"
        )
    best = everything.best.plan.sharding
    paste = {"zero_optimization": {"stage": best.stage}, "amsp": {"sharding": best.as_dict()}}
    return (
        f'"search" finds no plan that fits with zero_optimization.stage {stage}; with stage {best.stage} it takes '
        f"{best}. Write {json.dumps(paste)}"
    )


def _training(model: nn.Module, asked: Asked, sequence: int) -> TrainSpec:
    return TrainSpec(
        sequence=sequence,
        micro_batch=asked.micro_batch,
        micro_batches=asked.micro_batches,
        recompute=bool(getattr(model, "is_gradient_checkpointing", False)),
        optimizer=_optimizer(asked.optimizer),
        parameter_bytes=asked.dtype.itemsize,
        gradient_bytes=asked.gradient_dtype.itemsize,
        gradient_clipping=asked.clipping,
    )


def _optimizer(name: str) -> Optimizer:
    """By its class's or the config's name, "FusedAdam" or "OneBitLamb"; AdamW's sizes for one that is not known."""
    lowered = name.lower()
    known = {"adam8bit": ("8bit",), "lion": ("lion",), "muon": ("muon",), "adafactor": ("adafactor",), "sgd": ("sgd",)}
    return next(
        (OPTIMIZERS[key] for key, words in known.items() if any(word in lowered for word in words)), OPTIMIZERS["adamw"]
    )


def _sequence(block: AmspBlock, model: nn.Module) -> tuple[int, str]:
    if block.sequence_length is not None:
        return block.sequence_length, "amsp.sequence_length"
    stated = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    if isinstance(stated, int) and stated > 0:
        return stated, "the model's config"
    return DEFAULT_SEQUENCE, "the default, see amsp.sequence_length"


def _memory(block: AmspBlock, data_parallel: ShardFactor) -> float:
    """Bytes of a GPU that may be used: what the block says, else all of them; a CPU's are shared by its ranks."""
    if block.memory_limit_gb is not None:
        return block.memory_limit_gb * GB
    accelerator = get_accelerator()
    total = float(accelerator.total_memory())
    return total / data_parallel.s0 if accelerator.device_name() == "cpu" else total
