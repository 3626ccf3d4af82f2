"""What the overlap benchmark calls reachable, against a simulation that goes block by block."""

from __future__ import annotations

import pytest

from tests.bench.rows import beside


def simulated(computation: float, communication: float, blocks: int) -> float:
    made = sent = 0.0
    for _ in range(blocks):
        made += computation / blocks
        sent = max(made, sent) + communication / blocks
    return sent


@pytest.mark.parametrize("communication", [0.0, 0.3, 1.0, 4.0])
def test_two_chains_end_when_the_slower_one_has_met_a_link_of_the_other(communication: float) -> None:
    assert beside(1.0, communication, 6) == pytest.approx(simulated(1.0, communication, 6))
