"""Put what the ranks report back together, and check on the way that replicas are equal bit by bit."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from tests.support.jobs import Report


def assert_replicas_equal(reports: Sequence[Report]) -> None:
    """Working copies with the same ``param`` coordinate, and masters of the same piece, are bit-equal."""
    by_coordinate: dict[int, Report] = {}
    masters: dict[tuple[str, int, int], torch.Tensor] = {}
    for rank, report in enumerate(reports):
        first = by_coordinate.setdefault(report.coordinates[-1], report)
        for mine, theirs in ((report.parameters, first.parameters), (report.shards, first.shards)):
            assert mine.keys() == theirs.keys()
            for name, value in mine.items():
                assert torch.equal(value, theirs[name]), f"rank {rank}: {name} differs from its replica"
        for piece, value in report.masters.items():
            assert torch.equal(value, masters.setdefault(piece, value)), f"rank {rank}: master of {piece} differs"


def whole_masters(reports: Sequence[Report], model: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter's master from its owners' pieces; each element must be owned somewhere."""
    merged = {name: torch.full((p.numel(),), float("nan")) for name, p in model.named_parameters()}
    for report in reports:
        for (name, start, stop), value in report.masters.items():
            merged[name][start:stop] = value
    for name, value in merged.items():
        assert not value.isnan().any(), f"some elements of {name} have no owner"
    return {name: merged[name].view(p.shape) for name, p in model.named_parameters()}


def working_copies(reports: Sequence[Report], model: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter's working copy, from rank 0 or from the shards of the ``param`` axis."""
    if reports[0].parameters:
        return dict(reports[0].parameters)
    shards = {report.coordinates[-1]: report.shards for report in reports}
    flats = {key: torch.cat([shards[coordinate][key] for coordinate in sorted(shards)]) for key in reports[0].shards}
    names: dict[str, list[tuple[str, nn.Parameter]]] = {}
    seen: set[int] = set()
    for module_name, module in model.named_modules():
        for name, param in module.named_parameters(recurse=False):
            if id(param) not in seen:
                seen.add(id(param))
                full = f"{module_name}.{name}" if module_name else name
                names.setdefault(module_name or type(model).__name__, []).append((full, param))
    result = {}
    for key, flat in flats.items():
        offset = 0
        for full, param in names[key.split(":", 1)[1]]:
            result[full] = flat[offset : offset + param.numel()].view(param.shape)
            # Parameters start at multiples of 8 elements in a sharded unit (plan.layout.ALIGNMENT).
            offset += -(-param.numel() // 8) * 8
    return result
