"""`ModelSpec` from a Hugging Face config.json or from a name of the paper's models, in pure Python.

Units are what the engine makes of the module that transformers builds from the config: one for every module with
parameters of its own, in the order in which it registers them, with its names and shapes (transformers 5, where the
experts of a mixture are stacked). In a block of the LLaMA kind that is attention, feed-forward layer, norms.

FLOPs of a token are two for every element of a matrix that multiplies it: none for an embedding, those of the experts
that are active for a mixture. A tied head has no parameters, so its product is counted at the final norm before it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from deepspeed_amsp.plan.layout import ParamSpec
from deepspeed_amsp.plan.probed import PROBED
from deepspeed_amsp.plan.specs import Mixture, ModelSpec, SpecError, UnitSpec

Config = Mapping[str, Any]

PAPER_VOCAB = 32_000


@dataclass(frozen=True)
class _Shape:
    """A LLaMA by its sizes."""

    layers: int
    hidden: int
    ffn: int
    heads: int


PAPER_MODELS: dict[str, _Shape] = {
    "llama-7b": _Shape(32, 4096, 11_008, 32),
    "llama-13b": _Shape(40, 5120, 13_824, 40),
    "llama-30b": _Shape(60, 6656, 17_920, 52),
    "llama-65b": _Shape(80, 8192, 22_016, 64),
}
"""The models of the paper (arXiv 2311.00257, Table III; sizes of LLaMA, arXiv 2302.13971, Table 2)."""


def load_model(name_or_path: str | Path) -> ModelSpec:
    """A model by its name in PAPER_MODELS, or by the path of a config.json or of the folder that has it.

    Raises:
        SpecError: there is neither such a name nor such a file, or the file is not the config of a known model.
    """
    text = str(name_or_path)
    if text.lower() in PAPER_MODELS:
        return named_model(text)
    path = Path(text)
    if path.is_dir():
        path = path / "config.json"
    if not path.exists() and path.suffix != ".json" and "/" not in text:
        raise SpecError(
            f"model {text!r} is neither a file nor a known name; the names are {', '.join(PAPER_MODELS)}, and any "
            f"Hugging Face config.json will do."
        )
    return read_config(path)


def named_model(name: str) -> ModelSpec:
    """One of PAPER_MODELS, with activations as probed. Units stand in forward order, norms before what they feed.

    Raises:
        SpecError: the name is not known.
    """
    shape = PAPER_MODELS.get(name.lower())
    if shape is None:
        raise SpecError(f"model {name!r} is not known; the names are {', '.join(PAPER_MODELS)}.")
    config = {
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "vocab_size": PAPER_VOCAB,
    }
    model = from_config(config, name.lower())
    units = [unit for unit in model.units if unit.layer is None]
    for layer in range(shape.layers):
        *rest, before_attention, before_ffn = [unit for unit in model.units if unit.layer == layer]
        units[-2:-2] = [before_attention, *rest[:4], before_ffn, *rest[4:]]
    return replace(model, units=tuple(units), activations=PROBED[name.lower()])


def read_config(path: str | Path) -> ModelSpec:
    """A model by its config.json.

    Raises:
        SpecError: the file is missing, is not JSON, or is not the config of a known model.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not a text"
        raise SpecError(f"{path}: cannot be read: {reason}.") from error
    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        raise SpecError(f"{path}: is not JSON: {error}.") from error
    if not isinstance(config, dict):
        raise SpecError(f"{path}: is not the config of a model: it holds a {type(config).__name__}, not an object.")
    return from_config(config, str(path))


def from_config(config: Config, source: str = "config") -> ModelSpec:
    """A model by the contents of a config.json.

    Args:
        source: what errors name as the place of a wrong key, and the model's name if the config has none.

    Raises:
        SpecError: a key is missing or wrong, or the model_type is not known.
    """
    kind = config.get("model_type")
    if kind is None:
        raise SpecError(f"{source}: is not the config of a model: it has no key 'model_type'.")
    if kind not in FAMILIES:
        raise SpecError(f"{source}: model_type {kind!r} is not known; known are {', '.join(FAMILIES)}.")
    read = _Reader(config, source)
    return replace(FAMILIES[kind](read), name=_name(config, source))


def _name(config: Config, source: str) -> str:
    """What the config calls itself, else the folder that it lies in."""
    given = config.get("_name_or_path")
    if isinstance(given, str) and given:
        return given
    path = Path(source)
    return path.parent.name or path.stem if path.suffix == ".json" else source


