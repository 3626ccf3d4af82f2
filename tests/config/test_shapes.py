"""Configuration shapes that public projects ship: accepted, or refused in named words."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.config.shapes import SHAPES
from tests.config.trial import agreed, as_text, verdict, verdicts
from tests.support.pool import pool

WORLD = 2


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    """One job for all shapes: an engine each, or its error."""
    configs = {name: shape.config for name, shape in SHAPES.items()}
    return agreed(pool(WORLD).run(verdicts, configs, timeout=120))  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", SHAPES)
def test_shape(name: str, outcomes: dict[str, str]) -> None:
    expected, outcome = SHAPES[name].expected, outcomes[name]
    if isinstance(expected, str):
        assert outcome == expected
        return
    assert not outcome.startswith("accepted"), outcome
    assert "TypeError" not in outcome
    for word in expected:
        assert word in outcome, f"{word!r} is missing in: {outcome}"


def test_a_number_is_not_called_unfilled(outcomes: dict[str, str]) -> None:
    """C16's trap: the total is written, the rest is not."""
    listed = outcomes["C16 raw"].split(": still")[0]
    assert "train_batch_size" not in listed.replace("train_micro_batch_size_per_gpu", "")


def test_a_conf_file(tmp_path: Path) -> None:
    """C17 ships as .conf, and 1e5 stays a number of steps."""
    path = tmp_path / "stage3_no_offloading_accelerate.conf"
    path.write_text(as_text(SHAPES["C17 filled"].config))
    assert agreed(pool(WORLD).run(verdict, str(path))) == "accepted as bfloat16"
