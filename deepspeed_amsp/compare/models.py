"""The model that all strategies train, and its data: the same bits for each of them."""

from __future__ import annotations

import importlib
from typing import NamedTuple

import torch
from torch import nn

from deepspeed_amsp.compare.compute import emulate_compute
from deepspeed_amsp.compare.config import ModelBlock
from deepspeed_amsp.compare.llama import Llama, LlamaConfig
from deepspeed_amsp.module_spec import blocks_of


class Built(NamedTuple):
    """A model whose forward maps windows [batch, sequence + 1] of tokens to the loss, and its blocks: what takes the
    time of a layer, by the count of theory and thresholds (`module_spec.blocks_of`), else the module's children."""

    module: nn.Module
    blocks: list[nn.Module]


class _NextToken(nn.Module):
    """A causal model of transformers behind the same forward."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, windows: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy of each window's tokens after the first."""
        scores = self.model(windows[:, :-1]).logits.float()
        return nn.functional.cross_entropy(scores.flatten(0, 1), windows[:, 1:].flatten())


def build(block: ModelBlock, seed: int, emulated_ms: tuple[float, float] | None = None) -> Built:
    """The model from ``seed``, in fp32; weights are rounded to bf16, so that all masters start from the same.

    emulated_ms: see `emulate_compute`; None leaves the blocks as quick as they are.

    Raises:
        ImportError, AttributeError, TypeError: what the block names cannot be made.
    """
    torch.manual_seed(seed)
    module = _make(block)
    with torch.no_grad():
        for param in module.parameters():
            if param.device.type != "meta":
                param.copy_(param.bfloat16())
    blocks = blocks_of(module)[1] or list(module.children()) or [module]
    if emulated_ms is not None:
        emulate_compute(blocks, *emulated_ms)
    return Built(module, blocks)


def _make(block: ModelBlock) -> nn.Module:
    if block.factory is not None:
        path, _, attribute = block.factory.partition(":")
        made = getattr(importlib.import_module(path), attribute)()
        if not isinstance(made, nn.Module):
            raise TypeError(f"{block.factory} must return a torch.nn.Module, not {made!r:.80}")
        return made
    if block.hf is not None:
        import transformers

        config = transformers.AutoConfig.from_pretrained(block.hf)
        config.use_cache = False
        return _NextToken(transformers.AutoModelForCausalLM.from_config(config).float())
    return Llama(LlamaConfig(**block.shape.model_dump()))


def vocabulary(block: ModelBlock) -> int:
    """Tokens are drawn below it."""
    if block.vocab is not None:
        return block.vocab
    if block.hf is not None:
        import transformers

        return int(transformers.AutoConfig.from_pretrained(block.hf).vocab_size)
    return block.shape.vocab


def batches(block: ModelBlock, vocab: int, seed: int, rank: int, step: int, count: int) -> list[torch.Tensor]:
    """A rank's ``count`` micro-batches of a step, [micro_batch, sequence + 1]; no two ranks or steps have the same."""
    generator = torch.Generator().manual_seed(seed + 100_000 * rank + step)
    shape = (block.micro_batch, block.sequence + 1)
    return [torch.randint(vocab, shape, generator=generator) for _ in range(count)]
