"""The plan that wrote a checkpoint, kept beside it, so that another plan is refused in a sentence."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from deepspeed_amsp.plan.layout import LayoutError
from deepspeed_amsp.plan.resolve import Plan
from deepspeed_amsp.topology import LEAF_KEY

PLAN_FILE = "amsp_plan.json"
_MUST_MATCH = ("world_size", "data_parallel", "sharding")


def write_plan(folder: str, plan: Plan) -> None:
    """Write the plan's fingerprint into a checkpoint's folder; one rank calls it."""
    with open(os.path.join(folder, PLAN_FILE), "w", encoding="utf-8") as file:
        json.dump(plan.fingerprint(), file, indent=2)


def check_written_plan(load_dir: str, tag: str | None, plan: Plan) -> None:
    """Do nothing when there is nothing to load: DeepSpeed then warns and returns None.

    Raises:
        LayoutError: the checkpoint was written without an amsp engine, or by a plan that cuts otherwise.
    """
    tag = tag if tag is not None else _latest_tag(load_dir)
    if tag is None:
        return
    folder = os.path.join(load_dir, str(tag))
    path = os.path.join(folder, PLAN_FILE)
    if not os.path.isdir(folder):
        raise FileNotFoundError(f"no such checkpoint: {os.path.abspath(folder)}")
    if not os.path.isfile(path):
        raise LayoutError(
            f"{folder} holds no {PLAN_FILE}: it is no checkpoint that an amsp engine wrote. Load it with the "
            f"engine that wrote it"
        )
    with open(path, encoding="utf-8") as file:
        written = json.load(file)
    mine = plan.fingerprint()
    if any(written[key] != mine[key] for key in _MUST_MATCH):
        raise LayoutError(
            f"the checkpoint was written by plan {_factors(written)} and cannot be loaded by plan "
            f"{_factors(mine)}: run with the plan and world size that wrote it"
        )
    if _nodes(written) != _nodes(mine):
        raise LayoutError(
            f"the checkpoint was written with the nodes in the order {_nodes(written)} and cannot be loaded with the "
            f"order {_nodes(mine)}: run with the {LEAF_KEY} that wrote it, or on hosts that give the same order"
        )


def _latest_tag(load_dir: str) -> str | None:
    path = os.path.join(load_dir, "latest")
    if not os.path.isfile(path):
        return None
    with open(path, encoding="utf-8") as file:
        return file.read().strip()


def _nodes(fingerprint: Mapping[str, Any]) -> list[int]:
    """The node order; plans that know none have that of the ranks."""
    return list(fingerprint.get("node_order", range(fingerprint["data_parallel"][1])))


def _factors(fingerprint: Mapping[str, Any]) -> str:
    return f"{fingerprint['sharding']} on {fingerprint['world_size']} ranks {fingerprint['data_parallel']}"
