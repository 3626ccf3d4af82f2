"""Small models, data and the independent reference: one process, plain torch, the concatenated batch.

Nothing here imports deepspeed_amsp: what a test compares with must not come from the code under test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY = 23
LENGTH = 5
SAMPLES = 2
"""Sequences in a micro-batch of one rank."""


class Mlp(nn.Module):
    """Odd shapes, a norm, biases, and a bare parameter on the root."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 11)
        self.first = nn.Linear(11, 26)
        self.norm = nn.LayerNorm(26)
        self.second = nn.Linear(26, 7, bias=False)
        self.head = nn.Linear(7, VOCABULARY)
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = F.gelu(self.first(self.embed(tokens))) * self.gain
        return self.head(torch.tanh(self.second(self.norm(hidden))))


class Attention(nn.Module):
    """torch's own encoder layer, which reads its output projection's weight without calling the module, and a
    head that is the embedding's weight, read outside any module.

    Without biases: a key's bias has a gradient of zero plus rounding, which Adam would blow up to full size.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 12)
        self.block = nn.TransformerEncoderLayer(12, 2, 20, dropout=0.0, batch_first=True, norm_first=True, bias=False)
        self.norm = nn.LayerNorm(12)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return F.linear(self.norm(self.block(self.embed(tokens))), self.embed.weight)


class Convolution(nn.Module):
    """Convolutions over token embeddings and a batch of statistics-free norms."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.conv = nn.Conv1d(8, 14, kernel_size=3, padding=1)
        self.norm = nn.GroupNorm(2, 14)
        self.head = nn.Linear(14, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.conv(self.embed(tokens).transpose(1, 2))
        return self.head(F.relu(self.norm(hidden)).transpose(1, 2))


class Recomputed(nn.Module):
    """Two blocks under activation checkpointing."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.embed = nn.Embedding(VOCABULARY, 12)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(12), nn.Linear(12, 19), nn.GELU(), nn.Linear(19, 12)) for _ in range(2)
        )
        self.head = nn.Linear(12, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        from torch.utils.checkpoint import checkpoint

        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = hidden + checkpoint(block, hidden, use_reentrant=self.reentrant)
        return self.head(hidden)


class Even(nn.Module):
    """Four square matrices and nothing else: every sharding of it is even, so formulas have no padding."""

    WIDTH = 16
    LAYERS = 4

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(self.WIDTH, self.WIDTH, bias=False) for _ in range(self.LAYERS))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = F.one_hot(tokens, VOCABULARY)[..., : self.WIDTH].to(self.layers[0].weight.dtype)
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        return F.pad(hidden, (0, VOCABULARY - self.WIDTH))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": Mlp,
    "attention": Attention,
    "convolution": Convolution,
    "even": Even,
    "recomputed": lambda: Recomputed(reentrant=False),
    "recomputed_reentrant": lambda: Recomputed(reentrant=True),
}


def make_model(name: str, seed: int = 7) -> nn.Module:
    torch.manual_seed(seed)
    return MODELS[name]()


def batch(step: int, micro: int, ranks: int) -> torch.Tensor:
    """Tokens [ranks * SAMPLES, LENGTH + 1] of one micro-batch of all ranks, rank after rank."""
    generator = torch.Generator().manual_seed(1000 * step + micro)
    return torch.randint(0, VOCABULARY, (ranks * SAMPLES, LENGTH + 1), generator=generator)


def loss_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def decay_groups(named: Iterable[tuple[str, nn.Parameter]], decay: float) -> list[dict[str, Any]]:
    """Matrices decay, everything else does not: the usual two groups."""
    named = list(named)
    return [
        {"params": [p for _, p in named if p.dim() >= 2], "weight_decay": decay},
        {"params": [p for _, p in named if p.dim() < 2], "weight_decay": 0.0},
    ]


# Optimizers that divide by the gradient's own size turn rounding of the smallest gradients into full-size
# differences; their constants are chosen so that this stays below the tolerance of the comparisons.
OPTIMIZERS: dict[str, Callable[[list[dict[str, Any]]], torch.optim.Optimizer]] = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=1e-2),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.05, initial_accumulator_value=0.1),
    "adafactor": lambda groups: torch.optim.Adafactor(groups, lr=5e-3),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, lr=1e-2, momentum=0.5, eps=1e-3),
}


def make_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    return OPTIMIZERS[name](decay_groups(model.named_parameters(), 0.1))


@dataclass(frozen=True)
class Outcome:
    """Parameters by name, and per step the loss (mean over micro-batches) and the gradient norm before clipping."""

    parameters: dict[str, torch.Tensor]
    losses: list[float]
    norms: list[float]


def reference(model_name: str, optimizer_name: str, ranks: int, micro_batches: int, steps: int, clip: float) -> Outcome:
    """Plain training on the concatenated batch, in fp32."""
    model = make_model(model_name)
    optimizer = make_optimizer(optimizer_name, model)
    losses, norms = [], []
    for step in range(steps):
        optimizer.zero_grad()
        total = 0.0
        for micro in range(micro_batches):
            tokens = batch(step, micro, ranks)
            loss = loss_of(model(tokens[:, :-1]), tokens)
            (loss / micro_batches).backward()
            total += loss.item() / micro_batches
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip if clip > 0 else float("inf"))
        losses.append(total)
        norms.append(norm.item())
        optimizer.step()
    return Outcome({name: p.detach().clone() for name, p in model.named_parameters()}, losses, norms)
