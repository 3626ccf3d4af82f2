"""Accelerate: the Accelerator API with a DeepSpeedPlugin and with a config file, and peft's LoRA on top of it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration import tiny
from tests.support.pool import WorkerPool

pytestmark = [pytest.mark.slow, tiny.needs("transformers", "accelerate")]


def _accelerator(config: dict[str, Any], folder: str, by_file: bool) -> Any:
    """As a script makes it: with a plugin in code, or with what ``accelerate launch`` puts into the environment."""
    from accelerate import Accelerator, DeepSpeedPlugin
    from accelerate.utils import set_seed

    tiny.on_cpus()
    set_seed(5)
    if not by_file:
        plugin = DeepSpeedPlugin(hf_ds_config=config)
        return Accelerator(deepspeed_plugin=plugin, gradient_accumulation_steps=2)
    path = Path(folder, f"ds_config_{os.getpid()}.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(config))
    os.environ.update(ACCELERATE_USE_DEEPSPEED="true", ACCELERATE_DEEPSPEED_CONFIG_FILE=str(path))
    return Accelerator(gradient_accumulation_steps=2)


def _lora(model: Any) -> Any:
    """Adapters, a frozen base, and recomputation in the way that needs inputs with gradients."""
    from peft import LoraConfig, get_peft_model

    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    return get_peft_model(
        model, LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    )


def _loop(config: dict[str, Any], folder: str, by_file: bool = False, lora: bool = False) -> dict[str, Any]:
    """Three windows, evaluation between, a save and a load that takes the last window back, and an export."""
    import torch.distributed as dist
    from torch.utils.data import DataLoader

    import deepspeed_amsp  # noqa: F401

    accelerator = _accelerator({**config, "gradient_accumulation_steps": 2}, folder, by_file)
    model = tiny.llama(0)
    if lora:
        torch.manual_seed(1)
        model = _lora(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    loader = DataLoader(tiny.rows(4 * accelerator.num_processes), batch_size=2)  # two batches a rank: one window
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    losses: list[float] = []
    norms: list[float] = []

    def window() -> None:
        model.train()
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 1.0)))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(float(accelerator.gather(loss.detach()[None]).mean()))

    def evaluate() -> float:
        model.eval()
        with torch.no_grad():
            return float(accelerator.gather(torch.stack([model(**batch).loss for batch in loader])).mean())

    window()
    evaluations = [evaluate()]
    window()
    accelerator.save_state(f"{folder}/state")
    window()
    accelerator.load_state(f"{folder}/state")
    evaluations.append(evaluate())
    window()
    whole = accelerator.get_state_dict(model)
    accelerator.unwrap_model(model).save_pretrained(
        f"{folder}/final", state_dict=whole, is_main_process=accelerator.is_main_process, safe_serialization=True
    )
    report = {
        "engine": tiny.engine_name(model),
        "ranks": accelerator.num_processes,
        "losses": losses,
        "norms": norms,
        "evaluations": evaluations,
        "whole": {name: value.clone() for name, value in whole.items()} if accelerator.is_main_process else {},
        "files": sorted(p.name for p in Path(folder, "final").iterdir()) if dist.get_rank() == 0 else [],
    }
    model.destroy()
    return report


def assert_same(ours: list[dict[str, Any]], plain: list[dict[str, Any]]) -> None:
    assert {report["engine"] for report in ours} == {"AMSPEngine"}
    assert {report["engine"] for report in plain} == {"DeepSpeedEngine"}
    for one, other in zip(ours, plain, strict=True):
        assert one["ranks"] == len(ours)
        for what in ("losses", "norms", "evaluations"):
            torch.testing.assert_close(one[what], other[what], rtol=1e-4, atol=0.0, msg=lambda m, w=what: f"{w}: {m}")
        # The last window was made twice, from the same state.
        torch.testing.assert_close(one["losses"][-2:], one["losses"][-4:-2], rtol=1e-6, atol=0.0)
    assert set(ours[0]["whole"]) == set(plain[0]["whole"])
    for key, value in plain[0]["whole"].items():
        torch.testing.assert_close(ours[0]["whole"][key], value, rtol=1e-4, atol=1e-5, msg=lambda m, k=key: f"{k}: {m}")


@pytest.mark.parametrize("name", tiny.RUN)
def test_the_accelerator(name: str, workers: Callable[[int], WorkerPool], tmp_path: Path) -> None:
    plan = tiny.PLANS[name]
    by_file = name == "gradients"
    plain_stage = plan._replace(stage=1 if plan.stage == 2 else plan.stage)
    ours = workers(plan.world).run(_loop, tiny.ds_config(plan, True), str(tmp_path / "amsp"), by_file)
    plain = workers(plan.world).run(_loop, tiny.ds_config(plain_stage, False), str(tmp_path / "plain"), by_file)
    assert_same(ours, plain)
    assert ours[0]["files"] == plain[0]["files"]


@tiny.needs("peft")
@pytest.mark.parametrize("name", ["states", "parameters"])
def test_lora(name: str, workers: Callable[[int], WorkerPool], tmp_path: Path) -> None:
    """peft's adapters over a frozen base that is recomputed; only the adapters are exported."""
    plan = tiny.PLANS[name]
    ours = workers(plan.world).run(_loop, tiny.ds_config(plan, True), str(tmp_path / "amsp"), lora=True)
    plain = workers(plan.world).run(_loop, tiny.ds_config(plan, False), str(tmp_path / "plain"), lora=True)
    assert_same(ours, plain)
    assert ours[0]["files"] == plain[0]["files"]
    assert "adapter_model.safetensors" in ours[0]["files"] and "model.safetensors" not in ours[0]["files"]


