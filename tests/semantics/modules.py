"""Small models, each with one thing that real models do. Rows are [n, FEATURES + 2], see `harness.batch`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.semantics.harness import FEATURES

WIDTH = 10


def features(rows: torch.Tensor) -> torch.Tensor:
    return rows[:, :FEATURES]


def branch_of(rows: torch.Tensor) -> torch.Tensor:
    return rows[:, FEATURES].long()


def step_of(rows: torch.Tensor) -> int:
    return int(rows[0, FEATURES + 1])


class Base(nn.Module):
    """Something in front and something behind, for models whose middle is the case."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, WIDTH)
        self.last = nn.Linear(WIDTH, FEATURES)

    def middle(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.last(self.middle(torch.tanh(self.first(features(rows))), rows))


class Plain(Base):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inner = nn.Linear(WIDTH, WIDTH)

    def middle(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return hidden + F.gelu(self.inner(self.norm(hidden)))


# ---- ties, frozen parts ------------------------------------------------------------------------------------


class Tied(nn.Module):
    """The head is the embedding; ``again`` is a Linear with ``first``'s very weight; a matrix tied within a module."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, WIDTH)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.again = nn.Linear(WIDTH, WIDTH)
        self.again.weight = self.first.weight
        self.head = nn.Linear(WIDTH, 9, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        tokens = (features(rows)[:, :3] * 10).long() % 9
        hidden = torch.tanh(self.first(self.embed(tokens).sum(dim=1)))
        return self.head(torch.tanh(self.again(hidden)))[:, :FEATURES]


class Adapted(nn.Module):
    """A frozen backbone with low-rank adapters; only they and the last bias train."""

    WIDE = 40

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, self.WIDE)
        self.backbone = nn.ModuleList(nn.Linear(self.WIDE, self.WIDE) for _ in range(3))
        self.norm = nn.LayerNorm(self.WIDE)
        self.last = nn.Linear(self.WIDE, FEATURES)
        self.requires_grad_(False)
        self.last.bias.requires_grad_(True)
        self.down = nn.ModuleList(nn.Linear(self.WIDE, 3, bias=False) for _ in range(3))
        self.up = nn.ModuleList(nn.Linear(3, self.WIDE, bias=False) for _ in range(3))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        hidden = self.first(features(rows))
        for block, down, up in zip(self.backbone, self.down, self.up, strict=True):
            hidden = hidden + torch.tanh(block(self.norm(hidden)) + up(down(hidden)))
        return self.last(hidden)


class OnlyEmbeddings(nn.Module):
    """All frozen but the embedding, which comes first: the gradient passes through frozen modules only."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, WIDTH)
        self.inner = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh()).requires_grad_(False)
        self.last = nn.Linear(WIDTH, FEATURES).requires_grad_(False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.last(self.inner(self.embed((features(rows)[:, :3] * 10).long() % 9).sum(dim=1)))


# ---- unused parts, branches --------------------------------------------------------------------------------


class Unused(Base):
    """Unused in every way: a whole module, a bias beside a used weight, a bare parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(WIDTH, WIDTH)
        self.partly = nn.Linear(WIDTH, WIDTH)
        self.lonely = nn.Parameter(torch.ones(3, 5))

    def middle(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return torch.tanh(F.linear(hidden, self.partly.weight))


UNUSED = ("spare.weight", "spare.bias", "partly.bias", "lonely")


class Sometimes(Base):
    """``late`` is called in odd steps only, ``early`` in the first step only, as in layer drop."""

    def __init__(self) -> None:
        super().__init__()
        self.late = nn.Linear(WIDTH, WIDTH)
        self.early = nn.Linear(WIDTH, WIDTH)

    def middle(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        if step_of(rows) % 2:
            hidden = hidden + torch.tanh(self.late(hidden))
        if step_of(rows) == 0:
            hidden = hidden + torch.tanh(self.early(hidden))
        return hidden


class Experts(nn.Module):
    """Rows of each branch go to one expert. A rank's rows all have one branch, so it calls one expert only."""

    def __init__(self, count: int = 3) -> None:
        super().__init__()
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 7), nn.Tanh(), nn.Linear(7, WIDTH)) for _ in range(count)
        )

    def forward(self, hidden: torch.Tensor, branch: torch.Tensor) -> torch.Tensor:
        result = torch.zeros_like(hidden)
        for index in sorted(set(branch.tolist())):
            chosen = (branch == index)[:, None]
            result = result + torch.where(chosen, self.experts[index](hidden), 0.0)
        return result


