"""from_pretrained where transformers knows a ds_config: with stage 3 it builds under zero.Init and reads on rank 0."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration import tiny
from tests.support.pool import WorkerPool

pytestmark = [pytest.mark.slow, tiny.needs("transformers", "accelerate")]


def _save(folder: str) -> list[float]:
    """A checkpoint in several files, and the losses that one process gets with it."""
    tiny.on_cpus()
    model = tiny.llama(4, tie_word_embeddings=True)
    model.save_pretrained(folder, max_shard_size="20KB")
    model.eval()
    with torch.no_grad():
        return [float(model(**_batch(rank)).loss) for rank in range(4)]


def _batch(rank: int) -> dict[str, torch.Tensor]:
    row = tiny.rows(4)[rank]
    return {name: value[None] for name, value in row.items()}


def _load(config: dict[str, Any], folder: str) -> dict[str, Any]:
    """Load, resize the embeddings while they are cut, train a step; nobody but rank 0 reads a file."""
    import deepspeed
    import torch.distributed as dist
    from transformers import AutoModelForCausalLM
    from transformers.integrations import HfDeepSpeedConfig

    import deepspeed_amsp  # noqa: F401

    rank = dist.get_rank()
    tiny.on_cpus()
    known = HfDeepSpeedConfig(config)  # transformers only keeps a weak reference
    torch.manual_seed(100 + rank)
    model = AutoModelForCausalLM.from_pretrained(folder)
    held = sum(param.numel() for param in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    engine.eval()
    with torch.no_grad():
        loss = float(engine(**_batch(rank)).loss)
    engine.train()
    engine.backward(engine(**_batch(rank)).loss)
    engine.step()
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    name = tiny.engine_name(engine)
    engine.destroy()
    del known
    return {"engine": name, "loss": loss, "held": held, "tied": tied, "norm": float(engine.get_global_grad_norm())}


def test_from_pretrained(workers: Callable[[int], WorkerPool], tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoint")
    want = workers(4).run(_save, folder)[0]
    for name in ("states", "across"):
        plan = tiny.PLANS[name]
        filled = {"train_batch_size": None, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1,
                  "gradient_clipping": 1.0, "bf16": {"enabled": False}}  # fmt: skip
        reports = workers(4).run(_load, tiny.ds_config(plan, True, **filled), folder)
        for rank, report in enumerate(reports):
            assert report["engine"] == "AMSPEngine" and report["tied"]
            assert report["loss"] == pytest.approx(want[rank], rel=1e-5)
            assert (report["held"] == 0) == (plan.stage == 3), "stage 3 has cut the model while it was built"
        assert len({report["norm"] for report in reports}) == 1
