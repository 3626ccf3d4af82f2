"""deepspeed_amsp.Init: models without memory, whose values come from safetensors files unit by unit."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from deepspeed_amsp.plan.factors import Sharding
from tests.bench.init_memory import CONFIG, M_MMAP_THRESHOLD, Peak
from tests.engine.test_training import assert_parity
from tests.parity.cases import case_for
from tests.semantics.harness import MIXED, UNEQUAL, ZERO3, few, label
from tests.support import models
from tests.support.jobs import Case, Report, trained
from tests.support.pool import WorkerPool, pool

CHOICES = {"reduce": "two_level", "publish": "broadcast", "micro_batches": 1, "clip": 0.4}


def written(folder: Path, change: Callable[[dict[str, torch.Tensor]], object] = lambda _: None) -> str:
    """The reference's initial values in two files with an index, as Hugging Face writes them."""
    from safetensors.torch import save_file

    state = {name: value.detach().clone() for name, value in models.make_model("attention").named_parameters()}
    change(state)
    names = sorted(state)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, members in parts.items():
        save_file({name: state[name] for name in members}, folder / file)
    index = {"weight_map": {name: file for file, members in parts.items() for name in members}}
    folder.joinpath("model.safetensors.index.json").write_text(json.dumps(index))
    return str(folder)


def _build(case: Case, folder: str) -> Any:
    import deepspeed

    import deepspeed_amsp

    torch.manual_seed(50 + dist.get_rank())
    with deepspeed_amsp.Init(folder):
        model = models.MODELS[case.model]()
    assert all(param.is_meta for param in model.parameters())
    optimizer = models.make_optimizer(case.optimizer, model)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=case.ds_config())
    return engine


def _train(case: Case, folder: str) -> Report:
    from deepspeed_amsp.partition.stream import Weights

    read: list[str] = []
    original = Weights.read

    def counted(self: Weights, name: str) -> torch.Tensor:
        read.append(name)
        return original(self, name)

    Weights.read = counted  # type: ignore[method-assign]
    try:
        engine = _build(case, folder)
    finally:
        Weights.read = original  # type: ignore[method-assign]
    names = [name for name, _ in engine.module.named_parameters()]
    assert sorted(read) == (sorted(names) if dist.get_rank() == 0 else []), "rank 0 reads, everything once"
    return trained(engine, case)


@few
def test_parity(sharding: Sharding, tmp_path: Path) -> None:
    case = case_for(sharding, CHOICES, model="attention", optimizer="sgd")
    assert_parity(pool(4).run(_train, case, written(tmp_path)), case)


LAYERS, WIDTH = 24, 1024


def _peak(folder: str, config: dict[str, Any]) -> dict[str, int]:
    """Bytes of host memory that a rank takes at most until an engine is ready, built on no memory and plainly."""
    import deepspeed

    import deepspeed_amsp

    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 20)
    found = {}
    for how, building in {"streamed": deepspeed_amsp.Init(folder), "plain": nullcontext()}.items():
        with Peak() as peak:
            with building:
                model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
            engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        engine.destroy()
        del model, engine
        found[how] = peak.bytes
    return found


def test_the_peak_of_a_rank_is_a_part_of_the_model(tmp_path: Path, fresh_pool: Callable[[int], WorkerPool]) -> None:
    """Of four ranks that share all parameters: a quarter in bf16 and, twice as large, in fp32, and a few modules.

    `tests.bench.init_memory` has the figures of a larger model, and those of from_pretrained.
    """
    from safetensors.torch import save_file

    names = [f"{layer}.weight" for layer in range(LAYERS)]
    save_file({name: torch.ones(WIDTH, WIDTH, dtype=torch.bfloat16) for name in names}, tmp_path / "model.safetensors")
    model_bytes = 2 * LAYERS * WIDTH**2
    for peak in fresh_pool(4).run(_peak, str(tmp_path), CONFIG):
        assert peak["streamed"] < model_bytes < 2 * model_bytes <= peak["plain"]  # in fp32, as it is built


def test_objects_keep_their_identity() -> None:
    """A parameter that two modules register stays one, and is on the meta device in both."""
    import deepspeed_amsp

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3, 2), requires_grad=False)
            self.other = nn.Linear(2, 3)
            self.other.weight = self.weight
            self.register_buffer("table", torch.arange(3))

    with deepspeed_amsp.Init():
        tied = Tied()
    assert tied.weight is tied.other.weight and tied.weight.is_meta and not tied.weight.requires_grad
    assert tied.other.bias.is_meta and tied.table.tolist() == [0, 1, 2]
    assert not nn.Linear(1, 1).weight.is_meta, "outside, nothing is changed"


def _refused(case: Case, folder: str) -> None:
    _build(case, folder).destroy()


def _without_norm(state: dict[str, torch.Tensor]) -> None:
    del state["block.self_attn.in_proj_weight"]


def _transposed(state: dict[str, torch.Tensor]) -> None:
    state["embed.weight"] = state["embed.weight"].t().contiguous()


@pytest.mark.parametrize("sharding", [UNEQUAL, ZERO3], ids=label)
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_without_norm, ["block.self_attn", "reset_parameters", "files that hold all"]),
        (_transposed, ["embed.weight", "shape"]),
    ],
)
def test_files_that_do_not_fit(sharding: Sharding, change: Any, words: list[str], tmp_path: Path) -> None:
    case = case_for(sharding, CHOICES, model="attention", optimizer="sgd")
    errors = pool(4).run(_refused, case, written(tmp_path, change), return_exceptions=True)
    assert len({str(error) for error in errors}) == 1 and isinstance(errors[0], Exception)
    for word in words:
        assert word in str(errors[0])


def test_no_files(tmp_path: Path) -> None:
    case = case_for(MIXED, CHOICES, model="attention", optimizer="sgd")
    for error in pool(4).run(_refused, case, str(tmp_path), return_exceptions=True):
        assert isinstance(error, FileNotFoundError) and "no safetensors files" in str(error)