class Routed(Base):
    def __init__(self) -> None:
        super().__init__()
        self.mixture = Experts()

    def middle(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return hidden + self.mixture(hidden, branch_of(rows))


# ---- shapes and types --------------------------------------------------------------------------------------


class Shapes(Base):
    """0-dim, 1-element, zero-size and odd parameters, alone and beside others."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.one = nn.Parameter(torch.full((1,), 0.5))
        self.nothing = nn.Parameter(torch.empty(0, 4))
        self.three = nn.Parameter(torch.linspace(-1, 1, 3))
        self.seven = nn.Parameter(torch.linspace(-1, 1, 7))
        self.thirteen = nn.Parameter(torch.linspace(-1, 1, 13).reshape(13, 1, 1))
        self.deep = nn.Parameter(torch.linspace(-1, 1, 30).reshape(3, 5, 2))
        self.empty = nn.Linear(0, WIDTH)
        self.gain = Gain()

    def middle(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        pieces = self.three.sum() + self.seven.square().sum() + self.thirteen.sum() + self.deep.square().mean()
        hidden = self.gain(hidden * self.scale + self.one) + 0.1 * pieces + self.nothing.sum()
        return hidden + self.empty(hidden[:, :0])


class Gain(nn.Module):
    """A module whose only parameter is 0-dim."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.tensor(1.5))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * self.value


class Quantised(Base):
    """int8 and bool parameters, as quantised bases have them, beside a trained scale."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.randint(-8, 8, (WIDTH, WIDTH), dtype=torch.int8), requires_grad=False)
        self.mask = nn.Parameter(torch.rand(WIDTH) > 0.3, requires_grad=False)
        self.table = nn.Parameter(torch.tensor(2**53 + 1), requires_grad=False)
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.1))

    def middle(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        weight = self.codes.to(hidden.dtype) * self.scale * self.mask
        return torch.tanh(hidden @ weight.t()) + float(self.table == 2**53 + 1)


class Buffers(Base):
    """Long-context frequencies in fp32, a counter, running statistics, a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequency", torch.tensor([257.0, 1.0001]))
        self.register_buffer("count", torch.tensor(2**40 + 1))
        self.register_buffer("scratch", torch.ones(2), persistent=False)
        self.norm = nn.BatchNorm1d(WIDTH, affine=False)  # with weights torch wants its statistics in their dtype

    def middle(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return self.norm(hidden)


# ---- reuse and structure -----------------------------------------------------------------------------------


class Reused(Base):
    """One block three times in a forward, the second time under activation checkpointing."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh())

    def middle(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.block(hidden)
        hidden = hidden + checkpoint(self.block, hidden, use_reentrant=False)
        return hidden + self.block(hidden)


class Conditional(Base):
    """Modules called or not, and in another order, from step to step (on all ranks alike)."""

    def __init__(self) -> None:
        super().__init__()
        self.choices = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in ("a", "b", "c")})

    def middle(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        order = ("abc", "ca", "bcb")[step_of(rows) % 3]
        for name in order:
            hidden = hidden + torch.tanh(self.choices[name](hidden))
        return hidden


class Borrowed(Base):
    """Weights read outside their module, inside another one's forward, and listed by name."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(WIDTH, WIDTH)
        self.store = nn.ParameterDict({"bias": torch.zeros(WIDTH), "gain": torch.ones(WIDTH)})
        self.reader = Reader(self.one)

    def middle(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(F.linear(hidden, self.one.weight, self.store["bias"])) * self.store["gain"]
        return hidden + self.reader(hidden)


class Reader(nn.Module):
    """Uses another module's parameters; it has none itself, and does not count as that module's parent."""

    def __init__(self, other: nn.Linear) -> None:
        super().__init__()
        self.others = [other]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.sin(hidden @ self.others[0].weight + self.others[0].bias)


class Lists(Base):
    def __init__(self) -> None:
        super().__init__()
        self.bare = nn.ParameterList([torch.linspace(-1, 1, n) for n in (WIDTH, 1, WIDTH)])
        self.nested = nn.ModuleList([nn.ModuleList([nn.Linear(WIDTH, WIDTH)]), nn.Identity(), nn.ModuleList()])

    def middle(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        for value in self.bare:
            hidden = torch.tanh(hidden + value)
        return self.nested[1](self.nested[0][0](hidden))


@dataclass
class Output:
    hidden: torch.Tensor
    more: dict[str, Any]
    loss: torch.Tensor | None = None


class Nested(Base):
    """Modules that take and give dictionaries, tuples and dataclasses, with tensors that need no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = NestedInner()

    def forward(self, rows: torch.Tensor) -> Output:
        hidden = torch.tanh(self.first(features(rows)))
        output = self.inner({"state": (hidden, [None, rows])}, gain=0.5)
        (deep,) = output.more["deep"][1]
        return Output(self.last(output.hidden + deep), {"rows": rows, "all": (output,)})


class NestedInner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(WIDTH, WIDTH)
        self.other = nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: dict[str, Any], gain: float) -> Output:
        hidden, _ = inputs["state"]
        return Output(self.one(hidden), {"deep": ("text", (torch.tanh(self.other(hidden)) * gain,)), "step": 3})


class Doubling(torch.autograd.Function):
    """A function with a backward of its own: twice the right gradient for the weight."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(hidden, weight)
        return hidden @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        hidden, weight = ctx.saved_tensors
        return gradient @ weight, 2 * gradient.t() @ hidden


class Custom(Base):
    """A custom autograd function that saves a parameter, and a module whose output needs no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)
        self.observer = Observer()

    def middle(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return torch.tanh(Doubling.apply(hidden, self.weight)) + self.observer(hidden)


class Observer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.probe = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return self.probe(hidden)
