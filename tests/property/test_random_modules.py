"""Random modules, triples and loops train as one process does.

40 examples, always the same; AMSP_NIGHTLY=1 draws 300 from a seed that is printed (AMSP_SEED repeats it).
"""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.property.random_modules import runs
from tests.semantics.harness import Run, assert_matches, on_ranks, reference

NIGHTLY = os.environ.get("AMSP_NIGHTLY") == "1"
SEED = int(os.environ.get("AMSP_SEED", random.SystemRandom().randrange(2**32)))


def _drawn_from_the_seed(test: Any) -> Any:
    return seed(SEED)(test) if NIGHTLY else test


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")  # frozen before a checkpoint
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors is a no-op")
@_drawn_from_the_seed
@settings(
    max_examples=300 if NIGHTLY else 40,
    derandomize=not NIGHTLY,
    database=None,
    deadline=None,
    print_blob=True,
    # Shrinking runs some hundred jobs: too long for a suite that just wants to know.
    phases=[Phase.generate, Phase.shrink] if NIGHTLY else [Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
@given(run=runs)
def test_random_modules_train_as_one_process_does(run: Run) -> None:
    if NIGHTLY:
        print(f"AMSP_SEED={SEED}")
    held, want = on_ranks(run, timeout=30), reference(run)
    assert_matches(held, want, rtol=1e-4, atol=5e-6, norm_rtol=1e-4)
    notes = torch.tensor([mine.notes for mine in held], dtype=torch.float64).mean(dim=0)
    torch.testing.assert_close(notes, torch.tensor(want.notes, dtype=torch.float64), rtol=1e-4, atol=1e-6)
