"""Who may still read a parameter when its module is done with it: returned parameters, frozen ones used again,
functions under a checkpoint, gradients of gradients, torch.func. Nothing of it may read freed memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from deepspeed_amsp.plan.factors import Sharding
from tests.semantics import modules as m
from tests.semantics.harness import CUT, Run, Trainer, assert_parity, few, loss_of, on_ranks, over, plain_loop

WIDTH = m.WIDTH

# ---- a module returns its parameter ------------------------------------------------------------------------


class Store(nn.Module):
    """Returns its parameter in one of many ways."""

    def __init__(self, how: str, frozen: bool) -> None:
        super().__init__()
        self.how = how
        self.table = nn.Parameter(0.3 * torch.randn(4, WIDTH), requires_grad=not frozen)

    def forward(self, count: int) -> Any:
        if self.how == "whole":
            return self.table
        if self.how == "slice":
            return self.table[:count]
        if self.how == "expanded":
            return self.table.unsqueeze(0).expand(count, -1, -1)
        if self.how == "tuple":
            return torch.ones(2), (self.table, [self.table.t()])
        return m.Output(self.table, {"also": self.table[1:]})


class Returning(m.Base):
    """What was returned goes through modules that save it, or that just pass it on, and is used late."""

    def __init__(self, how: str, frozen: bool, recompute: str) -> None:
        super().__init__()
        self.recompute = recompute
        self.store = Store(how, frozen)
        self.wrapped = nn.Sequential(nn.Identity())
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.ones(1, WIDTH))
        self.passing = nn.Identity()

    def queries(self, count: int) -> torch.Tensor:
        output = self.store(count)
        if self.store.how == "tuple":
            output = output[1][0] + output[1][1][0].t()
        if self.store.how == "dataclass":
            output = output.hidden + output.more["also"].sum()
        return self.wrapped(output).mean(dim=0) if self.store.how == "expanded" else self.wrapped(output)

    def part(self, hidden: torch.Tensor) -> torch.Tensor:
        queries = self.mix(self.queries(3))
        return hidden + torch.softmax(hidden @ queries.t(), dim=1) @ queries

    def middle(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        late = self.queries(2)
        if self.recompute:
            hidden = checkpoint(self.part, hidden, use_reentrant=self.recompute == "reentrant")
        else:
            hidden = self.part(hidden)
        return hidden * self.passing(self.gain) + torch.sin(late).mean(dim=0)


def _evaluating_too(trainer: Trainer) -> None:
    for step in range(trainer.run.steps):
        rows = trainer.rows(step, 0)
        loss = loss_of(trainer(rows), rows)
        with torch.no_grad():
            trainer(rows)
        trainer.losses.append(loss.item())
        trainer.backward(loss)
        trainer.step()


@few
@pytest.mark.parametrize(
    ("how", "frozen", "recompute"),
    [
        ("whole", False, ""),
        ("slice", False, "reentrant"),
        ("expanded", True, ""),
        ("tuple", False, "plain"),
        ("dataclass", False, ""),
        ("dataclass", True, "reentrant"),
    ],
)
def test_a_module_that_returns_its_parameter(sharding: Sharding, how: str, frozen: bool, recompute: str) -> None:
    model = partial(Returning, how, frozen, recompute)
    assert_parity(Run(sharding, model, loop=_evaluating_too, clip=0.3, amsp={"prefetch_bytes": 0} if frozen else {}))


def _outliving(trainer: Trainer) -> None:
    """Two graphs at once, and what a forward without gradients returned is read after the next step."""
    kept: list[torch.Tensor] = []
    for step in range(trainer.run.steps):
        losses = []
        for part in range(2):
            rows = trainer.rows(step, part)
            losses.append(loss_of(trainer(rows), rows))
        trainer.losses.append(sum(losses).item())
        with torch.no_grad():
            kept.append(trainer.module.store(2))
        for loss in losses:
            trainer.backward(loss)
        trainer.step()
    assert all(value.isfinite().all() and value.shape == (4, WIDTH) for value in kept)


@few
def test_what_was_returned_outlives_graphs_and_steps(sharding: Sharding) -> None:
    assert_parity(Run(sharding, partial(Returning, "whole", False, ""), loop=_outliving))


# ---- a parameter taken from a list -------------------------------------------------------------------------


class Listing(m.Plain):
    """Sums over parameters that a forward lists: of empty ones the sum would be zero, without an error."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        penalty = sum(param.square().sum() for param in self.parameters())
        named = dict(self.inner.named_parameters())
        return super().forward(rows) + 0.05 * penalty + 0.1 * named["bias"].mean()


