"""Every term of the communication costs, against values computed by hand."""

from __future__ import annotations

import pytest

from deepspeed_amsp.plan.cost import executor_cost, paper_cost
from deepspeed_amsp.plan.factors import Sharding
from deepspeed_amsp.plan.resolve import Plan, PublishMode, ReduceMode
from deepspeed_amsp.plan.specs import TrainSpec
from tests.plan.worlds import matrices, priced, sharding

MODEL = matrices(10, 20, 30)  # Phi = 480 elements: units of 80, 160 and 240, 160, 320 and 480 bytes in 16-bit
PHI = 960.0  # bytes
ALL = (2, 2)
NODE = (2, 1)
ONE = (1, 1)


def plan(s: Sharding, bucket_bytes: int = 10**6, **modes: object) -> Plan:
    return Plan(s, bucket_bytes=bucket_bytes, **modes)  # type: ignore[arg-type]


# ---- the paper's forms -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("factors", "m", "want"),
    [
        # DDP: everything is reduced over all GPUs (AR 3 a byte, times 10 across nodes), nothing published.
        ((ONE, ONE, ONE), 4, {"T_p": 0, "T_g": 0, "T_os^0": 30 * PHI, "T_os^1": 0}),
        # The paper's 7B plan: two broadcasts in the node (5 a byte), of half the parameters each.
        ((ONE, ONE, NODE), 1, {"T_p": 0, "T_g": 0, "T_os^0": 30 * PHI, "T_os^1": 2 * 5 * PHI / 2}),
        # s_g = s_os > s_p: the M - 1 other micro-batches reduce in the node.
        ((ONE, NODE, NODE), 4, {"T_p": 0, "T_g": 3 * 3 * PHI, "T_os^0": 30 * PHI, "T_os^1": 5 * PHI}),
        # MiCS: two AG (1) and one RS (2) of everything in every micro-batch; T_os^1 = 0 at s_os = s_p.
        ((NODE, NODE, NODE), 4, {"T_p": 4 * (2 + 2) * PHI, "T_g": 0, "T_os^0": 30 * PHI / 2, "T_os^1": 0}),
        # ZeRO-3 reduces nothing but over P, across nodes.
        ((ALL, ALL, ALL), 2, {"T_p": 2 * 40 * PHI, "T_g": 0, "T_os^0": 0, "T_os^1": 0}),
        # P in the node, OS over both nodes: s_os/s_p = 2 broadcasts of Phi/4 across nodes.
        ((NODE, NODE, ALL), 1, {"T_p": 4 * PHI, "T_g": 0, "T_os^0": 30 * PHI / 2, "T_os^1": 2 * 50 * PHI / 4}),
    ],
)
def test_the_papers_terms(factors: tuple[tuple[int, int], ...], m: int, want: dict[str, float]) -> None:
    cost = paper_cost(MODEL, plan(sharding(*factors)), TrainSpec(micro_batches=m), priced())
    assert cost.terms == pytest.approx(want)
    assert cost.total == pytest.approx(sum(want.values()))


def test_the_papers_buckets_are_full() -> None:
    """2 Phi / (U s_p) AllReduces, a real number: here 960 / (100 * 2) = 4.8, each with its latency."""
    cost = paper_cost(MODEL, plan(sharding(NODE, NODE, NODE), 100), TrainSpec(), priced(latency=7.0))
    assert cost.term("T_os^0") == pytest.approx(4.8 * (7.0 + 30 * 100))


def test_small_messages_pay_latency_once_each() -> None:
    """Three units: two gathers and one reduction each, in each of two micro-batches."""
    cost = paper_cost(MODEL, plan(sharding(NODE, NODE, NODE)), TrainSpec(micro_batches=2), priced(latency=7.0))
    assert cost.term("T_p") == pytest.approx(2 * (3 * 3 * 7.0 + (1 + 1 + 2) * PHI))


# ---- what the executor sends -------------------------------------------------------------------------------


def executor(s: Sharding, m: int = 1, **modes: object) -> dict[str, float]:
    return executor_cost(MODEL, plan(s, **modes), TrainSpec(micro_batches=m), priced()).terms


def test_two_level_reduces_to_owners_and_only_their_part_over_replicas() -> None:
    """RS (2) of all in the node, AR (3, times 10) of a half across nodes."""
    assert executor(sharding(ONE, ONE, NODE))["T_os^0"] == pytest.approx(2 * PHI + 30 * PHI / 2)


def test_the_all_reduce_mode_is_the_papers() -> None:
    s = sharding(ONE, ONE, NODE)
    assert executor(s, reduce=ReduceMode.ALL_REDUCE)["T_os^0"] == pytest.approx(30 * PHI)


def test_all_gather_publishes_in_one_go() -> None:
    s = sharding(ONE, ONE, NODE)
    assert executor(s)["T_os^1"] == pytest.approx(5 * PHI)
    assert executor(s, publish=PublishMode.ALL_GATHER)["T_os^1"] == pytest.approx(1 * PHI)


def test_two_stages_send_a_nodes_part_across() -> None:
    """OS over everything: RS in the node, RS of a half across; back a Broadcast across and one in the node."""
    s = sharding(ONE, ONE, ALL)
    flat, staged = executor(s), executor(s, hierarchical=True)
    assert flat["T_os^0"] == pytest.approx(20 * PHI)
    assert flat["T_os^1"] == pytest.approx(50 * PHI)
    assert staged["T_os^0"] == pytest.approx(2 * PHI + 20 * PHI / 2)
    # Across nodes each of 2 owners of a place sends a quarter, in the node each of 2 ranks passes on a half.
    assert staged["T_os^1"] == pytest.approx(2 * 50 * PHI / 4 + 2 * 5 * PHI / 2)


def test_replicas_over_nodes_are_summed_in_three_stages() -> None:
    """DDP, two-stage: RS in the node, AR of a half across, AG in the node."""
    s = sharding(ONE, ONE, ONE)
    assert executor(s, hierarchical=True)["T_os^0"] == pytest.approx(2 * PHI + 30 * PHI / 2 + 1 * PHI)


def test_gradients_in_between_reduce_inside_in_every_micro_batch() -> None:
    """s_p 1, s_g 2, s_os 4: in the node each time; across nodes what is kept, a half, at the end."""
    terms = executor(sharding(ONE, NODE, ALL), m=4)
    assert terms["T_g"] == pytest.approx(3 * 2 * PHI)
    assert terms["T_os^0"] == pytest.approx(2 * PHI + 20 * PHI / 2)


def test_a_bucket_is_closed_when_the_next_unit_does_not_fit() -> None:
    """Units of 160, 320, 480 bytes into buckets of 480: {160, 320}, {480}: two collectives."""
    cost = executor_cost(MODEL, plan(sharding(ONE, ONE, ONE), 480), TrainSpec(), priced(latency=7.0))
    assert cost.term("T_os^0") == pytest.approx(2 * 7.0 + 30 * PHI)


def test_kept_parameters_are_gathered_once() -> None:
    s = sharding(NODE, NODE, NODE)
    assert executor(s, m=2, keep_after_forward="all")["T_p"] == pytest.approx(2 * (1 + 2) * PHI)