@dataclass(frozen=True)
class _Reader:
    """Reads keys and names file and key in errors."""

    config: Config
    source: str

    def size(self, key: str, default: int | None = None) -> int:
        """A whole number of at least 1; an absent key or null gives the default."""
        value = self.config.get(key)
        if value is None:
            if default is None:
                raise SpecError(f"{self.source}: key {key!r} is missing.")
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise SpecError(f"{self.source}: {key} must be a whole number of at least 1, not {value!r}.")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.config.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise SpecError(f"{self.source}: {key} must be true or false, not {value!r}.")
        return value

    def divides(self, part: str, whole: str, part_value: int, whole_value: int) -> None:
        if whole_value % part_value:
            raise SpecError(f"{self.source}: {whole} {whole_value} is not divisible by {part} {part_value}.")


def _linear(name: str, rows: int, columns: int, bias: bool, layer: int | None, attention: int = 0) -> UnitSpec:
    """nn.Linear: weight [rows, columns], bias [rows]."""
    params = [ParamSpec(f"{name}.weight", (rows, columns))]
    if bias:
        params.append(ParamSpec(f"{name}.bias", (rows,)))
    return UnitSpec(name, tuple(params), layer, 2.0 * rows * columns, attention)


def _vector(name: str, size: int, layer: int | None, bias: bool = False) -> UnitSpec:
    """A norm: weight [size] and, of a LayerNorm, bias [size]."""
    keys = ("weight", "bias") if bias else ("weight",)
    return UnitSpec(name, tuple(ParamSpec(f"{name}.{key}", (size,)) for key in keys), layer)


def _embedding(name: str, rows: int, columns: int) -> UnitSpec:
    """A table that is looked up, which is no product."""
    return UnitSpec(name, (ParamSpec(f"{name}.weight", (rows, columns)),))


@dataclass(frozen=True)
class _Features:
    """In which modules a family of the LLaMA kind differs, and its defaults for keys that a config leaves out.

    qkv_bias, o_bias: None where the config says so (attention_bias).
    """

    qkv_bias: bool | None = False
    o_bias: bool | None = False
    mlp_bias: bool = False
    head_norms: bool = False
    experts: bool = False
    kv_heads: int | None = None
    head_dim: int | None = None


def _llama_kind(features: _Features) -> Callable[[_Reader], ModelSpec]:
    """A decoder with RMS norms, rotary positions and gated feed-forward layers."""

    def build(read: _Reader) -> ModelSpec:
        hidden, vocab = read.size("hidden_size"), read.size("vocab_size")
        layers = read.size("num_hidden_layers")
        units = [_embedding("model.embed_tokens", vocab, hidden)]
        for layer in range(layers):
            at = f"model.layers.{layer}"
            units += _attention(read, features, at, layer)
            units += _experts(read, at, layer) if features.experts else _ffn(read, features, at, layer)
            units += [
                _vector(f"{at}.{norm}", hidden, layer) for norm in ("input_layernorm", "post_attention_layernorm")
            ]
        units += _end(read, _vector("model.norm", hidden, None), hidden, vocab, tied=False)
        mixture = Mixture(_active(read), read.size("intermediate_size")) if features.experts else None
        return ModelSpec(str(read.config["model_type"]), tuple(units), hidden, vocab, mixture=mixture)

    return build


def _end(read: _Reader, norm: UnitSpec, hidden: int, vocab: int, tied: bool) -> list[UnitSpec]:
    """The final norm and the head; ``tied`` is the family's default."""
    head = _linear("lm_head", vocab, hidden, False, None)
    if read.flag("tie_word_embeddings", tied):
        return [replace(norm, flops_per_token=head.flops_per_token)]
    return [norm, head]


