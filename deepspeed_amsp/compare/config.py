"""The file that `amsp compare` reads: what is trained, where, by which strategies. Pure: no torch.

Everything that can be wrong is found here, before a process is started; each problem is one line that names the key.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from deepspeed_amsp.compare.catalog import CatalogError, Strategy, built_in, from_block

Count = Annotated[int, Field(strict=True, ge=1)]
Rate = Annotated[float, Field(ge=1, le=1e6)]
Milliseconds = Annotated[float, Field(ge=0, le=60_000)]
Above0 = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Number = TypeVar("Number", int, float)


class CompareConfigError(ValueError):
    """A comparison that cannot be run as it is written; the message is one line."""


def distinct(values: tuple[Number, ...]) -> tuple[Number, ...]:
    """The values of a key each of which is a setting of its own. Raises ValueError."""
    if len(set(values)) < len(values):
        raise ValueError("a value is listed more than once")
    return values


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class LlamaBlock(_Frozen):
    """Shape of the built-in LLaMA, see `llama.LlamaConfig`; the defaults make 13.8M parameters."""

    vocab: Count = 256
    dim: Count = 448
    layers: Count = 6
    heads: Count = 7
    kv_heads: Count | None = None
    ffn: Count = 1088
    recompute: bool = False

    @model_validator(mode="after")
    def _shape(self) -> LlamaBlock:
        if self.dim % self.heads or (self.dim // self.heads) % 2:
            raise ValueError(f"dim must be an even multiple of heads, not {self.dim} and {self.heads}")
        if self.heads % (self.kv_heads or self.heads):
            raise ValueError(f"heads must be a multiple of kv_heads, not {self.heads} and {self.kv_heads}")
        return self


class ModelBlock(_Frozen):
    """One of: llama, a shape; hf, the path of a Hugging Face config.json (needs transformers); factory,
    "module:function" that returns a module whose forward takes windows [batch, sequence + 1] of tokens below
    ``vocab`` and returns the loss."""

    llama: LlamaBlock | None = None
    hf: str | None = None
    factory: Annotated[str | None, Field(pattern=r"^[\w.]+:\w+$")] = None
    vocab: Count | None = None
    sequence: Count = 64
    micro_batch: Count = 1

    @model_validator(mode="after")
    def _one(self) -> ModelBlock:
        named = [name for name in ("llama", "hf", "factory") if getattr(self, name) is not None]
        if len(named) > 1:
            raise ValueError(f"name one of llama, hf and factory, not {' and '.join(named)}")
        if self.factory is not None and self.vocab is None:
            raise ValueError("factory needs vocab: the tokens are drawn below it")
        return self

    @property
    def shape(self) -> LlamaBlock:
        """The built-in model's, where neither of the others is named."""
        return self.llama or LlamaBlock()


class TrainingBlock(_Frozen):
    """The same for all: AdamW (fused), gradient norm clipped explicitly, bf16 with fp32 masters."""

    lr: Above0 = 3e-4
    clipping: Above0 = 1.0
    seed: Annotated[int, Field(ge=0)] = 1


class ClusterBlock(_Frozen):
    """nodes of ranks_per_node ranks. Rates in Mbit/s, used where the cluster is emulated: of every NIC (each value
    is measured), within a node (null: no limit), and of the link between the two halves of the nodes (null: none).

    emulate: "auto" takes the plain loopback where the machine cannot; "always" is an error there; "never".
    """

    nodes: Count = 2
    ranks_per_node: Count = 2
    nic_mbit: Annotated[tuple[Rate, ...], Field(min_length=1)] = (500.0,)
    lo_mbit: Rate | None = None
    spine_mbit: Rate | None = None
    emulate: Literal["auto", "always", "never"] = "auto"

    @field_validator("nic_mbit")
    @classmethod
    def _different(cls, values: tuple[float, ...]) -> tuple[float, ...]:
        return distinct(values)

    @property
    def world_size(self) -> int:
        """Ranks of all nodes."""
        return self.nodes * self.ranks_per_node


class ComputeBlock(_Frozen):
    """Milliseconds that every block of the model takes more, on CPUs; backward null: twice the forward."""

    forward_ms: Milliseconds = 40.0
    backward_ms: Milliseconds | None = None


class AmspEntry(_Frozen):
    """A strategy of our engine: its name in all tables, the amsp block, a title for people."""

    name: str
    amsp: dict[str, Any]
    title: str | None = None