@few
def test_parameters_listed_in_a_forward(sharding: Sharding) -> None:
    assert_parity(Run(sharding, Listing, micro_batches=2, amsp={"prefetch_bytes": 300}))


# ---- frozen modules used again and again --------------------------------------------------------------------


class FrozenAgain(m.Base):
    """A frozen module used several times in ways that overlap, in the order that ``uses`` names."""

    def __init__(self, uses: str, recompute: str = "") -> None:
        super().__init__()
        self.uses, self.recompute = uses, recompute
        self.stone = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.alias = nn.Linear(WIDTH, WIDTH)
        self.alias.weight = self.stone.weight
        self.prompt = nn.Parameter(0.3 * torch.randn(1, WIDTH))

    def use(self, kind: str, hidden: torch.Tensor) -> torch.Tensor:
        if kind == "c":
            return self.stone(hidden)
        if kind == "r":
            return F.linear(torch.tanh(hidden), self.stone.weight)
        if kind == "t":
            return self.alias(hidden)
        return hidden + torch.tanh(self.prompt @ self.stone.weight)  # "p": no way from the input to the weight

    def run(self, hidden: torch.Tensor) -> torch.Tensor:
        for kind in self.uses:
            hidden = self.use(kind, hidden)
        return hidden

    def middle(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        if not self.recompute:
            return torch.tanh(self.run(hidden))
        hidden = checkpoint(self.run, hidden, use_reentrant=self.recompute == "reentrant")
        return torch.tanh(checkpoint(self.run, hidden, use_reentrant=self.recompute == "reentrant"))


class Prompted(nn.Module):
    """A trained and a frozen parameter side by side, with a product that no input leads to."""

    def __init__(self) -> None:
        super().__init__()
        self.stone = nn.Parameter(0.3 * torch.randn(WIDTH, WIDTH), requires_grad=False)
        self.prompt = nn.Parameter(0.3 * torch.randn(1, WIDTH))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.prompt @ self.stone) + hidden @ self.stone


