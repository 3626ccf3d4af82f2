"""Activations of the paper's models, as `deepspeed_amsp.probe` measured them.

Made by tests/plan/probed_figures.py. They are those of compare/llama.py in bf16 for one sequence, on CPU kernels,
without fused norms or activations.
"""

from __future__ import annotations

from deepspeed_amsp.plan.specs import Activations

PROBED: dict[str, tuple[Activations, ...]] = {
    "llama-7b": (
        Activations(
            sequence=2048,
            layer=433340416,
            layer_input=16777216,
            outside=346038276,
            layer_backward=152043520,
            outside_backward=524288000,
        ),
        Activations(
            sequence=4096,
            layer=866680832,
            layer_input=33554432,
            outside=692076548,
            layer_backward=213909504,
            outside_backward=1048576000,
        ),
    ),
    "llama-13b": (
        Activations(
            sequence=2048,
            layer=542457856,
            layer_input=20971520,
            outside=367009796,
            layer_backward=219152384,
            outside_backward=524288000,
        ),
        Activations(
            sequence=4096,
            layer=1084915712,
            layer_input=41943040,
            outside=734019588,
            layer_backward=296747008,
            outside_backward=1048576000,
        ),
    ),
    "llama-30b": (
        Activations(
            sequence=2048,
            layer=704036864,
            layer_input=27262976,
            outside=398467076,
            layer_backward=339214336,
            outside_backward=524288000,
        ),
        Activations(
            sequence=4096,
            layer=1408073728,
            layer_input=54525952,
            outside=796934148,
            layer_backward=439877632,
            outside_backward=1048576000,
        ),
    ),
    "llama-65b": (
        Activations(
            sequence=2048,
            layer=865615872,
            layer_input=33554432,
            outside=429924356,
            layer_backward=484442112,
            outside_backward=524288000,
        ),
        Activations(
            sequence=4096,
            layer=1731231744,
            layer_input=67108864,
            outside=859848708,
            layer_backward=608174080,
            outside_backward=1048576000,
        ),
    ),
}
