"""Toy models beside whose data parallelism stand tensor or sequence parallelism, and the same models in one process.

Ranks are numbered as Megatron does: those of a model- or sequence-parallel group are neighbours.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from tests.support.models import SAMPLES, VOCABULARY, Outcome, batch, loss_of, make_optimizer

WIDTH, HIDDEN, HEADS = 12, 28, 2
LENGTH = 4
"""Tokens of a sequence that is cut: an even number."""


class Mpu:
    """What Megatron's parallel_state answers, for tensor parallelism over ``parts`` neighbouring ranks."""

    def __init__(self, parts: int) -> None:
        world, rank = dist.get_world_size(), dist.get_rank()
        self._rank, self._parts = rank, parts
        for first in range(0, world, parts):
            ranks = list(range(first, first + parts))
            group = dist.new_group(ranks)
            self._model = group if rank in ranks else getattr(self, "_model", None)
        for part in range(parts):
            ranks = list(range(part, world, parts))
            group = dist.new_group(ranks)
            self._data = group if rank in ranks else getattr(self, "_data", None)

    def get_model_parallel_rank(self) -> int:
        return self._rank % self._parts

    def get_model_parallel_world_size(self) -> int:
        return self._parts

    def get_model_parallel_group(self) -> Any:
        return self._model

    def get_data_parallel_rank(self) -> int:
        return self._rank // self._parts

    def get_data_parallel_world_size(self) -> int:
        return dist.get_world_size() // self._parts

    def get_data_parallel_group(self) -> Any:
        return self._data


# ---- tensor parallelism ------------------------------------------------------------------------------------


class Block(nn.Module):
    """An MLP with a residual between an embedding and a head; whole. Only the first row of ``gate`` is used."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.gate = nn.Parameter(torch.full((4, 1), 0.5))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        return self.head(hidden + self.mlp(self.norm(hidden)))

    def mlp(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(hidden))) + self.gate[0] * hidden


CUT = {"up.weight": 0, "up.bias": 0, "down.weight": 1, "gate": 0}
"""Parameters of `Block` that are cut over the model-parallel ranks, and along which axis."""


class PartOfBlock(Block):
    """A `Block` with a column-parallel and a row-parallel matrix.

    ``down.bias`` is the first part's alone, and only there has ``gate`` a gradient.
    """

    def __init__(self, whole: Block, mpu: Mpu) -> None:
        super().__init__()
        self._group, parts, part = mpu.get_model_parallel_group(), mpu._parts, mpu.get_model_parallel_rank()
        for name, param in whole.named_parameters():
            module = self.get_submodule(name.rpartition(".")[0])
            value = param.data.chunk(parts, CUT[name])[part] if name in CUT else param.data
            mine = nn.Parameter(value.clone())
            # Megatron's mark, and the older one.
            if name in CUT:
                setattr(mine, "tensor_model_parallel" if "up" in name else "model_parallel", True)
            setattr(module, name.rpartition(".")[2], mine)
        self._first = part == 0
        if not self._first:
            self.down.bias = None

    def mlp(self, hidden: torch.Tensor) -> torch.Tensor:
        mine = _SumOfGradients.apply(hidden, self._group)
        share = super().mlp(mine) if self._first else self.down(F.gelu(self.up(mine)))
        return _Sum.apply(share, self._group)


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, group: Any) -> torch.Tensor:
        total = value.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0], None


class _SumOfGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return value

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        total = gradients[0].clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


# ---- sequence parallelism ----------------------------------------------------------------------------------


class Attend(nn.Module):
    """Causal attention over whole sequences [samples, tokens, heads, width]."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any) -> torch.Tensor:
        q, k, v = (value.transpose(1, 2) for value in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


class Causal(nn.Module):
    """One layer of attention between an embedding and a head; no biases, as in `models.Attention`."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.attend: nn.Module = Attend()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        q, k, v = (part.unflatten(-1, (HEADS, -1)) for part in self.qkv(self.norm(hidden)).chunk(3, dim=-1))
        return self.head(hidden + self.out(self.attend(q, k, v, 0).flatten(2)))


def sequence_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """This rank's share of the mean over its samples' tokens: the shares of the ranks of a sequence add up to it."""
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum") / (SAMPLES * LENGTH)


# ---- one process -------------------------------------------------------------------------------------------


def block_loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return loss_of(model(tokens[:, :-1]), tokens)


def causal_loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    labels = tokens[:, 1 : LENGTH + 1]
    return sequence_loss(model(tokens[:, :LENGTH]), labels) * SAMPLES / len(tokens)


def seeded(make: Callable[[], Any]) -> Any:
    torch.manual_seed(7)
    return make()


def alone(
    model: nn.Module,
    loss: Callable[[nn.Module, torch.Tensor], torch.Tensor],
    ranks: int,
    micro_batches: int,
    steps: int,
    clip: float,
) -> Outcome:
    """Plain training of the whole model on what ``ranks`` ranks get together, in one process."""
    optimizer, losses, norms = make_optimizer("adamw", model), [], []
    for step in range(steps):
        optimizer.zero_grad()
        total = torch.zeros(())
        for micro in range(micro_batches):
            part = loss(model, batch(step, micro, ranks)) / micro_batches
            part.backward()
            total += part.detach()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), clip if clip > 0 else float("inf"))))
        losses.append(float(total))
        optimizer.step()
    return Outcome({name: p.detach().clone() for name, p in model.named_parameters()}, losses, norms)
