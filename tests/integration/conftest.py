"""Pools whose workers are forked from a parent that has imported the frameworks, once for all tests here."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec

import pytest

from tests.support import pool as pool_module

FRAMEWORKS = {
    "transformers": ["transformers", "transformers.trainer", "transformers.models.llama.modeling_llama"],
    "accelerate": ["accelerate"],
    "peft": ["peft"],
    "lightning": ["lightning.pytorch"],
}


@pytest.fixture(scope="package")
def workers() -> Iterator[Callable[[int], pool_module.WorkerPool]]:
    """``workers(world_size)``: one pool of each size for all integration tests."""
    os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    for package, modules in FRAMEWORKS.items():
        if find_spec(package) is not None:
            for module in modules:
                import_module(module)
    made: dict[int, pool_module.WorkerPool] = {}

    def of_size(world_size: int) -> pool_module.WorkerPool:
        if world_size not in made or not made[world_size].alive:
            made[world_size] = pool_module.fresh(world_size)
        return made[world_size]

    yield of_size
    for workers_of_size in made.values():
        workers_of_size.close()