class CompareConfig(_Frozen):
    """A whole comparison.

    micro_batches: values of M; each is measured. rounds: how often everything is; a round trains ``warm_up`` and
    then ``steps`` steps. loss_tolerance: see `results.Setup`. bucket_bytes: of gradients and updates, for every
    strategy that has buckets. row_timeout_s: after which a row counts as hung.
    """

    model: ModelBlock = ModelBlock()
    training: TrainingBlock = TrainingBlock()
    cluster: ClusterBlock = ClusterBlock()
    compute: ComputeBlock = ComputeBlock()
    micro_batches: Annotated[tuple[Count, ...], Field(min_length=1)] = (1,)
    rounds: Count = 3
    steps: Count = 3
    warm_up: Count = 1
    loss_tolerance: Above0 = 0.003
    bucket_bytes: Count = 2_400_000
    row_timeout_s: Above0 = 120.0
    fair_reduce_scatter: bool = True
    strategies: Annotated[tuple[str | AmspEntry, ...], Field(min_length=1)]
    out: str = "runs/compare"

    @field_validator("micro_batches")
    @classmethod
    def _different(cls, values: tuple[int, ...]) -> tuple[int, ...]:
        return distinct(values)

    @field_validator("strategies")
    @classmethod
    def _distinct(cls, entries: tuple[str | AmspEntry, ...]) -> tuple[str | AmspEntry, ...]:
        names = [entry if isinstance(entry, str) else entry.name for entry in entries]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"{', '.join(twice)} is listed more than once")
        return entries

    def resolved(self) -> list[Strategy]:
        """The strategies, checked against the cluster.

        Raises:
            CompareConfigError: one is unknown, or cannot use this world.
        """
        shape = (self.cluster.ranks_per_node, self.cluster.nodes)
        try:
            return [
                built_in(entry, shape)
                if isinstance(entry, str)
                else from_block(entry.name, entry.title, entry.amsp, shape)
                for entry in self.strategies
            ]
        except CatalogError as error:
            raise CompareConfigError(f"strategies: {error}") from error

    def as_json(self) -> dict[str, Any]:
        """With every default, for results.jsonl and for the ranks."""
        return self.model_dump(mode="json")


def load(path: Path) -> CompareConfig:
    """Read and check a file.

    Raises:
        CompareConfigError: there is none, it is no YAML, or a key or value is wrong.
    """
    import yaml  # here: ranks read the config as JSON, and need no YAML

    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CompareConfigError(f"{path}: no such file") from error
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise CompareConfigError(f"{path}: cannot be read: {' '.join(str(error).split())}") from error
    return check(values, str(path))


def check(values: Any, source: str) -> CompareConfig:
    """The values of a file. Raises CompareConfigError that starts with ``source``."""
    if not isinstance(values, Mapping):
        raise CompareConfigError(f"{source}: must be a mapping with strategies, not {values!r:.60}")
    try:
        config = CompareConfig.model_validate(dict(values))
        config.resolved()
    except ValidationError as error:
        raise CompareConfigError(f"{source}: {_reason(_first(error.errors()))}") from error
    except CompareConfigError as error:
        raise CompareConfigError(f"{source}: {error}") from error
    return config


def only(config: CompareConfig, wanted: list[str]) -> CompareConfig:
    """The comparison with these strategies alone.

    Raises:
        CompareConfigError: one of them is not in it.
    """
    entries = {entry if isinstance(entry, str) else entry.name: entry for entry in config.strategies}
    for name in wanted:
        if name not in entries:
            raise CompareConfigError(f"--only {name}: not in this comparison{nearest(name, list(entries))}")
    return config.model_copy(update={"strategies": tuple(entry for name, entry in entries.items() if name in wanted)})


def nearest(word: str, legal: list[str]) -> str:
    """A hint to end a message with."""
    close = difflib.get_close_matches(word, legal, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else f"; legal: {', '.join(legal)}"


_MODELS: dict[tuple[str, ...], type[BaseModel]] = {
    (): CompareConfig,
    ("model",): ModelBlock,
    ("model", "llama"): LlamaBlock,
    ("training",): TrainingBlock,
    ("cluster",): ClusterBlock,
    ("compute",): ComputeBlock,
    ("strategies", "AmspEntry"): AmspEntry,
}


def _first(errors: list[Any]) -> Any:
    """The complaint to show. A strategy may be a name or an entry: of a mapping, what is wrong as an entry."""
    as_names = [error for error in errors if error["loc"][-1:] == ("str",) and isinstance(error["input"], Mapping)]
    return next(error for error in errors if error not in as_names)


def _reason(error: Any) -> str:
    """pydantic's first complaint in our words."""
    where = ".".join(str(part) for part in error["loc"] if part not in ("AmspEntry", "str"))
    if error["type"] == "extra_forbidden":
        parent = tuple(part for part in error["loc"][:-1] if isinstance(part, str))
        return f"{where}: unknown key{nearest(str(error['loc'][-1]), list(_MODELS[parent].model_fields))}"
    if error["type"] == "missing":
        return f"{where}: missing"
    message = str(error.get("ctx", {}).get("error", error["msg"]))
    return f"{where}: {message[0].lower()}{message[1:]}, not {error['input']!r:.80}" if where else message
