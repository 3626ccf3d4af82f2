"""How a script gets an AMSPEngine: unmodified, explicitly, by path, dict or argument."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from deepspeed_amsp.compare.launch import free_port
from tests.support import models
from tests.support.pool import RankError, pool

BLOCK = {"sharding": "zero1", "topology": {"gpus_per_node": 1}}


def config(**changes: Any) -> dict[str, Any]:
    base = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": 1},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "amsp": BLOCK,
    }
    return {key: value for key, value in {**base, **changes}.items() if value is not None}


def classes_of(ds_config: Any, how: str) -> tuple[str, str, bool]:
    """(engine class, optimizer class, is a DeepSpeedEngine) on this rank."""
    import deepspeed

    import deepspeed_amsp

    model = models.make_model("mlp")
    initialize = deepspeed_amsp.initialize if how == "explicit" else deepspeed.initialize
    if how == "args":
        parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
        parser.add_argument("--local_rank", type=int, default=-1)
        args = parser.parse_args(["--deepspeed", "--deepspeed_config", ds_config])
        engine, optimizer, *_ = initialize(args=args, model=model, model_parameters=model.parameters())
    else:
        engine, optimizer, *_ = initialize(model=model, model_parameters=model.parameters(), config=ds_config)
    names = type(engine).__name__, type(optimizer).__name__, isinstance(engine, deepspeed.DeepSpeedEngine)
    engine.destroy()
    return names


@pytest.mark.parametrize("how", ["plain", "explicit"])
def test_a_dict_with_the_block_gives_our_engine(how: str) -> None:
    assert pool(2).run(classes_of, config(), how) == [("AMSPEngine", "AMSPOptimizer", True)] * 2


@pytest.mark.parametrize("how", ["plain", "args"])
def test_a_file_with_the_block_gives_our_engine(how: str, tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(config()))
    assert pool(2).run(classes_of, str(path), how) == [("AMSPEngine", "AMSPOptimizer", True)] * 2


@pytest.mark.parametrize("block", [None, {**BLOCK, "enabled": False}])
def test_without_an_enabled_block_deepspeed_is_itself(block: dict[str, Any] | None) -> None:
    engine, _, _ = pool(2).run(classes_of, config(amsp=block), "plain")[0]
    assert engine == "DeepSpeedEngine"


@pytest.mark.parametrize("block", [None, {**BLOCK, "enabled": False}])
def test_the_explicit_way_insists_on_a_block(block: dict[str, Any] | None) -> None:
    with pytest.raises(RankError, match='no enabled "amsp" block') as error:
        pool(2).run(classes_of, config(amsp=block), "explicit")
    assert error.value.type_name.endswith("ConfigError")


def test_a_config_file_that_does_not_exist_is_no_such_file() -> None:
    with pytest.raises(RankError, match=r"no such file: DeepSpeed config .*missing\.json") as error:
        pool(2).run(classes_of, "missing.json", "plain")
    assert error.value.type_name.endswith("FileNotFoundError")


SCRIPT = """
from deepspeed import initialize          # bound before the plugin is imported
import torch
import deepspeed
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
import deepspeed_amsp
model = torch.nn.Linear(4, 4)
engine, *_ = initialize(model=model, model_parameters=model.parameters(), config={config})
engine.backward(engine(torch.ones(2, 4)).sum())
engine.step()
print("CLASS", type(engine).__name__)
torch.distributed.destroy_process_group()
"""


def test_an_early_bound_initialize_is_enough(tmp_path: Path) -> None:
    """A fresh interpreter, since ours has long installed the engine."""
    import os

    env = os.environ | {
        "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
        "DS_ACCELERATOR": "cpu", "TORCH_EXTENSIONS_DIR": str(tmp_path), "PYTHONPATH": str(Path.cwd()),
    }  # fmt: skip
    script = SCRIPT.replace("{config}", repr(config()))
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=env,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "CLASS AMSPEngine" in done.stdout, done.stdout + done.stderr
