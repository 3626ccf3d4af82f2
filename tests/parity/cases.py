"""The parity matrix: every legal triple on each cluster shape, with modes that cover every pair of choices."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from deepspeed_amsp.plan.factors import ShardFactor, Sharding, enumerate_shardings
from tests.support.jobs import Case

NIGHTLY = os.environ.get("AMSP_NIGHTLY") == "1"
CLUSTERS = {4: [(2, 2), (4, 1)], 8: [(4, 2), (2, 4)]}
"""World size -> (gpus per node, nodes)."""

# Rows of a two-level orthogonal array of strength 2 in seven factors: any two columns show all four pairs.
_ROWS = [(row >> 2 & 1, row >> 1 & 1, row & 1) for row in range(8)]
CHOICES: dict[str, tuple[Any, Any]] = {
    "reduce": ("two_level", "all_reduce"),
    "publish": ("broadcast", "all_gather"),
    "micro_batches": (3, 1),
    "clip": (0.4, 0.0),
    "optimizer": ("adamw", "sgd"),
    "adversarial": (True, False),
    "model": ("mlp", "attention"),
}


def _row(index: int) -> dict[str, Any]:
    a, b, c = _ROWS[index]
    columns = (a, b, c, a ^ b, a ^ c, b ^ c, a ^ b ^ c)
    return {name: values[bit] for (name, values), bit in zip(CHOICES.items(), columns, strict=True)}


def _opposite(row: dict[str, Any]) -> dict[str, Any]:
    """The other value of every choice: with its row it gives a triple both values of each."""
    return {name: values[1 - values.index(row[name])] for name, values in CHOICES.items()}


def case_for(sharding: Sharding, choices: dict[str, Any], **overrides: Any) -> Case:
    """A training run of ``sharding`` with several small buckets."""
    amsp = {
        "sharding": sharding.as_dict(),
        "reduce": choices["reduce"],
        "publish": choices["publish"],
        "bucket_bytes": 1200,
        "topology": {"gpus_per_node": sharding.data_parallel.s0},
    }
    rest = {key: value for key, value in choices.items() if key not in ("reduce", "publish")}
    return Case(amsp=amsp, stage=sharding.stage, **{**rest, **overrides})


def matrix(world_size: int) -> Iterator[tuple[str, Sharding, Case]]:
    """(label, sharding, case): every legal triple, twice, with a row of the array and its opposite."""
    for gpus_per_node, nodes in CLUSTERS[world_size]:
        shardings = enumerate_shardings(ShardFactor(gpus_per_node, nodes))
        for number, sharding in enumerate(shardings):
            row = _row(number % 8)
            # On eight ranks a run is four times as dear: there the normal suite takes one of the two, array by array.
            rows = (row, _opposite(row))
            for choices in rows if world_size == 4 or NIGHTLY else rows[number // 8 % 2 :][:1]:
                label = f"{sharding} {' '.join(str(value) for value in choices.values())}".replace(" | ", "-")
                yield label, sharding, case_for(sharding, choices)
