"""Random states of one rank: Python's, NumPy's, torch's on the host and on the accelerator."""

from __future__ import annotations

import random
from typing import Any

import numpy
import torch
from deepspeed.accelerator import get_accelerator


def random_states() -> dict[str, Any]:
    """The states now."""
    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": numpy.random.get_state(),
        "torch": torch.get_rng_state(),
    }
    accelerator = get_accelerator()
    if accelerator.device_name() != "cpu":
        states[accelerator.device_name()] = accelerator.get_rng_state()
    return states


def set_random_states(states: dict[str, Any]) -> None:
    """Go on from what `random_states` gave, here or elsewhere; an accelerator's states are used on its like."""
    random.setstate(states["python"])
    numpy.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    accelerator = get_accelerator()
    if accelerator.device_name() != "cpu" and accelerator.device_name() in states:
        accelerator.set_rng_state(states[accelerator.device_name()])
