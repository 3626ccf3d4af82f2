"""transformers' Trainer: an amsp block in its ds_config and the import, nothing else; the same as plain DeepSpeed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration import tiny
from tests.support.pool import WorkerPool

pytestmark = [pytest.mark.slow, tiny.needs("transformers", "accelerate")]

OPTIMIZER = {
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto", "torch_adam": True},
    },
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
    },
}


def _trainer(config: dict[str, Any], folder: str, seed: int, **changes: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    tiny.on_cpus()
    args = TrainingArguments(
        output_dir=folder, deepspeed=config, per_device_train_batch_size=2, gradient_accumulation_steps=2,
        per_device_eval_batch_size=2, max_steps=4, learning_rate=1e-2, warmup_steps=2, max_grad_norm=0.5,
        weight_decay=0.1, logging_steps=1, eval_strategy="steps", eval_steps=2, save_steps=2, report_to=[],
        disable_tqdm=True, dataloader_pin_memory=False, seed=3, **changes,
    )  # fmt: skip
    return Trainer(model=tiny.llama(seed), args=args, train_dataset=tiny.rows(32), eval_dataset=tiny.rows(8))


def _fit(config: dict[str, Any], folder: str) -> dict[str, Any]:
    """Train 4 steps with evaluations and saves, generate, save; then resume after step 2 with other weights."""
    import torch.distributed as dist
    from transformers import AutoModelForCausalLM

    import deepspeed_amsp  # noqa: F401

    trainer = _trainer(config, folder, seed=0)
    trainer.train()
    history = trainer.state.log_history
    prompt = tiny.rows(1)[0]["input_ids"][None, :4].clone()
    trainer.model.eval()
    # Ranks stop at different lengths; with sharded parameters transformers keeps them in step (synced_gpus).
    generated = trainer.model.generate(prompt, max_new_tokens=3 + dist.get_rank(), do_sample=False, eos_token_id=None)
    trainer.save_model(f"{folder}/final")
    dist.barrier()
    engine = tiny.engine_name(trainer.deepspeed)
    trainer.deepspeed.destroy()

    resumed = _trainer(config, folder, seed=1)
    resumed.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
    again = resumed.state.log_history
    resumed.deepspeed.destroy()
    tiny.on_cpus()
    exported = AutoModelForCausalLM.from_pretrained(f"{folder}/final", dtype=torch.float32)
    exported.eval()
    with torch.no_grad():
        regenerated = exported.generate(prompt, max_new_tokens=3 + dist.get_rank(), do_sample=False, eos_token_id=None)
    return {
        "engine": engine,
        "losses": [entry["loss"] for entry in history if "loss" in entry],
        "norms": [entry["grad_norm"] for entry in history if "grad_norm" in entry],
        "rates": [entry["learning_rate"] for entry in history if "learning_rate" in entry],
        "evaluations": [entry["eval_loss"] for entry in history if "eval_loss" in entry],
        "resumed": [entry["loss"] for entry in again if "loss" in entry],
        "generated": generated.tolist(),
        "regenerated": regenerated.tolist(),
        "exported": {name: value.clone() for name, value in exported.state_dict().items()}
        if dist.get_rank() == 0
        else {},
    }


@pytest.mark.parametrize("name", tiny.RUN)
def test_the_trainer(name: str, workers: Callable[[int], WorkerPool], tmp_path: Path) -> None:
    """Losses, norms, rates and evaluations of every step as in plain ZeRO-1 or ZeRO-3; resumed and exported, too."""
    plan = tiny.PLANS[name]
    plain_stage = plan._replace(stage=1 if plan.stage == 2 else plan.stage)
    ours = workers(plan.world).run(_fit, tiny.ds_config(plan, True, **OPTIMIZER), str(tmp_path / "amsp"))
    plain = workers(plan.world).run(_fit, tiny.ds_config(plain_stage, False, **OPTIMIZER), str(tmp_path / "plain"))
    assert {report["engine"] for report in ours} == {"AMSPEngine"}
    assert {report["engine"] for report in plain} == {"DeepSpeedEngine"}
    for one, other in zip(ours, plain, strict=True):
        assert len(one["losses"]) == 4 and len(one["evaluations"]) == 2
        for what in ("losses", "norms", "rates", "evaluations", "resumed"):
            torch.testing.assert_close(one[what], other[what], rtol=1e-4, atol=0.0, msg=lambda m, w=what: f"{w}: {m}")
        torch.testing.assert_close(one["resumed"][-2:], one["losses"][-2:], rtol=1e-5, atol=0.0)
        assert one["generated"] == other["generated"] == one["regenerated"]
    for key, value in plain[0]["exported"].items():
        torch.testing.assert_close(
            ours[0]["exported"][key], value, rtol=1e-4, atol=1e-5, msg=lambda m, k=key: f"{k}: {m}"
        )
