"""A config.json or a name becomes the units that the engine makes of the real module."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from deepspeed_amsp.compare.llama import Llama, LlamaConfig, parameter_count
from deepspeed_amsp.module_spec import model_spec
from deepspeed_amsp.partition.params import find_units
from deepspeed_amsp.plan.models import FAMILIES, PAPER_MODELS, from_config, load_model, named_model, read_config
from deepspeed_amsp.plan.specs import ModelSpec, SpecError

LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "vocab_size": 32_000,
}
PUBLIC: dict[str, tuple[dict[str, Any], int]] = {
    # The models' own config.json, and the sum of the shapes in their safetensors index on huggingface.co.
    "meta-llama/Llama-2-7b-hf": (LLAMA, 6_738_415_616),
    "meta-llama/Meta-Llama-3-8B": (
        {**LLAMA, "intermediate_size": 14_336, "num_key_value_heads": 8, "vocab_size": 128_256},
        8_030_261_248,
    ),
    "mistralai/Mistral-7B-v0.1": (
        {**LLAMA, "model_type": "mistral", "intermediate_size": 14_336, "num_key_value_heads": 8},
        7_241_732_096,
    ),
    "Qwen/Qwen2-7B": (
        {
            "model_type": "qwen2",
            "hidden_size": 3584,
            "intermediate_size": 18_944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "vocab_size": 152_064,
            "tie_word_embeddings": False,
        },
        7_615_616_512,
    ),
    "Qwen/Qwen3-8B": (
        {
            "model_type": "qwen3",
            "hidden_size": 4096,
            "intermediate_size": 12_288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "attention_bias": False,
            "vocab_size": 151_936,
            "tie_word_embeddings": False,
        },
        8_190_735_360,
    ),
    "openai-community/gpt2": (
        {
            "model_type": "gpt2",
            "n_embd": 768,
            "n_head": 12,
            "n_layer": 12,
            "n_positions": 1024,
            "vocab_size": 50_257,
        },
        124_439_808,
    ),
    "mistralai/Mixtral-8x7B-v0.1": (
        {
            **LLAMA,
            "model_type": "mixtral",
            "intermediate_size": 14_336,
            "num_key_value_heads": 8,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
        46_702_792_704,
    ),
}
SMALL: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "mistral": {"num_key_value_heads": 2, "head_dim": 24},
    "qwen2": {"num_key_value_heads": 2},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 32, "tie_word_embeddings": True},
    "gpt2": {"n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 32, "n_inner": 96},
    "mixtral": {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2},
}
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 128,
}


def small(kind: str) -> dict[str, Any]:
    return {**SIZES, "model_type": kind, **SMALL[kind]}


@pytest.mark.parametrize("name", PUBLIC)
def test_counts_of_public_models(name: str) -> None:
    config, numel = PUBLIC[name]
    assert from_config(config).numel == numel


@pytest.mark.parametrize("name", PUBLIC)
def test_flops_of_a_token_count_every_matrix_that_multiplies_it(name: str) -> None:
    """2 x (parameters - vectors - looked-up tables), and a head, tied or not; of experts those that are active."""
    config, numel = PUBLIC[name]
    model = from_config(config)
    shapes = {param.name: param.shape for unit in model.units for param in unit.params}
    vectors = sum(math.prod(shape) for shape in shapes.values() if len(shape) == 1)
    idle = 0
    if config["model_type"] == "mixtral":
        idle = 32 * 6 * 3 * 4096 * 14_336  # 6 of 8 experts
    looked_up = shapes["transformer.wpe.weight"] if config["model_type"] == "gpt2" else (model.vocab, model.hidden)
    expected = 2 * (numel - vectors - math.prod(looked_up) - idle)
    assert sum(unit.flops_per_token for unit in model.units) == expected


def test_attention_follows_once_a_layer() -> None:
    model = from_config(PUBLIC["Qwen/Qwen3-8B"][0])
    assert [unit.attention_width for unit in model.units if unit.attention_width] == [32 * 128] * 36


class _Attention(nn.Module):
    """As transformers registers it; written anew, so that the counts do not depend on an installed version."""

    def __init__(self, c: dict[str, Any], qkv_bias: bool, o_bias: bool, norms: bool) -> None:
        super().__init__()
        hidden, heads = c["hidden_size"], c["num_attention_heads"]
        size = c.get("head_dim") or hidden // heads
        kv = c.get("num_key_value_heads", heads)
        self.q_proj = nn.Linear(hidden, heads * size, bias=qkv_bias)
        self.k_proj = nn.Linear(hidden, kv * size, bias=qkv_bias)
        self.v_proj = nn.Linear(hidden, kv * size, bias=qkv_bias)
        self.o_proj = nn.Linear(heads * size, hidden, bias=o_bias)
        if norms:
            self.q_norm, self.k_norm = nn.RMSNorm(size), nn.RMSNorm(size)


class _Mlp(nn.Module):
    def __init__(self, c: dict[str, Any], bias: bool) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(c["hidden_size"], c["intermediate_size"], bias=bias)
        self.up_proj = nn.Linear(c["hidden_size"], c["intermediate_size"], bias=bias)
        self.down_proj = nn.Linear(c["intermediate_size"], c["hidden_size"], bias=bias)


class _Experts(nn.Module):
    def __init__(self, count: int, hidden: int, ffn: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(count, 2 * ffn, hidden))
        self.down_proj = nn.Parameter(torch.empty(count, hidden, ffn))


class _Mixture(nn.Module):
    def __init__(self, c: dict[str, Any]) -> None:
        super().__init__()
        self.gate = nn.Linear(c["hidden_size"], c["num_local_experts"], bias=False)
        self.experts = _Experts(c["num_local_experts"], c["hidden_size"], c["intermediate_size"])


class _Layer(nn.Module):
    def __init__(self, c: dict[str, Any]) -> None:
        super().__init__()
        kind, said = c["model_type"], c.get("attention_bias", False)
        self.self_attn = _Attention(c, said or kind == "qwen2", said, kind == "qwen3")
        self.mlp = _Mixture(c) if kind == "mixtral" else _Mlp(c, c.get("mlp_bias", False))
        self.input_layernorm = nn.RMSNorm(c["hidden_size"])
        self.post_attention_layernorm = nn.RMSNorm(c["hidden_size"])


class _Decoder(nn.Module):
    def __init__(self, c: dict[str, Any]) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(c["vocab_size"], c["hidden_size"])
        self.model.layers = nn.ModuleList(_Layer(c) for _ in range(c["num_hidden_layers"]))
        self.model.norm = nn.RMSNorm(c["hidden_size"])
        self.lm_head = nn.Linear(c["hidden_size"], c["vocab_size"], bias=False)
        if c.get("tie_word_embeddings"):
            self.lm_head.weight = self.model.embed_tokens.weight


def units_of(module: nn.Module) -> list[tuple[str, tuple[Any, ...]]]:
    return [(unit.name, unit.specs) for unit in find_units(module, lambda *_: None)]


def listed(model: ModelSpec) -> list[tuple[str, tuple[Any, ...]]]:
    return [(unit.name, unit.params) for unit in model.units]


@pytest.mark.parametrize("kind", [kind for kind in FAMILIES if kind != "gpt2"])
def test_units_are_those_of_a_module(kind: str) -> None:
    config = small(kind)
    with torch.device("meta"):
        module = _Decoder(config)
    model = from_config(config)
    assert listed(model) == units_of(module)
    assert model.numel == sum(param.numel() for param in module.parameters())


def test_a_module_of_experts_is_a_mixture_too() -> None:
    config = small("mixtral")
    with torch.device("meta"):
        module = _Decoder(config)
    module.config = SimpleNamespace(**config)  # as transformers' models have it
    found, expected = model_spec(module, "mixtral"), from_config(config)
    assert found.mixture == expected.mixture
    assert {unit.name: unit.flops_per_token for unit in found.units} == {
        unit.name: unit.flops_per_token for unit in expected.units
    }


@pytest.mark.parametrize("kind", FAMILIES)
def test_units_are_those_of_transformers(kind: str) -> None:
    transformers = pytest.importorskip("transformers", minversion="5.0")
    config = transformers.AutoConfig.for_model(**small(kind))
    with torch.device("meta"):
        module = transformers.AutoModelForCausalLM.from_config(config)
    assert listed(from_config(small(kind))) == units_of(module)


@pytest.mark.parametrize("name", PAPER_MODELS)
def test_the_papers_models_are_those_of_the_example(name: str) -> None:
    """Shapes in the engine's order; the counts are 6.74, 13.02, 32.53 and 65.29 billion."""
    shape, model = PAPER_MODELS[name], named_model(name)
    config = LlamaConfig(vocab=32_000, dim=shape.hidden, layers=shape.layers, heads=shape.heads, ffn=shape.ffn)
    assert model.numel == parameter_count(config)
    assert model.layers == shape.layers
    with torch.device("meta"):
        module = Llama(LlamaConfig(vocab=32_000, dim=shape.hidden, layers=2, heads=shape.heads, ffn=shape.ffn))
    cut = [unit for unit in model.units if unit.layer is None or unit.layer < 2]
    expected = [[spec.shape for spec in specs] for _, specs in units_of(module)]
    assert [[param.shape for param in unit.params] for unit in cut] == expected
    assert [figures.sequence for figures in model.activations] == [2048, 4096]


