"""Every key that an amsp run honours, compared with DeepSpeed itself: what training shows."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from tests.config.observe import NAN, PLANS, Run, Seen, ours, plain, summed_all, unmanaged, watch_all
from tests.config.trial import base, merged
from tests.support.pool import pool

WORLD = 2
ALL_PLANS = ("ddp", "zero1", "zero2", "zero3")
LARGE = (30.0, 30.0, 30.0)
BF16 = {"bf16": {"enabled": True}}


def optimizer(kind: str, **params: Any) -> dict[str, Any]:
    return {"optimizer": {"type": kind, "params": {"lr": 1e-2, **params}}}


def scheduler(kind: str, **params: Any) -> dict[str, Any]:
    return {"scheduler": {"type": kind, "params": params}}


def fp16(**keys: Any) -> dict[str, Any]:
    """Dynamic scaling from 256 on, so that the model itself never overflows."""
    return {"enabled": True, "initial_scale_power": 8, **keys}


DECAY = scheduler("WarmupDecayLR", warmup_max_lr=2e-2, warmup_num_steps=2, total_num_steps=6)


def run(changes: dict[str, Any], *plans: str, windows: int = 3, scales: tuple[float, ...] = ()) -> Run:
    return Run(merged(base(), changes), plans or ("zero1",), windows, scales)


def zero(*plans: str, **keys: Any) -> Run:
    return run({"zero_optimization": keys}, *plans, windows=2)


RUNS: dict[str, Run] = {
    # The batch.
    "gradient_accumulation_steps": run({"gradient_accumulation_steps": 3}, *ALL_PLANS),
    "train_batch_size": run({"train_batch_size": 12}, "zero2"),
    "train_batch_size alone": Run({**base(train_micro_batch_size_per_gpu=None), "train_batch_size": 4}),
    # Clipping.
    "clip absent": Run(base(gradient_clipping=None), ("zero1", "zero3"), scales=LARGE),
    "clip 0.0": run({"gradient_clipping": 0.0}, scales=LARGE),
    "clip 0.3": run({"gradient_clipping": 0.3}, *ALL_PLANS, scales=LARGE),
    "clip 1e9": run({"gradient_clipping": 1e9}, scales=LARGE),
    "clip 1": run({"gradient_clipping": 1}, scales=LARGE),
    # Optimizers.
    "AdamW with everything": run(
        optimizer("AdamW", torch_adam=True, betas=[0.8, 0.95], eps=1e-6, weight_decay=0.3), *ALL_PLANS
    ),
    "Adam is AdamW": run(optimizer("Adam", torch_adam=True, weight_decay=0.3)),
    "Adam with adam_w_mode false": run(optimizer("Adam", torch_adam=True, adam_w_mode=False, weight_decay=0.3)),
    "adamw in small letters": run(optimizer("adamw", torch_adam=True, foreach=False)),
    "Adagrad": run(optimizer("Adagrad", initial_accumulator_value=0.1), "zero2"),
    "SGD, untested": run({**optimizer("SGD", momentum=0.9), "zero_allow_untested_optimizer": True}, "zero1", "zero3"),
    "NAdam, untested": run({**optimizer("NAdam"), "zero_allow_untested_optimizer": True}),
    # Schedulers: DeepSpeed's and torch's.
    "WarmupLR": run(scheduler("WarmupLR", warmup_min_lr=0, warmup_max_lr=2e-2, warmup_num_steps=3), "zero1", "zero3"),
    "WarmupDecayLR": run(DECAY),
    "WarmupCosineLR": run(scheduler("WarmupCosineLR", warmup_num_steps=2, total_num_steps=5)),
    "LRRangeTest": run(scheduler("LRRangeTest", lr_range_test_min_lr=1e-3, lr_range_test_step_size=1)),
    "OneCycle": run(
        scheduler("OneCycle", cycle_min_lr=1e-3, cycle_max_lr=1e-2, cycle_first_step_size=2, decay_lr_rate=0.1)
    ),
    "scheduler with accumulation": run(DECAY | {"gradient_accumulation_steps": 2}),
    # A NaN on one rank in the second window.
    "NaN in bf16": run(BF16 | DECAY, *ALL_PLANS, scales=(1.0, NAN)),
    "NaN in bf16, unchecked": run({"bf16": {"enabled": True, "check_grad_overflow": False}}, scales=(1.0, NAN)),
    "NaN in fp32": run({}, "zero1", "zero3", scales=(1.0, NAN)),
    "infinity in bf16": run(BF16, scales=(1.0, math.inf, 1.0)),
    # Precision.
    "bf16": run(BF16, *ALL_PLANS),
    "bfloat16": run({"bfloat16": {"enabled": True}}),
    "immediate_grad_update": run({"bf16": {"enabled": True, "immediate_grad_update": True}}),
    "grad_accum_dtype": run(
        BF16 | {"data_types": {"grad_accum_dtype": "fp32"}, "gradient_accumulation_steps": 2}, *ALL_PLANS
    ),
    "param_dtype": run(BF16 | {"data_types": {"param_dtype": "bf16"}}),
    "param_dtype that contradicts": run(BF16 | {"data_types": {"param_dtype": "fp32"}}),
    "communication_data_type": run(BF16 | {"communication_data_type": "fp32"}, "zero1", "zero3"),
    "fp16 static": run({"fp16": {"enabled": True, "loss_scale": 128.0}}, "zero1", "zero3"),
    "fp16 overflows": run(
        {"fp16": fp16(loss_scale_window=2, hysteresis=1)} | DECAY, *ALL_PLANS, windows=6, scales=(1, NAN, NAN)
    ),
    "fp16 hysteresis": run({"fp16": fp16(loss_scale_window=3, hysteresis=2)}, windows=6, scales=(NAN, 1, NAN, 1, NAN)),
    "fp16 consecutive_hysteresis": run(
        {"fp16": fp16(hysteresis=2, consecutive_hysteresis=True)}, windows=6, scales=(NAN, 1, NAN, NAN)
    ),
    "fp16 min_loss_scale": run({"fp16": fp16(min_loss_scale=64, hysteresis=1)}, windows=5, scales=(NAN, NAN, NAN)),
    "fp16 clipped": run({"fp16": fp16(), "gradient_clipping": 0.3, "gradient_accumulation_steps": 2}),
    # Averaging.
    "prescale_gradients": run({"prescale_gradients": True}, "zero1", "ddp"),
    "gradient_predivide_factor": run({"gradient_predivide_factor": 2.0}, "zero1", "ddp"),
    "predivide without reduce_scatter": run(
        {"gradient_predivide_factor": 4.0, "zero_optimization": {"reduce_scatter": False}}, "zero1", "zero2", "zero3"
    ),
    "prescale without reduce_scatter": run(
        {"prescale_gradients": True, "zero_optimization": {"reduce_scatter": False}}, "zero1", "zero2"
    ),
    "sum": run({"gradient_allreduce_op": "sum", "gradient_clipping": 1e9}, "ddp", "zero1", "zero2"),
    "sum with accumulation": run({"gradient_allreduce_op": "sum", "gradient_accumulation_steps": 2}),
    "mean": run({"gradient_allreduce_op": "MEAN"}),
    # zero_optimization, under the stages whose business it is.
    "contiguous_gradients": zero("zero2", "zero3", contiguous_gradients=False),
    "reduce_scatter": zero("zero1", "zero2", "zero3", reduce_scatter=False),
    "overlap_comm false": zero("zero2", "zero3", overlap_comm=False),
    "overlap_comm true": zero("zero2", "zero3", overlap_comm=True),
    "round_robin_gradients": zero("zero1", "zero2", round_robin_gradients=True),
    "allgather_bucket_size": zero("zero1", "zero2", allgather_bucket_size=50),
    "sub_group_size": zero("zero3", sub_group_size=100),
    "ignore_unused_parameters": zero("zero2", ignore_unused_parameters=False),
    "enable_sanity_checks": zero("zero3", enable_sanity_checks=True),
    "log_trace_cache_warnings": zero("zero3", log_trace_cache_warnings=True),
    "prefetch_bucket_size": zero("zero3", prefetch_bucket_size=0),
    "param_persistence_threshold": zero("zero3", stage3_param_persistence_threshold=30),
    "everything persistent": zero("zero3", param_persistence_threshold=10**6),
    "model_persistence_threshold": zero("zero3", param_persistence_threshold=30, model_persistence_threshold=40),
    "max_live_parameters": zero("zero3", stage3_max_live_parameters=0),
    "max_reuse_distance": zero("zero3", max_reuse_distance=0),
    "leaf_module": replace(zero("zero3", leaf_module={"names": ["block"]}), model="attention"),
    "compute_grad_norm": zero("ddp", "zero1", "zero2", compute_grad_norm=False),
}
ROUGH = (
    "fp16",
    "bf16",
    "bfloat16",
    "immediate_grad_update",
    "grad_accum_dtype",
    "communication",
    "param_dtype",
    "infinity",
)


@pytest.fixture(scope="module")
def seen() -> list[dict[str, dict[str, Any]]]:
    """By rank: every run under plain DeepSpeed and under its plans, in one job."""
    return pool(WORLD).run(watch_all, RUNS, timeout=240)


def _compare(plain_run: Seen, our_run: Seen, rough: bool) -> None:
    rtol = 2e-2 if rough else 1e-5
    assert our_run.facts == plain_run.facts
    assert our_run.counters == plain_run.counters
    assert our_run.losses == pytest.approx(plain_run.losses, rel=rtol, nan_ok=True)
    assert [norm is None for norm in our_run.norms] == [norm is None for norm in plain_run.norms]
    # Of a norm that is not finite, DeepSpeed makes inf or -1 here and there.
    norms = [[norm if math.isfinite(norm or 0.0) and norm != -1.0 else math.inf for norm in one.norms]
             for one in (our_run, plain_run)]  # fmt: skip
    assert [norm or 0.0 for norm in norms[0]] == pytest.approx([norm or 0.0 for norm in norms[1]], rel=rtol)
    for mine, theirs in zip(our_run.rates, plain_run.rates, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-9)


DEEPSPEED_IS_WRONG = {("fp16 overflows", "zero3")}
"""In a step that doubles the loss scale, stage 3 divides by the new scale: the gradient counts half."""


@pytest.mark.parametrize(
    ("name", "plan"),
    [(name, plan) for name, one in RUNS.items() for plan in one.plans if (name, plan) not in DEEPSPEED_IS_WRONG],
)
def test_trains_as_deepspeed_does(name: str, plan: str, seen: list[dict[str, dict[str, Any]]]) -> None:
    for rank, found in enumerate(seen):
        theirs, mine = found[name][f"stage {PLANS[plan]}"], found[name][plan]
        if isinstance(theirs, str):
            assert mine == theirs, f"rank {rank}: DeepSpeed refuses this"
            continue
        assert isinstance(mine, Seen), f"rank {rank}: {mine}"
        _compare(theirs, mine, any(word in name for word in ROUGH))


def test_a_skipped_step_is_visible(seen: list[dict[str, dict[str, Any]]]) -> None:
    """The runs above would compare two wrong answers, too: this is the right one."""
    found = seen[0]["NaN in bf16"]["zero1"]
    assert [counters[1] for counters in found.counters] == [0, 1, 1]
    assert found.rates[1] == found.rates[0], "the scheduler rests when a step is skipped"
    assert math.isfinite(found.losses[2])
    assert not math.isfinite(seen[0]["NaN in bf16, unchecked"]["zero1"].losses[2])


def test_a_growing_loss_scale_leaves_the_gradient_alone(seen: list[dict[str, dict[str, Any]]]) -> None:
    for found in seen:
        runs = found["fp16 overflows"]
        _compare(runs["zero1"], replace(runs["zero3"], facts=runs["zero1"].facts), rough=True)
        assert runs["stage 3"].norms[-1] == pytest.approx(runs["stage 1"].norms[-1] / 2, rel=2e-2)


def test_torchs_schedulers() -> None:
    """DeepSpeed itself fails here: its ZeRO optimizer is no torch optimizer."""
    changes = scheduler("StepLR", step_size=1, gamma=0.5)
    for found in pool(WORLD).run(watch_all, {"StepLR": run(changes, "zero1", "zero3")}):
        assert "is not an Optimizer" in found["StepLR"]["stage 1"]
        for plan in ("zero1", "zero3"):
            assert found["StepLR"][plan].rates == [[5e-3], [2.5e-3], [1.25e-3]]


def test_clipping_counts(seen: list[dict[str, dict[str, Any]]]) -> None:
    """Absent means 1.0 in DeepSpeed 0.19.8, and norms are those before clipping."""
    by_clip = {name: seen[0][f"clip {name}"]["zero1"] for name in ("absent", "0.0", "1", "1e9", "0.3")}
    assert by_clip["absent"].facts["gradient_clipping"] == 1.0
    assert by_clip["absent"].losses == by_clip["1"].losses
    assert by_clip["0.0"].losses == by_clip["1e9"].losses
    assert all(one.norms[0] == by_clip["0.0"].norms[0] > 1.0 for one in by_clip.values())


@pytest.mark.parametrize("plan", ["ddp", "zero2"])
def test_a_sum_is_a_sum(plan: str, seen: list[dict[str, dict[str, Any]]]) -> None:
    summed, mean = seen[0]["sum"][plan].norms[0], seen[0]["mean"]["zero1"].norms[0]
    assert summed == pytest.approx(WORLD * mean, rel=1e-6)


# ---- sums in the open ---------------------------------------------------------------------------------------------

TINY = 2.0**-9
MANY = [[1.0] + [TINY] * 64] * WORLD
"""64 x 2^-9 is an eighth; in bf16 each of them is lost next to a one."""
TWO_RANKS = [[1.0], [TINY]]


def sums(config: dict[str, Any], steps: int) -> dict[str, Any]:
    whole = {"optimizer": None, "zero_allow_untested_optimizer": True, "gradient_accumulation_steps": steps}
    return merged(base(), {**BF16, **whole, **config})


ACCUMULATION = {"fp32": 1.125, "bf16": 1.0, None: 1.0}
CASES: dict[str, tuple[dict[str, Any], list[list[float]]]] = {}
for _dtype in ACCUMULATION:
    _config = sums({"data_types": {"grad_accum_dtype": _dtype}} if _dtype else {}, 65)
    for _plan in ("ddp", "zero1", "zero2", "zero3"):
        CASES[f"{_dtype} {_plan}"] = (ours(_config, _plan), MANY)
    CASES[f"{_dtype} stage 1"] = (plain(_config, 1), MANY)
for _wire in ("fp32", "bf16", None):
    _config = sums({"data_types": {"grad_accum_dtype": "fp32"}, "communication_data_type": _wire}, 1)
    for _plan in ("ddp", "zero2", "zero3"):
        CASES[f"wire {_wire} {_plan}"] = (ours(_config, _plan), TWO_RANKS)


@pytest.fixture(scope="module")
def totals() -> dict[str, Any]:
    first, second = pool(WORLD).run(summed_all, CASES, timeout=120)
    assert first == second
    return first  # type: ignore[no-any-return]


@pytest.mark.parametrize("where", ["ddp", "zero1", "zero2", "zero3", "stage 1"])
@pytest.mark.parametrize("dtype", ACCUMULATION)
def test_accumulation_in_the_dtype_that_is_written(dtype: str | None, where: str, totals: dict[str, Any]) -> None:
    assert totals[f"{dtype} {where}"] == pytest.approx(ACCUMULATION[dtype], abs=1e-3)


@pytest.mark.parametrize("plan", ["ddp", "zero2", "zero3"])
def test_gradients_travel_in_the_dtype_that_is_written(plan: str, totals: dict[str, Any]) -> None:
    """A gradient of 1 and one of 2^-9 on two ranks: their sum needs more bits than bf16 has."""
    assert totals[f"wire fp32 {plan}"] == pytest.approx((1 + TINY) / 2, rel=1e-6)
    for wire in ("bf16", None):
        assert totals[f"wire {wire} {plan}"] == pytest.approx(0.5, rel=1e-6)


# ---- accumulation that belongs to the caller ------------------------------------------------------------------------


@pytest.mark.parametrize("plan", ALL_PLANS)
def test_unmanaged_accumulation(plan: str) -> None:
    config = merged(
        base(), {"managed_gradient_accumulation": False, "gradient_accumulation_steps": 2, "gradient_clipping": 0.5}
    )
    if PLANS[plan] == 3:  # DeepSpeed takes overlap only without it
        config = merged(config, {"zero_optimization": {"overlap_comm": False}})
    theirs = pool(WORLD).run(unmanaged, plain(config, PLANS[plan]))
    mine = pool(WORLD).run(unmanaged, ours(config, plan))
    for (losses, norms, counters), expected in zip(mine, theirs, strict=True):
        assert counters == expected[2]
        assert losses == pytest.approx(expected[0], rel=1e-5)
        assert norms == pytest.approx(expected[1], rel=1e-5)
