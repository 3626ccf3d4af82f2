"""Made-up results of comparisons, whose analysis can be done by hand."""

from __future__ import annotations

from typing import Any

from deepspeed_amsp.compare.results import Exposed, Memory, Phases, Results, Run, Setup, Slice

LOSSES = [5.5, 5.25, 5.0]


def setup(**changes: Any) -> Setup:
    """Of an emulated cluster of 2 nodes x 2 ranks, unless changed."""
    values: dict[str, Any] = {
        "date": "2025-01-31T12:00:00+00:00",
        "host": "testhost",
        "versions": {"torch": "2.13.0", "deepspeed": "0.19.8"},
        "config": {"model": {"llama": {"dim": 448}}, "strategies": ["ddp", "zero1"]},
        "emulated": True,
        "fairness": ["gradients are clipped at 1 by every strategy", "one <reduce-scatter> for all"],
        "nodes": 2,
        "ranks_per_node": 2,
    }
    return Setup(**values | changes)


def run(strategy: str, seconds: float, number: int = 0, **changes: Any) -> Run:
    """One round of a strategy at 500 Mbit/s and M = 1, whose steps all take ``seconds``."""
    values: dict[str, Any] = {
        "strategy": strategy,
        "title": strategy.upper(),
        "micro_batches": 1,
        "nic_mbit": 500,
        "round": number,
        "tokens_per_step": 256,
        "step_s": [seconds] * 3,
        "losses": LOSSES,
        "phases_s": Phases(0.3 * seconds, 0.6 * seconds, 0.1 * seconds),
        "sent_bytes_per_node": 41.7e6,
        "theory_bytes_per_node": 41.5e6,
        "memory": Memory(27e6, 27e6, 166e6, 400e6),
        "timeline": [
            Slice("forward", "forward", 0, 0.3 * seconds),
            Slice("backward", "backward", 0.3 * seconds, 0.9 * seconds),
            Slice("update", "update", 0.9 * seconds, seconds),
        ],
    }
    return Run(**values | changes)


def rounds(strategy: str, *seconds: float, **changes: Any) -> list[Run]:
    """A run for each value, in rounds 0, 1, ..."""
    return [run(strategy, value, number, **changes) for number, value in enumerate(seconds)]


def failed(strategy: str, number: int = 0, **changes: Any) -> Run:
    """A run that died before its first step."""
    nothing = {"step_s": [], "losses": [], "phases_s": None, "memory": None, "timeline": None}
    nothing |= {"sent_bytes_per_node": None, "error": "rank 1 ended\nTraceback (most recent call last):\n  boom <here>"}
    return run(strategy, 1.0, number, **nothing | changes)


def mixed() -> Results:
    """One of each kind: limit, right, ours, wrong, failed, noisy."""
    in_flight = [
        Slice("reduce", "bucket 0", 0.4, 0.7),
        Slice("reduce", "bucket 1", 0.5, 0.9),
        Slice("publish", "bucket 0", 0.9, 1.0),
    ]
    plan = run("amsp", 1.0)
    assert plan.timeline is not None
    return Results(
        setup(),
        [
            *rounds("limit", 0.9, 0.9, losses=[6.0, 5.9, 5.8], sent_bytes_per_node=9e3, theory_bytes_per_node=0),
            *rounds("ddp", 1.2, 1.22),
            *rounds("zero1", 2.0, 2.0, sent_bytes_per_node=70e6, theory_bytes_per_node=62e6),
            *rounds("hsdp", 1.6, 2.4),
            *rounds("zero3", 0.5, 0.5, losses=[5.5, 5.25, 5.1]),
            *(failed("mics", number) for number in range(2)),
            *rounds(
                "amsp", 1.0, 1.0,
                title="AMSP (1,1,2x1)", exposed_s=Exposed(0, 0.03, 0.05), timeline=[*plan.timeline, *in_flight],
            ),
        ],
    )  # fmt: skip