def _attention(read: _Reader, features: _Features, at: str, layer: int) -> Iterator[UnitSpec]:
    hidden, heads = read.size("hidden_size"), read.size("num_attention_heads")
    if read.config.get("head_dim") is None and features.head_dim is None:
        read.divides("num_attention_heads", "hidden_size", heads, hidden)
    head_dim = read.size("head_dim", features.head_dim or hidden // heads)
    # Absent is the class's default; a null that is written, as many as there are heads.
    said_null = "num_key_value_heads" in read.config
    kv_heads = read.size("num_key_value_heads", heads if said_null else features.kv_heads or heads)
    read.divides("num_key_value_heads", "num_attention_heads", kv_heads, heads)
    said = read.flag("attention_bias", False)
    qkv_bias = said if features.qkv_bias is None else features.qkv_bias
    o_bias = said if features.o_bias is None else features.o_bias
    for name, count in (("q_proj", heads), ("k_proj", kv_heads), ("v_proj", kv_heads)):
        yield _linear(f"{at}.self_attn.{name}", count * head_dim, hidden, qkv_bias, layer)
    width = heads * head_dim
    yield _linear(f"{at}.self_attn.o_proj", hidden, width, o_bias, layer, attention=width)
    if features.head_norms:
        yield from (_vector(f"{at}.self_attn.{norm}", head_dim, layer) for norm in ("q_norm", "k_norm"))


def _ffn(read: _Reader, features: _Features, at: str, layer: int) -> list[UnitSpec]:
    hidden, ffn = read.size("hidden_size"), read.size("intermediate_size")
    bias = features.mlp_bias and read.flag("mlp_bias", False)
    return [
        _linear(f"{at}.mlp.gate_proj", ffn, hidden, bias, layer),
        _linear(f"{at}.mlp.up_proj", ffn, hidden, bias, layer),
        _linear(f"{at}.mlp.down_proj", hidden, ffn, bias, layer),
    ]


def _active(read: _Reader) -> int:
    """Experts that a token goes through."""
    return read.size("num_experts_per_tok", 2)


def _experts(read: _Reader, at: str, layer: int) -> list[UnitSpec]:
    """A router and stacked experts, of which a token uses num_experts_per_tok."""
    hidden, ffn = read.size("hidden_size"), read.size("intermediate_size")
    experts, active = read.size("num_local_experts", 8), _active(read)
    if active > experts:
        raise SpecError(f"{read.source}: num_experts_per_tok {active} is more than num_local_experts {experts}.")
    stacked = (
        ParamSpec(f"{at}.mlp.experts.gate_up_proj", (experts, 2 * ffn, hidden)),
        ParamSpec(f"{at}.mlp.experts.down_proj", (experts, hidden, ffn)),
    )
    return [
        _linear(f"{at}.mlp.gate", experts, hidden, False, layer),
        UnitSpec(f"{at}.mlp.experts", stacked, layer, 2.0 * active * 3 * hidden * ffn),
    ]


def _gpt2(read: _Reader) -> ModelSpec:
    """Learned positions, LayerNorms, fused q, k and v; weights [in, out], as its Conv1D has them."""
    hidden, vocab, heads = read.size("n_embd", 768), read.size("vocab_size", 50_257), read.size("n_head", 12)
    read.divides("n_head", "n_embd", heads, hidden)
    inner = read.size("n_inner", 4 * hidden)
    units = [
        _embedding("transformer.wte", vocab, hidden),
        _embedding("transformer.wpe", read.size("n_positions", 1024), hidden),
    ]

    def conv(name: str, into: int, out: int, layer: int, attention: int = 0) -> UnitSpec:
        params = (ParamSpec(f"{name}.weight", (into, out)), ParamSpec(f"{name}.bias", (out,)))
        return UnitSpec(name, params, layer, 2.0 * into * out, attention)

    for layer in range(read.size("n_layer", 12)):
        at = f"transformer.h.{layer}"
        units += [
            _vector(f"{at}.ln_1", hidden, layer, bias=True),
            conv(f"{at}.attn.c_attn", hidden, 3 * hidden, layer),
            conv(f"{at}.attn.c_proj", hidden, hidden, layer, attention=hidden),
            _vector(f"{at}.ln_2", hidden, layer, bias=True),
            conv(f"{at}.mlp.c_fc", hidden, inner, layer),
            conv(f"{at}.mlp.c_proj", inner, hidden, layer),
        ]
    units += _end(read, _vector("transformer.ln_f", hidden, None, bias=True), hidden, vocab, tied=True)
    return ModelSpec("gpt2", tuple(units), hidden, vocab)


FAMILIES: dict[str, Callable[[_Reader], ModelSpec]] = {
    "llama": _llama_kind(_Features(qkv_bias=None, o_bias=None, mlp_bias=True)),
    "mistral": _llama_kind(_Features(kv_heads=8)),
    "qwen2": _llama_kind(_Features(qkv_bias=True, kv_heads=32)),
    "qwen3": _llama_kind(_Features(qkv_bias=None, o_bias=None, head_norms=True, kv_heads=32, head_dim=128)),
    "gpt2": _gpt2,
    "mixtral": _llama_kind(_Features(experts=True, kv_heads=8)),
}
"""model_type -> what builds the spec. Defaults are those of the family's class in transformers 5."""
