"""The emulated accelerator: it takes its time and changes nothing else."""

from __future__ import annotations

import copy
import time
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from deepspeed_amsp.compare.compute import emulate_compute


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, value: torch.Tensor) -> tuple[torch.Tensor, str]:
        return self.linear(value), "beside"


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def seconds(call: Any) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def test_values_names_and_gradients_are_the_same() -> None:
    plain, slow = layers(), layers()
    emulate_compute(slow, 1)
    data = torch.randn(2, 4)
    assert torch.equal(plain(data), slow(data))
    for model in (plain, slow):
        model(data).sum().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(plain.parameters(), slow.parameters(), strict=True))  # type: ignore[arg-type]
    assert list(plain.state_dict()) == list(slow.state_dict()) and isinstance(slow[0], nn.Linear)


def test_it_takes_its_time_in_both_passes() -> None:
    model = layers()
    emulate_compute(model, 20)
    outputs: list[torch.Tensor] = []
    assert seconds(lambda: outputs.append(model(torch.randn(2, 4)))) >= 0.04
    assert seconds(lambda: outputs[0].sum().backward()) >= 0.08
    with torch.no_grad():
        assert seconds(lambda: model(torch.randn(2, 4))) >= 0.04


def test_gradients_of_a_module_come_after_its_time() -> None:
    """So that a reduction cannot start earlier than on an accelerator."""
    model = layers()
    emulate_compute(model, 0, 50)
    came: list[float] = []
    for layer in model:
        layer.weight.register_post_accumulate_grad_hook(lambda _: came.append(time.perf_counter()))
    loss = model(torch.randn(2, 4)).sum()
    began = time.perf_counter()
    loss.backward()
    assert came[0] - began >= 0.05 and came[1] - came[0] >= 0.05


def test_recomputation_takes_the_time_of_a_second_forward() -> None:
    model = layers()
    emulate_compute([model[0]], 30, 0)
    output = checkpoint(model, torch.randn(2, 4), use_reentrant=False)
    assert seconds(lambda: output.sum().backward()) >= 0.03
    emulate_compute([model[1]], 30, 0)
    output = checkpoint(model, torch.randn(2, 4), use_reentrant=False)
    assert seconds(lambda: output.sum().backward()) >= 0.06


def test_first_of_several_outputs_and_copies() -> None:
    model = Pair()
    emulate_compute([model], 5)
    twin = copy.deepcopy(model)
    (value, word), took = twin(torch.randn(2, 4)), seconds(lambda: twin(torch.randn(2, 4)))
    assert word == "beside" and took >= 0.005
    value.sum().backward()
    assert twin.linear.weight.grad is not None and model.linear.weight.grad is None


def test_mistakes_are_refused() -> None:
    model = layers()
    with pytest.raises(ValueError, match="0 ms or more"):
        emulate_compute(model, -1)
    emulate_compute(model, 1)
    with pytest.raises(ValueError, match="already emulates"):
        emulate_compute(model, 1)
