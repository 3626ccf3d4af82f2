"""Lightning's DeepSpeedStrategy with a block in its config."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration import tiny
from tests.support.pool import WorkerPool

pytestmark = [pytest.mark.slow, tiny.needs("transformers", "lightning")]


def _module() -> Any:
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        """A model that is built where Lightning wants it, within the strategy's context."""

        def __init__(self, seed: int) -> None:
            super().__init__()
            self.seed = seed
            self.losses: list[float] = []
            self.validations: list[float] = []
            self.net: Any = None

        def configure_model(self) -> None:
            if self.net is None:
                from transformers import LlamaForCausalLM

                torch.manual_seed(self.seed)
                # Without padding: transformers zeroes its row at once, which zero.Init has cut by then.
                self.net = LlamaForCausalLM(tiny.llama_config(pad_token_id=None))

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            loss = self.net(**batch).loss
            self.losses.append(float(loss.detach()))
            return loss

        def validation_step(self, batch: Any, _: int) -> None:
            self.validations.append(float(self.net(**batch).loss))

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)]

    return Module


def _strategy(config: dict[str, Any]) -> Any:
    """From the file, or at stage 2 from arguments, of which Lightning makes a config of its own (shape C18)."""
    from lightning.pytorch.strategies import DeepSpeedStrategy

    if config["zero_optimization"]["stage"] != 2:
        return DeepSpeedStrategy(config=config)
    strategy = DeepSpeedStrategy(stage=2, allgather_bucket_size=1000, reduce_bucket_size=1000)
    if "amsp" in config:
        strategy.config["amsp"] = config["amsp"]
    return strategy


def _trainer(config: dict[str, Any], folder: str, world: int, epochs: int) -> Any:
    """On CPUs, which the strategy refuses: the accelerator says that it is a GPU's, and that its GPUs are CPUs."""
    import lightning.pytorch as pl
    from lightning.pytorch.accelerators import CUDAAccelerator

    class Cpus(CUDAAccelerator):
        def setup_device(self, device: torch.device) -> None: ...

        def teardown(self) -> None: ...

        def get_device_stats(self, device: Any) -> dict[str, Any]:
            return {}

        @staticmethod
        def parse_devices(devices: Any) -> Any:
            return list(range(devices))

        @staticmethod
        def get_parallel_devices(devices: Any) -> list[torch.device]:
            return [torch.device("cpu", index) for index in devices]

        @staticmethod
        def auto_device_count() -> int:
            return world

        @staticmethod
        def is_available() -> bool:
            return True

    return pl.Trainer(
        accelerator=Cpus(), devices=world, strategy=_strategy(config), max_epochs=epochs,
        accumulate_grad_batches=2, gradient_clip_val=0.5, default_root_dir=folder, logger=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip


def _fit(config: dict[str, Any], folder: str) -> dict[str, Any]:
    """Two epochs; then the second one again, from the checkpoint of the first, by a model with other weights."""
    import torch.distributed as dist
    from torch.utils.data import DataLoader

    import deepspeed_amsp  # noqa: F401

    world = dist.get_world_size()
    make = _module()

    def loader(rows: int) -> Any:
        return DataLoader(tiny.rows(rows * world), batch_size=2, shuffle=False)

    first = _trainer(dict(config), folder, world, epochs=1)
    model = make(0)
    first.fit(model, loader(4), loader(2))
    name = tiny.engine_name(first.strategy.model)
    first.save_checkpoint(f"{folder}/one.ckpt")
    second = _trainer(dict(config), folder, world, epochs=2)
    other = make(1)
    second.fit(other, loader(4), loader(2), ckpt_path=f"{folder}/one.ckpt")
    losses = torch.tensor([*model.losses, *other.losses])
    dist.all_reduce(losses)
    validations = torch.tensor([model.validations[-1], other.validations[-1]])
    dist.all_reduce(validations)
    return {"engine": name, "losses": (losses / world).tolist(), "validations": (validations / world).tolist()}


@pytest.mark.parametrize("name", tiny.RUN)
def test_lightning(name: str, workers: Callable[[int], WorkerPool], tmp_path: Path) -> None:
    plan = tiny.PLANS[name]
    given = {"train_batch_size": None, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": None,
             "gradient_clipping": None, "bf16": None, "zero_allow_untested_optimizer": True}  # fmt: skip
    plain_stage = plan._replace(stage=1 if plan.stage == 2 else plan.stage)
    ours = workers(plan.world).run(_fit, tiny.ds_config(plan, True, **given), str(tmp_path / "amsp"))
    plain = workers(plan.world).run(_fit, tiny.ds_config(plain_stage, False, **given), str(tmp_path / "plain"))
    assert ours[0]["engine"] == "AMSPEngine" and plain[0]["engine"] == "DeepSpeedEngine"
    assert len(ours[0]["losses"]) == 4
    for what in ("losses", "validations"):
        torch.testing.assert_close(ours[0][what], plain[0][what], rtol=1e-4, atol=0.0)
