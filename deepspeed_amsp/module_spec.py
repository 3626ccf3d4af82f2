"""`ModelSpec` from a module: units as the engine makes them, and FLOPs. The module may be on the meta device."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from torch import nn

from deepspeed_amsp.partition.materialise import whole_shape
from deepspeed_amsp.partition.params import find_units
from deepspeed_amsp.plan.specs import Mixture, ModelSpec, SpecError, UnitSpec


def model_spec(module: nn.Module, name: str) -> ModelSpec:
    """Units as the engine makes them; FLOPs of a token as two for every element of a matrix, but for embeddings."""
    owners = dict(module.named_modules())
    listed, blocks = blocks_of(module)
    prefix = f"{listed}." if listed else ""
    units, experts = [], _experts(module)
    for members in find_units(module, lambda *_: None):
        rest = members.name.removeprefix(prefix)
        layer = int(rest.split(".")[0]) if blocks and members.name.startswith(prefix) else None
        frozen = [] if members.parameters[0].requires_grad else [spec.name for spec in members.specs]
        looked_up = isinstance(members.module, nn.Embedding | nn.EmbeddingBag)
        matrices = [spec.numel for spec in members.specs if len(spec.shape) > 1]
        flops = 0.0 if looked_up else 2.0 * sum(matrices)
        if experts is not None and "experts" in members.name.split("."):
            flops *= experts.part
        units.append(UnitSpec(members.name, members.specs, layer, flops, frozen=frozenset(frozen)))
    if not units:
        raise SpecError(f"model {name}: has no parameters.")
    units = _with_tied_heads(units, owners)
    hidden, vocab = _width(module, units)
    mixture = None if experts is None else Mixture(experts.active, experts.width)
    return ModelSpec(name, _with_attention(units, hidden, len(blocks)), hidden, vocab, mixture=mixture)


class _Experts(NamedTuple):
    """Of a mixture's layers: how many experts a token goes through, their width, and which part of all that is."""

    active: int
    width: int
    part: float


def _experts(module: nn.Module) -> _Experts | None:
    """By transformers' names in ``module.config``; None where it has none."""
    config = getattr(module, "config", None)
    count = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    active = getattr(config, "num_experts_per_tok", None)
    width = getattr(config, "moe_intermediate_size", None) or getattr(config, "intermediate_size", None)
    if not (isinstance(count, int) and isinstance(active, int) and isinstance(width, int) and 0 < active <= count):
        return None
    return _Experts(active, width, active / count)


def blocks_of(module: nn.Module) -> tuple[str, list[nn.Module]]:
    """Name and members of the ModuleList with most parameters, of which all members are of one class."""
    best: tuple[int, str, list[nn.Module]] = (0, "", [])
    for name, part in module.named_modules():
        members = list(part.children()) if isinstance(part, nn.ModuleList) else []
        if members and len({type(member) for member in members}) == 1:
            size = sum(whole_shape(p).numel() for p in part.parameters())
            if size > best[0]:
                best = (size, name, members)
    return best[1], best[2]


def _with_tied_heads(units: list[UnitSpec], modules: dict[str, nn.Module]) -> list[UnitSpec]:
    """The product of a Linear whose weight belongs to another unit is counted at the last unit before it."""
    seen: dict[int, str] = {}
    order = {unit.name: index for index, unit in enumerate(units)}
    last = 0
    for name, part in modules.items():
        last = order.get(name, last)
        weight = getattr(part, "weight", None) if isinstance(part, nn.Linear) else None
        if weight is not None and id(weight) in seen and name not in order:
            flops = units[last].flops_per_token + 2.0 * whole_shape(weight).numel()
            units[last] = replace(units[last], flops_per_token=flops)
        for param in part.parameters(recurse=False):
            seen.setdefault(id(param), name)
    return units


def _width(module: nn.Module, units: list[UnitSpec]) -> tuple[int, int]:
    """(hidden, vocab): of the first embedding, else of the first matrix."""
    for part in module.modules():
        if isinstance(part, nn.Embedding):
            return part.embedding_dim, part.num_embeddings
    shapes = [spec.shape for unit in units for spec in unit.params]
    matrix = next((shape for shape in shapes if len(shape) > 1), None)
    return (matrix[1], matrix[0]) if matrix is not None else (max(shape[0] for shape in shapes if shape), 1)


def _with_attention(units: list[UnitSpec], hidden: int, blocks: int) -> tuple[UnitSpec, ...]:
    """Softmax attention is taken to be in every block that has an "attn" or "attention", once, ``hidden`` wide."""
    found: set[int] = set()
    result = []
    for unit in reversed(units):
        matrix = any(len(spec.shape) > 1 for spec in unit.params)
        last = unit.layer is not None and unit.layer not in found and matrix and "att" in unit.name.lower()
        if blocks and unit.layer is not None and last:
            found.add(unit.layer)
        result.append(replace(unit, attention_width=hidden) if last else unit)
    return tuple(reversed(result))
