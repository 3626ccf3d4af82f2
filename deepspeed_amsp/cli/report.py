"""``amsp report``: versions, and what a ds_config would do on a cluster; what to paste into an issue."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from pathlib import Path
from typing import Annotated, Any

import typer

from deepspeed_amsp.about import group_lines
from deepspeed_amsp.cli.options import fail
from deepspeed_amsp.cli.plan_inputs import InputError, read_existing, read_hostfile
from deepspeed_amsp.config import ConfigError, check_stage, preflight, read_block
from deepspeed_amsp.config_preflight import preflight_warnings
from deepspeed_amsp.plan.factors import FactorError
from deepspeed_amsp.plan.resolve import make_plan

PACKAGES = ("deepspeed_amsp", "deepspeed", "torch", "transformers", "accelerate", "lightning", "peft")
VARIABLES = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "NCCL_LAUNCH_ORDER_IMPLICIT", "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA",
             "GLOO_SOCKET_IFNAME", "DS_ACCELERATOR", "TORCH_EXTENSIONS_DIR")  # fmt: skip


def report(
    config: Annotated[Path | None, typer.Argument(help="A ds_config to check.")] = None,
    nodes: Annotated[int, typer.Option(min=1, help="Nodes of the cluster.")] = 1,
    gpus_per_node: Annotated[int, typer.Option(min=1, help="GPUs of each.")] = 8,
    hostfile: Annotated[Path | None, typer.Option(help="Instead of the two: DeepSpeed's hostfile.")] = None,
) -> None:
    """Versions and environment; with a ds_config its plan, its groups, and what is wrong or odd about it.

    The memory of a model under the plan: amsp plan --config FILE --model ... . Ends with 1 when the ds_config is wrong.
    """
    for line in (*versions(), *environment()):
        print(line)
    if config is None:
        return
    try:
        if hostfile is not None:
            nodes, gpus_per_node = read_hostfile(hostfile)
        for line in about_config(read_existing(config), nodes, gpus_per_node):
            print(line)
    except (InputError, ConfigError, FactorError) as error:
        fail("report", str(error), code=1)


def versions() -> Iterator[str]:
    """One line a package, the verdict on DeepSpeed's, and the accelerator."""
    yield f"python {platform.python_version()} on {platform.platform()}"
    for name in (*PACKAGES, *_nccl()):
        try:
            yield f"{name} {version(name)}"
        except PackageNotFoundError:
            yield f"{name} is not installed"
    try:
        from deepspeed.accelerator import get_accelerator

        from deepspeed_amsp import compat

        compat.check()
        accelerator = get_accelerator()
        backend = accelerator.communication_backend_name()
        yield f"accelerator {accelerator.device_name()}, {accelerator.device_count()} devices, backend {backend}"
    except ImportError as error:
        yield f"WARNING: {error}"


def _nccl() -> list[str]:
    """The packages by which torch brings NCCL, named after its CUDA."""
    return sorted(name for name in packages_distributions().get("nvidia", ()) if name.startswith("nvidia-nccl"))


def environment() -> Iterator[str]:
    """Variables that matter and are set."""
    found = [f"{name}={os.environ[name]}" for name in VARIABLES if name in os.environ]
    if found:
        yield f"environment: {' '.join(found)}"


def about_config(ds_config: dict[str, Any], nodes: int, gpus_per_node: int) -> Iterator[str]:
    """Plan, groups and warnings.

    Raises:
        ConfigError, FactorError: as the engine would.
    """
    preflight(ds_config, filled=False)
    block = read_block(ds_config)
    if block is None:
        yield 'no enabled "amsp" block: this is plain DeepSpeed'
        return
    per_node = block.topology.gpus_per_node or gpus_per_node
    world = nodes * gpus_per_node
    if block.sharding == "search":
        yield 'plan: "search": the planner takes the factors when the engine starts; ask it with amsp plan --config'
    else:
        plan = make_plan(block, world, per_node)
        check_stage(ds_config, plan.sharding.stage, plan.sharding.stage_reason)
        yield f"plan on {world // per_node} nodes of {per_node}: {plan.describe()}"
        yield from group_lines(plan.sharding, tuple(range(world)))
    for line in preflight_warnings(ds_config):
        yield f"WARNING: {line}"
