"""transformers' mixtures of experts without expert parallelism, when ranks hit different experts (case B4)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.integration import tiny
from tests.support.pool import WorkerPool

pytestmark = [pytest.mark.slow, tiny.needs("transformers", "accelerate")]

STEPS, LENGTH, EXPERTS = 3, 6, 8
CHOICE = {"num_experts_per_tok": 2}
FAMILIES = {
    "mixtral": ("MixtralConfig", {**CHOICE, "num_local_experts": EXPERTS}),
    "qwen3_moe": ("Qwen3MoeConfig", {**CHOICE, "num_experts": EXPERTS, "moe_intermediate_size": 16, "head_dim": 8}),
}


def _model(family: str) -> Any:
    import transformers

    name, sizes = FAMILIES[family]
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(getattr(transformers, name)(**{**tiny.SIZES, **sizes}))


def _row(rank: int, step: int) -> torch.Tensor:
    """One token again and again: it goes to the same experts, other than those of other ranks' tokens."""
    return torch.full((1, LENGTH), 3 + 7 * rank + step)


def _optimizer(model: Any) -> torch.optim.Optimizer:
    """Not Adam: with one token only the queries' gradients are zero but for rounding, which it would blow up."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def _reference(family: str, world: int) -> tuple[list[float], dict[str, torch.Tensor], list[list[list[int]]]]:
    """One process on all ranks' tokens: losses, parameters, and by rank and layer the experts hit first."""
    model = _model(family)
    optimizer = _optimizer(model)
    hit = [_experts(model, _row(rank, 0)) for rank in range(world)]
    losses = []
    for step in range(STEPS):
        rows = torch.cat([_row(rank, step) for rank in range(world)])
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, {name: value.detach().clone() for name, value in model.named_parameters()}, hit


@torch.no_grad()
def _experts(model: Any, rows: torch.Tensor) -> list[list[int]]:
    logits = model(input_ids=rows, output_router_logits=True).router_logits
    return [sorted(set(layer.topk(CHOICE["num_experts_per_tok"]).indices.flatten().tolist())) for layer in logits]


def _train(family: str, config: dict[str, Any], leaf: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
    import deepspeed
    import torch.distributed as dist

    import deepspeed_amsp  # noqa: F401

    tiny.on_cpus()
    model = _model(family)
    if leaf:
        deepspeed.utils.set_z3_leaf_modules(model, [type(model.model.layers[0].mlp)])
    engine, *_ = deepspeed.initialize(model=model, optimizer=_optimizer(model), config=config)
    assert tiny.engine_name(engine) == "AMSPEngine"
    losses = []
    for step in range(STEPS):
        rows = _row(dist.get_rank(), step)
        loss = engine(input_ids=rows, labels=rows).loss
        engine.backward(loss)
        engine.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(float(total) / dist.get_world_size())
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        found = {name: value.detach().clone() for name, value in engine.module.named_parameters()}
    engine.destroy()
    return losses, found


@pytest.mark.parametrize(
    ("family", "name", "leaf"),
    [
        (family, *rest)
        for family in FAMILIES
        for rest in [("states", False), ("parameters", False), ("parameters", True)]
    ],
)
def test_ranks_hit_different_experts(family: str, name: str, leaf: bool, workers: Callable[[int], WorkerPool]) -> None:
    """Since transformers 5 the experts of a layer are one module, so that it needs no mark as a leaf."""
    plan = tiny.PLANS[name]
    numbers = {"train_batch_size": plan.world, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}
    config = tiny.ds_config(plan, True, **numbers, gradient_clipping=0.0, bf16=None, zero_allow_untested_optimizer=True)
    losses, parameters, hit = _reference(family, plan.world)
    assert hit[0] != hit[1], "both ranks hit the same experts: the comparison would prove nothing"
    for seen, found in workers(plan.world).run(_train, family, config, leaf):
        assert seen == pytest.approx(losses, rel=1e-5)
        for key, value in parameters.items():
            torch.testing.assert_close(found[key], value, rtol=1e-5, atol=1e-6, msg=lambda m, k=key: f"{k}: {m}")