def test_counts_of_the_papers_models() -> None:
    """In billions, as the paper's tables are reproduced with."""
    found = [round(named_model(name).numel / 1e9, 2) for name in ("llama-7b", "llama-13b", "llama-30b")]
    assert found == [6.74, 13.02, 32.53]


def test_a_file_a_folder_and_a_name_are_models(tmp_path: Path) -> None:
    folder = tmp_path / "my-llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    assert load_model(folder) == load_model(folder / "config.json") == read_config(folder / "config.json")
    assert load_model(folder).name == "my-llama"
    assert load_model("LLaMA-7B").name == "llama-7b"


def without(key: str) -> dict[str, Any]:
    return {name: value for name, value in LLAMA.items() if name != key}


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda path: None, "cannot be read"),
    "no JSON": (lambda path: path.write_text("{"), "is not JSON"),
    "a list": (lambda path: path.write_text("[]"), "holds a list"),
    "no model": (lambda path: path.write_text('{"a": 1}'), "'model_type'"),
    "unknown": (
        lambda path: path.write_text('{"model_type": "bert"}'),
        "'bert' is not known; known are llama, mistral",
    ),
    "no key": (lambda path: path.write_text(json.dumps(without("hidden_size"))), "key 'hidden_size' is missing"),
    "wrong type": (
        lambda path: path.write_text(json.dumps({**LLAMA, "vocab_size": "32k"})),
        "vocab_size must be a whole number of at least 1, not '32k'",
    ),
    "heads": (
        lambda path: path.write_text(json.dumps({**LLAMA, "num_attention_heads": 33})),
        "hidden_size 4096 is not divisible by num_attention_heads 33",
    ),
    "kv heads": (
        lambda path: path.write_text(json.dumps({**LLAMA, "num_key_value_heads": 5})),
        "num_attention_heads 32 is not divisible by num_key_value_heads 5",
    ),
    "flag": (
        lambda path: path.write_text(json.dumps({**LLAMA, "tie_word_embeddings": "no"})),
        "tie_word_embeddings must be true or false, not 'no'",
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_errors_name_the_file_and_the_key_in_one_line(what: str, tmp_path: Path) -> None:
    write, said = BROKEN[what]
    path = tmp_path / "config.json"
    write(path)
    with pytest.raises(SpecError) as caught:
        read_config(path)
    message = str(caught.value)
    assert str(path) in message and said in message and "\n" not in message


def test_an_unknown_name_lists_the_known() -> None:
    with pytest.raises(SpecError, match="llama-7b, llama-13b, llama-30b, llama-65b"):
        load_model("llama-8b")


def test_a_null_of_key_value_heads_is_no_default_of_the_family() -> None:
    """transformers takes num_attention_heads there, and its class's own number only where the key is absent."""
    config = {**small("mistral"), "num_attention_heads": 4}
    nulled = from_config({**config, "num_key_value_heads": None})
    assert nulled.numel == from_config({**config, "num_key_value_heads": 4}).numel
