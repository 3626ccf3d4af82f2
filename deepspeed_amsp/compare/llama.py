"""A small LLaMA in plain torch: RMSNorm, rotary positions, SwiGLU, grouped-query attention, untied head.

Nothing here knows about DeepSpeed or about sharding: the model is what a user would write anyway.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class LlamaConfig:
    """The shape of the model. The defaults make about 10.2M parameters over the 256 byte values."""

    vocab: int = 256
    dim: int = 384
    layers: int = 6
    heads: int = 6
    kv_heads: int | None = None  # None: as many as heads (no grouped queries)
    ffn: int = 928
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    recompute: bool = False  # recompute each block's activations in the backward pass

    def __post_init__(self) -> None:
        """Refuse shapes that the attention below cannot form."""
        if self.dim % self.heads:
            raise ValueError(f"dim {self.dim} must be a multiple of heads {self.heads}")
        if self.head_dim % 2:
            raise ValueError(f"dim / heads = {self.head_dim} must be even: rotary positions turn pairs")
        if self.heads % self.groups:
            raise ValueError(f"heads {self.heads} must be a multiple of kv_heads {self.groups}")

    @property
    def head_dim(self) -> int:
        """The width of one attention head."""
        return self.dim // self.heads

    @property
    def groups(self) -> int:
        """The number of key/value heads."""
        return self.heads if self.kv_heads is None else self.kv_heads


def parameter_count(config: LlamaConfig) -> int:
    """The number of parameters of `Llama(config)`, by formula."""
    attention = 2 * config.dim * config.dim + 2 * config.dim * config.groups * config.head_dim
    block = attention + 3 * config.dim * config.ffn + 2 * config.dim
    return 2 * config.vocab * config.dim + config.layers * block + config.dim


def rope_tables(length: int, config: LlamaConfig, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines of shape (length, head_dim / 2), in fp32.

    They are computed per forward instead of kept as buffers: an engine that casts the module to bf16
    casts its buffers too, and bf16 cannot tell neighbouring positions apart. It costs microseconds.
    """
    pairs = torch.arange(0, config.head_dim, 2, device=device, dtype=torch.float32)
    speeds = config.rope_theta ** (-pairs / config.head_dim)
    angles = torch.outer(torch.arange(length, device=device, dtype=torch.float32), speeds)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (x[i], x[i + head_dim/2]) of a (batch, head, position, head_dim) tensor by its angle."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


class RMSNorm(nn.Module):
    """Divide by the root mean square, then scale."""

    def __init__(self, dim: int, eps: float) -> None:
        """Start with a scale of one."""
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class Attention(nn.Module):
    """Causal self-attention with rotary positions and, if asked for, fewer key/value heads."""

    def __init__(self, config: LlamaConfig) -> None:
        """Make the four projections."""
        super().__init__()
        self.config = config
        self.q_proj = nn.Linear(config.dim, config.dim, bias=False)
        self.k_proj = nn.Linear(config.dim, config.groups * config.head_dim, bias=False)
        self.v_proj = nn.Linear(config.dim, config.groups * config.head_dim, bias=False)
        self.o_proj = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Attend to this position and the earlier ones."""
        batch, length, _ = x.shape
        q, k, v = (
            projection(x).view(batch, length, -1, self.config.head_dim).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        repeats = self.config.heads // self.config.groups
        if repeats > 1:
            k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))


class SwiGLU(nn.Module):
    """The gated feed-forward layer."""

    def __init__(self, config: LlamaConfig) -> None:
        """Make the three projections."""
        super().__init__()
        self.gate_proj = nn.Linear(config.dim, config.ffn, bias=False)
        self.up_proj = nn.Linear(config.dim, config.ffn, bias=False)
        self.down_proj = nn.Linear(config.ffn, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """down(silu(gate(x)) * up(x))."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """One pre-norm transformer block."""

    def __init__(self, config: LlamaConfig) -> None:
        """Make both halves and their norms."""
        super().__init__()
        self.input_norm = RMSNorm(config.dim, config.norm_eps)
        self.attention = Attention(config)
        self.ffn_norm = RMSNorm(config.dim, config.norm_eps)
        self.ffn = SwiGLU(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Add attention, then the feed-forward layer, to the residual stream."""
        x = x + self.attention(self.input_norm(x), cos, sin)
        return x + self.ffn(self.ffn_norm(x))


class Llama(nn.Module):
    """The whole model. `forward` takes windows of tokens and gives the mean next-token loss."""

    def __init__(self, config: LlamaConfig) -> None:
        """Build and initialise the model from torch's current random state."""
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.head = nn.Linear(config.dim, config.vocab, bias=False)
        self._initialise()

    @torch.no_grad()
    def _initialise(self) -> None:
        """Normal weights, of a size that lets a short run learn: 0.02 everywhere takes far more steps.

        The embedding starts at the scale of the norms, so that the blocks, which write little at first,
        change it slowly; every other layer keeps the scale of its input.
        """
        for name, parameter in self.named_parameters():
            if name == "embed.weight":
                nn.init.normal_(parameter)
            elif name == "head.weight":
                nn.init.normal_(parameter, std=0.02)
            elif name.endswith(("o_proj.weight", "down_proj.weight")):  # these write into the residual stream
                nn.init.normal_(parameter, std=0.02 / (2 * self.config.layers) ** 0.5)
            elif parameter.dim() == 2:
                nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)

    def logits(self, tokens: Tensor) -> Tensor:
        """Scores of the next token at every position: (batch, length) -> (batch, length, vocab)."""
        cos, sin = rope_tables(tokens.shape[1], self.config, tokens.device)
        x = self.embed(tokens)
        for block in self.blocks:
            if self.config.recompute and self.training:
                x = checkpoint(block, x, cos, sin, use_reentrant=False)
            else:
                x = block(x, cos, sin)
        return self.head(self.norm(x))

    def forward(self, windows: Tensor) -> Tensor:
        """Mean cross-entropy, in nats, of each window's bytes after the first: (batch, length + 1) -> ()."""
        scores = self.logits(windows[:, :-1])
        return F.cross_entropy(scores.float().flatten(0, 1), windows[:, 1:].flatten())
