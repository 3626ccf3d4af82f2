"""Whole weights for Hugging Face: exports, save_pretrained, Accelerate's get_state_dict; transformers loads all."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.pool import pool

pytest.importorskip("transformers")

TOKENS = torch.arange(12).view(2, 6) % 11


def _model() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(3)
    config = GPT2Config(vocab_size=11, n_positions=8, n_embd=8, n_layer=2, n_head=2, attn_pdrop=0, embd_pdrop=0)
    return GPT2LMHeadModel(config)


def _train_and_save(sharding: str, stage: int, folder: str) -> torch.Tensor:
    """The logits of the trained model, after it was written in all ways."""
    import deepspeed

    import deepspeed_amsp  # noqa: F401  (installs the engine)

    model = _model()
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "gradient_clipping": 0.0,
        "amsp": {"sharding": sharding, "topology": {"gpus_per_node": 2}},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    engine.backward(engine(TOKENS, labels=TOKENS).loss)
    engine.step()
    engine.save_checkpoint(folder, "here")
    engine.save_16bit_model(f"{folder}/16bit")
    state = _accelerates_state(engine, config)
    if dist.get_rank() == 0:
        model.save_pretrained(f"{folder}/pretrained", state_dict=state)
        model.config.save_pretrained(f"{folder}/16bit")
    engine.eval()
    with torch.no_grad():
        logits = engine(TOKENS).logits.clone()
    engine.destroy()
    return logits


def _accelerates_state(engine: Any, config: dict[str, Any]) -> Any:
    """By Accelerate's own code, where it is installed; else by the method that it calls."""
    try:
        from accelerate import Accelerator, DistributedType
    except ImportError:
        return engine._zero3_consolidated_16bit_state_dict()
    like = SimpleNamespace(
        distributed_type=DistributedType.DEEPSPEED,
        deepspeed_config=config,
        unwrap_model=lambda model: model.module,
        is_fsdp2=False,
    )
    return Accelerator.get_state_dict(like, engine)


@pytest.mark.parametrize(("sharding", "stage"), [("zero3", 3), ("zero1", 1)])
def test_transformers_gives_the_same_logits(sharding: str, stage: int, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    from deepspeed_amsp.checkpoint.export import export
    from deepspeed_amsp.checkpoint.offline import open_archive

    want = pool(2).run(_train_and_save, sharding, stage, str(tmp_path), timeout=120)
    before = _model()
    ways = {"pretrained", "16bit"}
    for form in ("safetensors", "torch"):
        for size in (10**9, 2000):
            ways.add(out := f"{form}-{size}")
            export(open_archive(tmp_path), tmp_path / out, form, "fp32", size)
            before.config.save_pretrained(tmp_path / out)
    for way in sorted(ways):
        model = AutoModelForCausalLM.from_pretrained(tmp_path / way, dtype=torch.float32).eval()
        assert model.lm_head.weight is model.transformer.wte.weight, "tied"
        with torch.no_grad():
            logits = model(TOKENS).logits
        for one in want:
            torch.testing.assert_close(logits, one, rtol=0.0, atol=1e-6, msg=way)
        with torch.no_grad():
            assert not torch.allclose(before.eval()(TOKENS).logits, logits, atol=1e-3), "nothing was trained"
