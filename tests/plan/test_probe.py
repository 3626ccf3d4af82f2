"""A user's module becomes a spec, and what its forward keeps is measured without its memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from deepspeed_amsp import probe
from deepspeed_amsp.compare.llama import Llama, LlamaConfig, parameter_count
from deepspeed_amsp.module_spec import model_spec
from deepspeed_amsp.plan.activations import BESIDE_EXPERTS, activation_bytes
from deepspeed_amsp.plan.models import named_model
from deepspeed_amsp.plan.probed import PROBED
from deepspeed_amsp.plan.specs import Activations, Mixture, SpecError, TrainSpec
from tests.plan.probed_figures import figures

SMALL = LlamaConfig(vocab=64, dim=32, layers=3, heads=2, ffn=48)
HERE = "tests.plan.test_probe"


def windows(sequence: int) -> torch.Tensor:
    return torch.zeros(1, sequence + 1, dtype=torch.int64)


def llama() -> tuple[nn.Module, probe.Batch]:
    return Llama(SMALL), windows


def frozen_llama() -> tuple[nn.Module, probe.Batch]:
    module = Llama(SMALL)
    module.embed.weight.requires_grad_(False)
    return module, windows


class Squares(nn.Module):
    """relu keeps its output, a product its input: nothing else is kept."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.inner(x))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 16)
        self.blocks = nn.ModuleList(Squares() for _ in range(4))
        self.head = nn.Linear(16, 10, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Reads(Stack):
    """A forward that wants values."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        raise RuntimeError(f"cannot look at {tokens.tolist()}")


def no_module() -> int:
    return 3


def broken() -> nn.Module:
    raise ValueError("no weights here")


def test_units_of_a_factory() -> None:
    found = probe.probe_factory(f"{HERE}:llama", sequences=(16,))
    assert found.warning is None
    model = found.model
    assert model.numel == parameter_count(SMALL)
    assert (model.layers, model.hidden, model.vocab) == (3, 32, 64)
    # Every matrix but the embedding multiplies a token once.
    assert sum(unit.flops_per_token for unit in model.units) == 2 * (3 * (4 * 32 * 32 + 3 * 32 * 48) + 64 * 32)
    assert [unit.name for unit in model.units if unit.attention_width] == [
        f"blocks.{n}.attention.o_proj" for n in range(3)
    ]
    assert [figures.sequence for figures in model.activations] == [16]


def test_frozen_parameters_have_no_gradients() -> None:
    module, _ = probe.make(f"{HERE}:frozen_llama")
    model = model_spec(module, "frozen")
    assert model.numel - model.trainable_numel == 64 * 32
    assert model.units[0].frozen == {"embed.weight"}


class Layered(nn.Module):
    """An embedding and four products, of which ``trained`` (their numbers, 0 the embedding) have gradients."""

    def __init__(self, trained: set[int]) -> None:
        super().__init__()
        self.parts = nn.Sequential(nn.Embedding(10, 16), *(nn.Linear(16, 16, bias=False) for _ in range(4)))
        for number, part in enumerate(self.parts):
            part.requires_grad_(number in trained)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.parts(tokens)


@pytest.mark.parametrize("trained", [{0, 1, 2, 3, 4}, {1, 2, 3, 4}, {2}, {1, 3}, {4}, {0}], ids=str)
def test_flops_of_a_backward_are_those_that_torch_counts(trained: set[int]) -> None:
    module, tokens = Layered(trained), torch.zeros(2, 7, dtype=torch.int64)
    with FlopCounterMode(display=False) as forward:
        loss = module(tokens).sum()
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    spec = model_spec(module, "layered")
    assert sum(spec.forward_flops(7, 2)) == forward.get_total_flops()
    assert sum(spec.backward_flops(7, 2)) == backward.get_total_flops()


class Experts(nn.Module):
    """What transformers' Mixtral does in a layer, for tokens that come sorted, every expert as many."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(2, 2 * 96, 64))
        self.down = nn.Parameter(torch.empty(2, 64, 96))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out, weight = torch.zeros_like(x), x.mean(-1, keepdim=True)
        everyone = torch.arange(x.shape[1])
        for gate_up, down in zip(self.gate_up, self.down, strict=True):
            gate, up = F.linear(x[0, everyone], gate_up).chunk(2, dim=-1)
            out = out.index_add(1, everyone, (F.linear(F.silu(gate) * up, down) * weight[0])[None])
        return out


class Mixed(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 64)
        self.blocks = nn.ModuleList(Experts() for _ in range(3))
        self.head = nn.Linear(64, 10, bias=False)


def test_what_experts_keep_is_what_is_estimated() -> None:
    """Two experts of width 96 for each of 1000 tokens of width 64, beside the layer's input and output; weights of
    tokens and their places are small."""
    (found,) = probe.probe(Mixed(), sequences=(1000,))
    spec = replace(model_spec(Mixed(), "mixed"), mixture=Mixture(active=2, width=96))
    estimated = activation_bytes(spec, TrainSpec(sequence=1000)).layer - 1000 * BESIDE_EXPERTS * 64
    assert estimated == pytest.approx(found.layer - 2 * found.layer_input, rel=0.05)


def test_what_a_block_keeps_by_hand() -> None:
    """For 100 tokens of width 16 in bf16: relu's output, which is the next product's input; its own input is what the
    block before has kept. Outside: the embedding's output, the log-probabilities in fp32, token and label."""
    (found,) = probe.probe(Stack(), sequences=(100,))
    one = 100 * 16 * 2
    assert (found.layer, found.layer_input) == (one, one)
    outside = one + 100 * 10 * 4
    assert outside <= found.outside <= outside + 100 * 8 + 64
    # In its backward: the gradients of relu's output and input, and of the matrix.
    assert 2 * one <= found.layer_backward <= 2 * one + 2 * 16 * 16 + one


def test_a_tied_head_is_a_product_and_no_unit() -> None:
    model = model_spec(Stack(), "tied")
    assert model.numel == 160 + 4 * 256
    assert sum(unit.flops_per_token for unit in model.units) == 2 * (4 * 256 + 160)


def test_the_module_stays_as_it_was() -> None:
    module = Stack()
    before = {name: (id(param), param.detach().clone()) for name, param in module.named_parameters()}
    probe.probe(module, sequences=(8,))
    assert len(module.blocks) == 4
    for name, param in module.named_parameters():
        assert id(param) == before[name][0] and torch.equal(param, before[name][1])


def reads() -> nn.Module:
    return Reads()


def test_a_forward_that_cannot_run_is_told_and_estimated() -> None:
    found = probe.probe_factory(f"{HERE}:reads", sequences=(8,))
    assert found.model.activations == ()
    assert found.warning is not None and "could not be run" in found.warning and "\n" not in found.warning


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nothing", "write package.module:factory"),
        ("no.such.module:f", "cannot be imported"),
        (f"{HERE}:absent", "cannot be imported"),
        (f"{HERE}:no_module", "must return a torch.nn.Module"),
        (f"{HERE}:broken", "ValueError: no weights here"),
    ],
)
def test_errors_name_the_factory(name: str, said: str) -> None:
    with pytest.raises(SpecError, match=said):
        probe.make(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama-7b", "llama-30b"])
def test_stored_figures_are_what_is_measured(name: str) -> None:
    """By probing a cut of two layers anew. Kernels of another torch may keep a little more or less."""
    stored = PROBED[name]
    assert named_model(name).activations == stored
    for old, new in zip(stored, figures(name), strict=True):
        for field in Activations.__dataclass_fields__:
            assert getattr(new, field) == pytest.approx(getattr(old, field), rel=0.02), field
