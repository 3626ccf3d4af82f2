"""Probes the paper's models and writes deepspeed_amsp/plan/probed.py.

PYTHONPATH=. python -m tests.plan.probed_figures
"""

from __future__ import annotations

from pathlib import Path

import torch

from deepspeed_amsp import probe
from deepspeed_amsp.compare.llama import Llama, LlamaConfig
from deepspeed_amsp.plan.models import PAPER_MODELS, PAPER_VOCAB
from deepspeed_amsp.plan.specs import Activations

TARGET = Path(__file__).resolve().parents[2] / "deepspeed_amsp" / "plan" / "probed.py"
HEAD = '''"""Activations of the paper's models, as `deepspeed_amsp.probe` measured them.

Made by tests/plan/probed_figures.py. They are those of compare/llama.py in bf16 for one sequence, on CPU kernels,
without fused norms or activations.
"""

from __future__ import annotations

from deepspeed_amsp.plan.specs import Activations

PROBED: dict[str, tuple[Activations, ...]] = {
'''


def figures(name: str) -> tuple[Activations, ...]:
    """Of a cut of two layers, which is all that the figures depend on."""
    shape = PAPER_MODELS[name]
    config = LlamaConfig(vocab=PAPER_VOCAB, dim=shape.hidden, layers=2, heads=shape.heads, ffn=shape.ffn)
    with torch.device("meta"):
        module = Llama(config)
    return probe.probe(module, lambda sequence: torch.zeros(1, sequence + 1, dtype=torch.int64))


def main() -> None:
    lines = []
    for name in PAPER_MODELS:
        lines.append(f'    "{name}": (\n')
        lines += [f"        {values},\n" for values in figures(name)]
        lines.append("    ),\n")
    TARGET.write_text(HEAD + "".join(lines) + "}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
