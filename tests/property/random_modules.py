"""Random small modules and training runs, as values that Hypothesis can draw, print and shrink."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from deepspeed_amsp.plan.factors import enumerate_shardings
from tests.semantics.harness import CLUSTER, FEATURES, Run, Trainer, loss_of
from tests.semantics.modules import Output, features, step_of


@dataclass(frozen=True)
class Block:
    """One block of a model.

    kind: see `_INNER`. tied: a "linear" uses the weight of the first "linear". times: how often in a forward.
    recompute: "", "plain" or "reentrant". wrap: what the block's forward returns. when: the steps that call it.
    chained: calls follow each other directly, each on the last one's output. scaled: what is recomputed is a
    function that reads a parameter of the model, too.
    """

    kind: str
    frozen: bool = False
    tied: bool = False
    times: int = 1
    recompute: str = ""
    wrap: str = ""
    when: str = "always"
    chained: bool = False
    scaled: bool = False


@dataclass(frozen=True)
class Spec:
    """short: how many blocks an evaluation computes; None for all."""

    width: int
    blocks: tuple[Block, ...]
    frozen_first: bool = False
    tied_head: bool = False
    unused: bool = False
    short: int | None = None


class Returned(nn.Module):
    """Returns a part of its parameter, with a view of all of it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.linspace(-1, 1, 3 * width).view(3, width))

    def forward(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.table[:2], self.table.t()


class Inner(nn.Module):
    """A block; its forward keeps the width."""

    def __init__(self, block: Block, width: int) -> None:
        super().__init__()
        self.wrap = block.wrap
        self.kind = block.kind
        if self.kind == "linear":
            self.main = nn.Linear(width, width)
        elif self.kind == "mlp":
            self.main = nn.Sequential(nn.Linear(width, 7), nn.Tanh(), nn.Linear(7, width, bias=False))
        elif self.kind == "norm":
            self.main = nn.LayerNorm(width)
        elif self.kind == "scale":
            self.scale = nn.Parameter(torch.tensor(1.25))
        elif self.kind == "list":
            self.values = nn.ParameterList([torch.linspace(-1, 1, width), torch.full((1,), 0.1)])
        elif self.kind == "convolution":
            self.main = nn.Conv1d(1, 3, 3, padding=1)
        elif self.kind == "returned":
            self.source = Returned(width)
            self.main = nn.Linear(width, width)
        elif self.kind == "empty":
            self.nothing = nn.Parameter(torch.empty(0, 3))

    def compute(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.kind == "scale":
            return hidden * self.scale
        if self.kind == "list":
            for value in self.values:
                hidden = torch.tanh(hidden + value)
            return hidden
        if self.kind == "convolution":
            return self.main(hidden[:, None]).mean(dim=1)
        if self.kind == "returned":
            queries, keys = self.source()
            return torch.softmax(hidden @ keys, dim=1)[:, :2] @ self.main(queries)
        if self.kind == "empty":
            return hidden + self.nothing.sum()
        return torch.tanh(self.main(hidden)) if self.kind == "linear" else self.main(hidden)

    def forward(self, hidden: torch.Tensor) -> Any:
        result = self.compute(hidden)
        if self.wrap == "dict":
            return {"result": [result], "text": "x"}
        if self.wrap == "tuple":
            return (None, (result,))
        if self.wrap == "dataclass":
            return Output(result, {"rows": hidden.detach()})
        return result


def unwrap(output: Any) -> torch.Tensor:
    if isinstance(output, dict):
        return output["result"][0]
    if isinstance(output, tuple):
        return output[1][0]
    return output.hidden if isinstance(output, Output) else output


class RandomModule(nn.Module):
    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.spec = spec
        self.first = nn.Linear(FEATURES, spec.width)
        self.blocks = nn.ModuleList(Inner(block, spec.width) for block in spec.blocks)
        self.last = nn.Linear(spec.width, FEATURES)
        if any(block.scaled for block in spec.blocks):
            self.gain = nn.Parameter(torch.linspace(0.5, 1.5, spec.width))
        if spec.unused:
            self.spare = nn.Linear(spec.width, 3)
        linears = [inner for inner in self.blocks if inner.kind == "linear"]
        for block, inner in zip(spec.blocks, self.blocks, strict=True):
            if block.tied and inner.kind == "linear":
                inner.main.weight = linears[0].main.weight
        for block, inner in zip(spec.blocks, self.blocks, strict=True):
            if block.frozen:
                inner.requires_grad_(False)
        if spec.frozen_first:
            self.first.requires_grad_(False)

    def _call(self, block: Block, inner: nn.Module, hidden: torch.Tensor) -> Any:
        def scaled(hidden: torch.Tensor) -> torch.Tensor:
            # Bounded, since a plain product of the same gain, again and again, diverges.
            return torch.cos(self.gain) * unwrap(inner(torch.tanh(hidden * self.gain)))

        function = scaled if block.scaled else inner
        if block.recompute:
            return checkpoint(function, hidden, use_reentrant=block.recompute == "reentrant")
        return function(hidden)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(features(rows)))
        odd = step_of(rows) % 2 == 1
        count = None if self.training else self.spec.short
        for block, inner in list(zip(self.spec.blocks, self.blocks, strict=True))[:count]:
            if block.when != "always" and (block.when == "odd") != odd:
                continue
            for _ in range(block.times):
                result = unwrap(self._call(block, inner, hidden))
                hidden = result if block.chained and block.kind != "scale" else 0.5 * hidden + result
        if count is not None:
            return hidden[:, :FEATURES]
        if self.spec.tied_head:
            return F.linear(hidden, self.first.weight.t(), self.last.bias)
        return self.last(hidden)


# ---- loops -------------------------------------------------------------------------------------------------


def _forward_loss(trainer: Trainer, step: int, micro: int) -> torch.Tensor:
    rows = trainer.rows(step, micro)
    loss = loss_of(trainer(rows), rows)
    trainer.losses.append(loss.item())
    return loss


def random_loop(trainer: Trainer, kind: str, evaluate: str) -> None:
    """kind: backwards in a micro-batch; evaluate: the mode of an evaluation in all places where one may be."""
    modes: dict[str, Any] = {"no_grad": torch.no_grad, "inference": torch.inference_mode, "grad": nullcontext}

    def look(step: int) -> None:
        if evaluate:
            trainer.train(False)
            with modes[evaluate]():
                rows = trainer.rows(500 + step, 0)
                trainer.notes.append(loss_of(trainer(rows), rows).item())
            trainer.train()

    for step in range(trainer.run.steps):
        for micro in range(trainer.run.micro_batches):
            if kind == "two_forwards":
                loss = _forward_loss(trainer, step, micro) + _forward_loss(trainer, step, 50 + micro)
                look(step)
                trainer.backward(loss)
            elif kind == "two_backwards":
                trainer.backward(_forward_loss(trainer, step, micro))
                look(step)
                trainer.backward(_forward_loss(trainer, step, 50 + micro))
            else:
                loss = _forward_loss(trainer, step, micro)
                look(step)
                trainer.backward(loss)
            look(step)
            trainer.step()
        look(step)


# ---- strategies --------------------------------------------------------------------------------------------

KINDS = ("linear", "mlp", "norm", "scale", "list", "convolution", "returned", "empty")

blocks = st.builds(
    Block,
    kind=st.sampled_from(KINDS),
    frozen=st.sampled_from((False, False, True)),
    tied=st.booleans(),
    times=st.sampled_from((1, 2, 3)),
    recompute=st.sampled_from(("", "plain", "reentrant")),
    wrap=st.sampled_from(("", "dict", "tuple", "dataclass")),
    when=st.sampled_from(("always", "always", "always", "odd", "even")),
    chained=st.booleans(),
    scaled=st.sampled_from((False, False, True)),
).map(
    # torch's reentrant checkpoint only takes tensors and tuples of them.
    lambda block: Block(**{**vars(block), "wrap": ""}) if block.recompute == "reentrant" else block
)

specs = st.builds(
    Spec,
    width=st.sampled_from((3, 5, 8, 13)),
    blocks=st.lists(blocks, min_size=1, max_size=4).map(tuple),
    frozen_first=st.sampled_from((False, False, True)),
    # Either leaves a bucket incomplete, so that hardly any is sent before the backward ends: not too often.
    tied_head=st.sampled_from((False, False, False, True)),
    unused=st.sampled_from((False, False, False, True)),
    short=st.sampled_from((None, None, 0, 1)),
)

amsp_blocks = st.fixed_dictionaries(
    {},
    optional={
        "prefetch_bytes": st.sampled_from((0, 200)),
        "merge_communicators": st.just(True),
        "keep_after_forward": st.sampled_from(("all", 300)),
        "verify_every": st.just(1),
        "overlap": st.fixed_dictionaries(
            {key: st.booleans() for key in ("gather", "reduce_scatter", "all_reduce", "publish")}
        ),
    },
)

runs = st.builds(
    Run,
    sharding=st.sampled_from(enumerate_shardings(CLUSTER)),
    model=specs.map(lambda spec: partial(RandomModule, spec)),
    loop=st.builds(
        partial,
        st.just(random_loop),
        kind=st.sampled_from(("plain", "two_forwards", "two_backwards")),
        evaluate=st.sampled_from(("", "no_grad", "inference", "grad")),
    ),
    steps=st.just(3),
    micro_batches=st.integers(1, 3),
    optimizer=st.sampled_from(("adamw", "sgd")),
    clip=st.sampled_from((0.0, 0.1, 5.0)),
    reduce=st.sampled_from(("two_level", "all_reduce")),
    publish=st.sampled_from(("broadcast", "all_gather")),
    bucket_bytes=st.sampled_from((1, 100, 400, 10**6)),
    adversarial=st.booleans(),
    different_seeds=st.booleans(),
    amsp=amsp_blocks,
    zero=st.sampled_from(({}, {}, {"stage3_param_persistence_threshold": 30})),
)
