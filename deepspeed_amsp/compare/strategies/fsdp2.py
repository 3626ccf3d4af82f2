"""torch's fully_shard: over all ranks, or within a node with replicas across nodes (HSDP)."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.utils import clip_grad_norm_

from deepspeed_amsp.compare import results
from deepspeed_amsp.compare.strategies.base import Held, Work, adamw, storage_bytes

_MESHES: dict[str, DeviceMesh] = {}
"""Process groups of a launch; every round uses the same."""


class FSDP2:
    """fp32 shards, gathered and reduced in bf16. Blocks are units, and what is left is one, too."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._replicated = work.strategy.name == results.HSDP
        built = work.model()
        model = built.module.to(work.device)
        mesh = _mesh(work)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
        for block in built.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
        self._model: FSDPModule = fully_shard(model, mesh=mesh, mp_policy=policy)
        self._shards = list(model.parameters())
        self._optimizer = adamw(self._shards, work.config.training.lr)

    def forward(self, batch: torch.Tensor, last: bool) -> torch.Tensor:
        if self._replicated:
            # Shards are reduced in the node every time, but replicas only once a step, as its documentation says.
            self._model.set_requires_all_reduce(last)
        return self._model(batch)  # type: ignore[operator]

    def backward(self, loss: torch.Tensor, last: bool) -> None:
        (loss / self._work.micro_batches).backward()

    def step(self, last: bool) -> None:
        if last:
            clip_grad_norm_(self._shards, self._work.config.training.clipping)
            self._optimizer.step()
            self._optimizer.zero_grad()

    def settle(self) -> None:
        return

    def held(self) -> Held:
        return Held(
            storage_bytes(self._shards),
            storage_bytes(param.grad for param in self._shards),
            storage_bytes(value for state in self._optimizer.state.values() for value in state.values()),
        )

    def close(self) -> None:
        del self._model, self._optimizer, self._shards


def _mesh(work: Work) -> DeviceMesh:
    cluster = work.config.cluster
    if work.strategy.name not in _MESHES:
        hybrid = work.strategy.name == results.HSDP
        shape = (cluster.nodes, cluster.ranks_per_node) if hybrid else (cluster.world_size,)
        names = ("replicate", "shard") if hybrid else ("shard",)
        _MESHES[work.strategy.name] = init_device_mesh(work.device.type, shape, mesh_dim_names=names)
    return _MESHES[work.strategy.name]