class PromptedTwice(m.Base):
    def __init__(self, recompute: str) -> None:
        super().__init__()
        self.recompute = recompute
        self.parts = nn.ModuleList([Prompted(), Prompted()])

    def middle(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        for part in (*self.parts, self.parts[0]):
            if self.recompute:
                hidden = checkpoint(part, hidden, use_reentrant=self.recompute == "reentrant")
            else:
                hidden = part(hidden)
        return hidden


RECOMPUTATIONS = ["", "plain", "reentrant"]
RECOMPUTED = pytest.mark.parametrize("recompute", RECOMPUTATIONS)


@over(CUT)
@RECOMPUTED
@pytest.mark.parametrize("uses", ["ccc", "rc", "crcr", "ct", "tcpt"])
def test_a_frozen_module_that_is_used_again(sharding: Sharding, uses: str, recompute: str) -> None:
    assert_parity(Run(sharding, partial(FrozenAgain, uses, recompute), micro_batches=2))


@over(CUT)
@RECOMPUTED
def test_a_frozen_parameter_off_the_path_of_the_input(sharding: Sharding, recompute: str) -> None:
    assert_parity(Run(sharding, partial(PromptedTwice, recompute)))


class FrozenDeep(m.Base):
    """Many frozen layers in a row, perhaps in checkpointed pairs."""

    def __init__(self, recompute: str) -> None:
        super().__init__()
        self.recompute = recompute
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8)).requires_grad_(False)

    def middle(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        for first in range(0, 8, 2):
            pair = nn.Sequential(self.layers[first], nn.Tanh(), self.layers[first + 1])
            if self.recompute:
                hidden = checkpoint(pair, hidden, use_reentrant=self.recompute == "reentrant")
            else:
                hidden = pair(hidden)
        return hidden


def _whole_at_the_end_of_backward(trainer: Any) -> None:
    """Notes how many frozen layers are whole when the backward has passed all of them."""
    weights = [layer.weight for layer in trainer.module.layers]  # a read by name would gather them
    first = trainer.module.first.weight
    first.register_hook(lambda _: trainer.notes.append(sum(weight.numel() > 0 for weight in weights)))
    plain_loop(trainer)


@over(CUT)
@RECOMPUTED
def test_frozen_layers_are_freed_while_the_backward_runs(sharding: Sharding, recompute: str) -> None:
    """The last pair may still be there, and one that was gathered ahead."""
    run = Run(sharding, partial(FrozenDeep, recompute), loop=_whole_at_the_end_of_backward)
    for mine in assert_parity(run):
        assert len(mine.notes) == run.steps and max(mine.notes) <= 3, mine.notes


# ---- functions under a checkpoint ---------------------------------------------------------------------------


class Scaled(nn.Module):
    """Layer scale: the checkpointed function reads its module's own parameter, which is used outside, too."""

    def __init__(self, recompute: str) -> None:
        super().__init__()
        self.recompute = recompute
        self.gamma = nn.Parameter(torch.full((WIDTH,), 0.5))
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.lent = nn.Linear(WIDTH, WIDTH)

    def part(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.gamma * torch.tanh(self.inner(hidden))
        return torch.tanh(F.linear(hidden, self.lent.weight, self.lent.bias))

    def nested(self, hidden: torch.Tensor) -> torch.Tensor:
        inner = checkpoint(self.part, hidden * self.gamma, use_reentrant=self.recompute == "reentrant")
        return inner * self.gamma

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for function in (self.part, self.part, self.nested):
            hidden = checkpoint(function, hidden, use_reentrant=self.recompute == "reentrant")
            hidden = self.lent(hidden * self.gamma)
        return hidden


class ScaledModel(m.Base):
    """Such blocks, each used twice, and such a function of the model itself."""

    def __init__(self, recompute: str) -> None:
        super().__init__()
        self.one, self.other = Scaled(recompute), Scaled(recompute)
        self.shift = nn.Parameter(torch.zeros(WIDTH))

    def part(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.one(hidden) * torch.exp(self.shift)

    def middle(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            hidden = checkpoint(self.part, hidden, use_reentrant=self.one.recompute == "reentrant")
            hidden = self.other(hidden)
        return hidden


@few
@pytest.mark.parametrize("recompute", ["plain", "reentrant"])
def test_a_checkpointed_function_that_reads_parameters(sharding: Sharding, recompute: str) -> None:
    run = Run(sharding, partial(ScaledModel, recompute), micro_batches=2, adversarial=True)
    assert_parity(run, rtol=2e-5, atol=2e-6)


class TiedAcross(m.Base):
    """A weight used inside of a re-entrant checkpoint and, with a bias of its own, in another way outside of it."""

    def __init__(self, outside: str) -> None:
        super().__init__()
        self.outside = outside
        self.one = nn.Linear(WIDTH, WIDTH)
        self.other = nn.Linear(WIDTH, WIDTH)
        self.other.weight = self.one.weight

    def middle(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        hidden = checkpoint(self.one, hidden, use_reentrant=False) if self.outside == "plain" else self.one(hidden)
        hidden = checkpoint(self.other, torch.tanh(hidden), use_reentrant=True)
        return self.one(hidden) if self.outside == "both" else hidden


@few
@pytest.mark.parametrize("outside", ["plain", "before", "both"])
def test_a_weight_tied_across_a_checkpoint(sharding: Sharding, outside: str) -> None:
    """The checkpoint's gradient of the weight does not make the unit complete for the backward around it."""
    assert_parity(Run(sharding, partial(TiedAcross, outside), micro_batches=2))


# ---- gradients of gradients --------------------------------------------------------------------------------


def _penalty(trainer: Trainer) -> None:
    """The gradient for the input is part of the loss; it is made by autograd.grad, after the forward.

    Called through the module in windows of several micro-batches: the engine's outputs divide their gradients.
    """
    forward = trainer if trainer.run.micro_batches == 1 else trainer.module
    for step in range(trainer.run.steps):
        for micro in range(trainer.run.micro_batches):
            rows = trainer.rows(step, micro).clone().requires_grad_()
            output = forward(rows)
            (gradient,) = torch.autograd.grad(output.square().sum(), rows, create_graph=True)
            with torch.no_grad():
                trainer(rows)
            loss = loss_of(output, rows.detach()) + gradient.square().sum() / len(rows)
            trainer.losses.append(loss.item())
            trainer.backward(loss)
            trainer.step()


class Forces(m.Base):
    """The gradient for the input is the output: molecular dynamics."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        inputs = m.features(rows).detach().requires_grad_()
        with torch.enable_grad():
            energy = self.last(torch.tanh(self.inner(torch.tanh(self.first(inputs))))).square().sum()
            (forces,) = torch.autograd.grad(energy, inputs, create_graph=True)
        return forces


@few
@pytest.mark.parametrize(
    ("model", "loop", "micro_batches"),
    [(m.Plain, _penalty, 1), (m.Adapted, _penalty, 2), (Forces, _evaluating_too, 1)],
)
def test_gradients_of_gradients(
    sharding: Sharding, model: type[nn.Module], loop: Callable[[Any], None], micro_batches: int
) -> None:
    assert_parity(Run(sharding, model, loop=loop, micro_batches=micro_batches), rtol=2e-5, atol=2e-6)


# ---- torch.func --------------------------------------------------------------------------------------------


class Transformed(m.Base):
    """One of torch.func's transforms over modules, in the middle of a forward."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.one = nn.Linear(WIDTH, WIDTH)
        self.other = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))

    def function(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.other(torch.tanh(self.one(hidden))))

    def middle(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        if self.kind == "grad":
            return self.other(torch.func.grad(lambda x: self.function(x).sum())(hidden))
        if self.kind == "jvp":
            value, tangent = torch.func.jvp(self.function, (hidden,), (torch.ones_like(hidden),))
            return value + tangent
        if self.kind == "vmap":
            return torch.func.vmap(self.function)(hidden)
        if self.kind == "each":
            return torch.func.vmap(torch.func.grad(lambda x: self.function(x).sum()))(hidden)
        scaled = {name: 1.5 * param for name, param in self.one.named_parameters()}
        return self.function(torch.tanh(torch.func.functional_call(self.one, scaled, (hidden,))))


def _with_torchs_own_linear(trainer: Any) -> None:
    """DeepSpeed's stage 3, which another test of this process may have run, leaves a linear without forward mode."""
    with mock.patch.object(F, "linear", torch._C._nn.linear):
        _evaluating_too(trainer)


@few
@pytest.mark.parametrize("kind", ["grad", "jvp", "vmap", "each", "call"])
def test_torch_func_inside_a_forward(sharding: Sharding, kind: str) -> None:
    """Parameters arrive in the middle of a transform, which must not take that for a part of the function."""
    run = Run(sharding, partial(Transformed, kind), loop=_with_torchs_own_linear, bucket_bytes=100)
    assert_parity(run, atol=2e-6)


# ---- what cannot be seen -----------------------------------------------------------------------------------


class Hidden(nn.Module):
    """Leaves its result on itself, or in an object that nobody can look into, and returns that or nothing."""

    class Box:
        def __init__(self, content: torch.Tensor) -> None:
            self.content = content

    def __init__(self, boxed: bool) -> None:
        super().__init__()
        self.boxed = boxed
        self.weight = nn.Parameter(0.3 * torch.randn(WIDTH, WIDTH))
        self.result: torch.Tensor | None = None

    def forward(self, hidden: torch.Tensor) -> Any:
        result = torch.tanh(hidden @ self.weight)
        if self.boxed:
            return self.Box(result)
        self.result = result
        return None


class Hiding(m.Base):
    def __init__(self, boxed: bool) -> None:
        super().__init__()
        self.hidden = Hidden(boxed)

    def middle(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            output = self.hidden(hidden)
            result = output.content if self.hidden.boxed else self.hidden.result
            assert result is not None
            hidden = hidden + result
        return hidden


def _two_graphs(trainer: Trainer) -> None:
    """Two forwards, then their backwards, with a look in between."""
    for step in range(trainer.run.steps):
        losses = []
        for part in range(2):
            rows = trainer.rows(step, part)
            losses.append(loss_of(trainer(rows), rows))
        trainer.losses.append(sum(losses).item())
        for loss in losses:
            trainer.backward(loss)
            with torch.no_grad():
                trainer(trainer.rows(step, 2))
        trainer.step()


@few
@pytest.mark.parametrize("boxed", [False, True])
def test_outputs_that_nobody_can_see(sharding: Sharding, boxed: bool) -> None:
    """The end of one backward says nothing about the other graph."""
    assert_parity(Run(sharding, partial(Hiding, boxed), loop=_two_graphs))


class Stopped(m.Base):
    """One module uses its weight with and without its gradient: nothing says when the latter use is over."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Detached()

    def middle(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return self.inner(hidden)


class Detached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.3 * torch.randn(WIDTH, WIDTH))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.tanh(torch.tanh(hidden @ self.weight.detach()) @ self.weight)


@over(CUT)
def test_a_freed_parameter_is_never_read(sharding: Sharding) -> None:
    """Where the uses cannot be told autograd refuses, as it does when a tensor was overwritten."""
    errors = on_ranks(Run(sharding, Stopped), return_exceptions=True, timeout=30)
    assert all("modified by an inplace operation" in str(error) for error in errors), errors
