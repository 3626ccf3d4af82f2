"""Activations of the paper's models, as `deepspeed_amsp.probe` measured them. Made by tests/plan/probed_figures.py."""

from __future__ import annotations

from deepspeed_amsp.plan.specs import Activations

PROBED: dict[str, tuple[Activations, ...]] = {
    "llama-7b": (),
    "llama-13b": (),
    "llama-30b": (),
    "llama-65b": (),
}
