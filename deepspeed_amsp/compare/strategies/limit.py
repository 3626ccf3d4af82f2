"""The same work without communication: what no strategy can beat by overlapping."""

from __future__ import annotations

import os

import torch

from deepspeed_amsp.compare.strategies.base import Masters, OnMasters, Work


class Limit(OnMasters):
    """Gradients stay local, and this rank updates what an owner within a node would: 1/R of the parameters.

    Weights of other owners stay as they were, so its losses mean nothing.
    """

    def __init__(self, work: Work) -> None:
        model = work.model().module.to(work.device, torch.bfloat16)
        parameters = list(model.parameters())
        by_size = sorted(range(len(parameters)), key=lambda index: -parameters[index].numel())
        ranks = work.config.cluster.ranks_per_node
        owned = [parameters[index] for index in by_size[int(os.environ["LOCAL_RANK"]) % ranks :: ranks]]
        super().__init__(work, model, Masters(owned, parameters, work.config.training.lr))