def _reference(stage: int, config: dict[str, Any]) -> tuple[list[str], list[list[float]]]:
    """As TRL does: a model that is trained and a frozen one, made by the same config with stage 0 or 3."""
    import deepspeed

    import deepspeed_amsp  # noqa: F401

    accelerator = _accelerator(config, "", by_file=False)
    model = tiny.llama(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    frozen_config = json.loads(json.dumps(accelerator.deepspeed_plugin.deepspeed_config))
    frozen_config["zero_optimization"]["stage"] = 3 if stage == 3 else 0
    frozen, *_ = deepspeed.initialize(model=tiny.llama(0), config=frozen_config)
    frozen.eval()
    batch = {name: value[None] for name, value in tiny.rows(1)[0].items()}
    losses = []
    for _ in range(2):
        with torch.no_grad():
            before = frozen(**batch).loss
        loss = model(**batch).loss
        accelerator.backward(loss)
        losses.append([float(loss.detach()), float(before)])
    names = [tiny.engine_name(model), tiny.engine_name(frozen)]
    model.destroy()
    return names, losses


def test_a_frozen_reference(workers: Callable[[int], WorkerPool]) -> None:
    """It computes what the trained model computed before its first step, and stays there."""
    for name in ("states", "parameters"):
        plan = tiny.PLANS[name]
        config = tiny.ds_config(plan, True, train_batch_size=2, train_micro_batch_size_per_gpu=1,
                                gradient_accumulation_steps=1)  # fmt: skip
        for engines, losses in workers(plan.world).run(_reference, plan.stage, config):
            assert engines == ["AMSPEngine", "DeepSpeedEngine"]
            (first, frozen), (second, still) = losses
            assert frozen == pytest.approx(first, rel=1e-5) and still == frozen and second < first


def _refused(config: dict[str, Any]) -> str:
    import deepspeed_amsp  # noqa: F401

    try:
        accelerator = _accelerator(config, "", by_file=False)
        model = tiny.llama(0)
        accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    except ValueError as error:
        return str(error)
    return "accepted"


def test_what_the_framework_fills_in_and_what_it_does_not(workers: Callable[[int], WorkerPool]) -> None:
    """A stage that is "auto" becomes Accelerate's 2, and "auto" in the block stays: one error each, with the fix."""
    plan = tiny.PLANS["parameters"]
    filled = {"train_batch_size": 2, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}
    config = tiny.ds_config(plan, True, **filled)
    config["zero_optimization"]["stage"] = "auto"
    for said in workers(plan.world).run(_refused, config):
        assert "zero_optimization.stage" in said and 'write "zero_optimization": {"stage": 3}' in said
    config = tiny.ds_config(plan, False, **filled, amsp={"sharding": "auto"})
    for said in workers(plan.world).run(_refused, config):
        assert "amsp.sharding" in said and "auto" in said
