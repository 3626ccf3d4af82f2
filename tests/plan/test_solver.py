"""The solver against brute force, counting and the paper's figures."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_amsp.plan.builtin_profiles import find_profile
from deepspeed_amsp.plan.cost import paper_cost
from deepspeed_amsp.plan.factors import FactorError, ShardFactor, Sharding
from deepspeed_amsp.plan.memory import memory
from deepspeed_amsp.plan.resolve import Plan
from deepspeed_amsp.plan.solver import (
    TIE_SECONDS,
    Modes,
    Objective,
    Problem,
    Search,
    alternatives,
    fell,
    rank,
    search,
    smallest_need,
    space,
)
from deepspeed_amsp.plan.specs import OPTIMIZERS, ClusterSpec, SpecError, TrainSpec, micro_batches
from tests.plan.worlds import matrices

MODEL = matrices(4000, 1000, 2000, 1000, 2000, 4000, columns=512, layers=(None, 0, 0, 1, 1, None))
PROFILE = find_profile("a800-hdr")


def problem(
    nodes: int = 2, gpus: int = 4, memory_gb: float = 80.0, m: int = 2, objective: Objective = Objective.STEP_TIME
) -> Problem:
    cluster = ClusterSpec(nodes, gpus, gpu_memory=memory_gb * 1e9)
    return Problem(MODEL, cluster, (TrainSpec(sequence=128, micro_batches=m),), PROFILE, objective)


# ---- the space -----------------------------------------------------------------------------------------------


def test_the_space_at_8_x_128_is_the_papers() -> None:
    found = space(ShardFactor(8, 128))
    assert (found.raw, found.legal, found.ordered, found.searched) == (32_768, 1_331, 286, 121)
    assert found.broken == {"whole nodes": 32_768 - 1_331, "dependency": 1_331 - 286}


@pytest.mark.parametrize(("nodes", "searched"), [(1, 16), (4, 36), (16, 64), (64, 100)])
def test_the_space_grows_as_in_the_paper(nodes: int, searched: int) -> None:
    assert space(ShardFactor(8, nodes)).searched == searched


def test_counts_add_up_where_factors_do_not_divide_each_other() -> None:
    """6 GPUs a node: 2 and 3 are legal, but neither divides the other: the mesh's own rule takes some out."""
    found = space(ShardFactor(6, 2), "any")
    assert found.raw == (4 * 2) ** 3
    assert found.raw - sum(found.broken.values()) == found.ordered == found.searched
    assert found.broken["chain"] > 0


# ---- brute force ---------------------------------------------------------------------------------------------


def legal(triple: tuple[ShardFactor, ...], dp: ShardFactor) -> bool:
    """Eq. 3-7 and the chain, written once more."""
    pairs = [(f.s0, f.s1) for f in triple]
    ordered = all(a[0] <= b[0] and a[1] <= b[1] for a, b in zip(pairs, [*pairs[1:], (dp.s0, dp.s1)], strict=True))
    divides = all(
        b[0] % a[0] == 0 and b[1] % a[1] == 0 for a, b in zip(pairs, [*pairs[1:], (dp.s0, dp.s1)], strict=True)
    )
    whole = all(s1 == 1 or s0 == dp.s0 for s0, s1 in pairs)
    return ordered and divides and whole and (triple[1] in (triple[0], triple[2]))


@given(
    st.sampled_from([1, 2, 4, 6, 8]),
    st.sampled_from([1, 2, 3, 4]),
    st.floats(0.05, 1.0),
    st.integers(1, 4),
)
@settings(max_examples=25, deadline=None)
def test_brute_force_equals_the_solver(gpus: int, nodes: int, memory_gb: float, m: int) -> None:
    """Over all pairs of numbers, not only divisors; the paper's objective and the true memory."""
    asked = problem(nodes, gpus, memory_gb, m, Objective.COMM_TIME)
    found = search(asked)
    dp = ShardFactor(gpus, nodes)
    train = asked.trainings[0]
    every = [ShardFactor(a, b) for a, b in product(range(1, gpus + 1), range(1, nodes + 1))]
    fitting: dict[Sharding, float] = {}
    for triple in product(every, repeat=3):
        if not legal(triple, dp):
            continue
        made = asked.modes.plans(Sharding(*triple, dp))[0]
        if memory(MODEL, made, train).peak <= memory_gb * 1e9:
            fitting[made.sharding] = paper_cost(MODEL, made, train, PROFILE).total
    assert {plan.plan.sharding: plan.objective for plan in found.ranked} == pytest.approx(fitting)
    if fitting:
        assert found.best is not None
        assert found.best.objective <= min(fitting.values()) + TIE_SECONDS
    else:
        assert found.best is None
        assert smallest_need(found) > memory_gb * 1e9


@given(st.sampled_from([(1, 4), (2, 2), (4, 2), (2, 8)]), st.floats(0.03, 0.3), st.sampled_from(Objective))
@settings(max_examples=15, deadline=None)
def test_every_plan_obeys_the_rules_and_fits(shape: tuple[int, int], memory_gb: float, objective: Objective) -> None:
    asked = problem(*shape, memory_gb=memory_gb, objective=objective)
    found = search(asked)
    dp = asked.data_parallel
    for plan in found.ranked:
        s = plan.plan.sharding
        assert legal((s.parameters, s.gradients, s.optimizer_states), dp)
        assert plan.memory.peak <= memory_gb * 1e9
    for entry in found.rejected:
        assert entry.missing == pytest.approx(entry.memory.peak - memory_gb * 1e9)
        assert entry.missing > 0
    assert len(found.ranked) + len(found.rejected) == found.space.searched
    assert fell(found).get("memory", 0) == len(found.rejected)


def key(found: Search) -> set[str]:
    return {str(plan.plan.sharding) for plan in found.ranked}


@given(st.floats(0.03, 0.3), st.floats(1.0, 4.0))
@settings(max_examples=10, deadline=None)
def test_more_memory_never_removes_a_plan(memory_gb: float, more: float) -> None:
    small, large = search(problem(memory_gb=memory_gb)), search(problem(memory_gb=memory_gb * more))
    assert key(small) <= key(large)
    if small.best is not None and large.best is not None:
        assert large.best.objective <= small.best.objective + TIE_SECONDS


@given(st.floats(1.0, 8.0), st.floats(1.0, 8.0), st.sampled_from(Objective))
@settings(max_examples=10, deadline=None)
def test_a_faster_link_never_makes_a_plan_slower(inter: float, intra: float, objective: Objective) -> None:
    asked = problem(memory_gb=0.2, objective=objective)
    slow = search(asked)
    fast = search(replace(asked, profile=PROFILE.scaled(inter=inter, intra=intra)))
    times = {str(plan.plan.sharding): plan.objective for plan in fast.ranked}
    for plan in slow.ranked:
        # Of modes that tie, the one with less memory is kept, which may be slower by so much.
        assert times[str(plan.plan.sharding)] <= plan.objective + TIE_SECONDS


# ---- ranking -------------------------------------------------------------------------------------------------


def test_ties_go_to_the_smaller_memory() -> None:
    found = search(problem(objective=Objective.COMM_TIME))
    a, b, c = found.ranked[:3]
    light = replace(a, memory=memory(MODEL, Plan(_zero3()), asked_train()), objective=1.0 + TIE_SECONDS / 2)
    heavy = replace(b, memory=memory(MODEL, Plan(_ddp()), asked_train()), objective=1.0)
    slow = replace(c, memory=light.memory, objective=1.0 + 2 * TIE_SECONDS)
    assert light.memory.peak < heavy.memory.peak
    assert rank([slow, heavy, light]) == [light, heavy, slow]


def asked_train() -> TrainSpec:
    return TrainSpec(sequence=128)


def _zero3() -> Sharding:
    full = ShardFactor(4, 2)
    return Sharding(full, full, full, full)


def _ddp() -> Sharding:
    one = ShardFactor(1, 1)
    return Sharding(one, one, one, ShardFactor(4, 2))


def test_within_names_the_plans_close_to_the_best() -> None:
    found = search(problem())
    assert found.best is not None
    close = found.within(0.02)
    assert close[0] is found.best
    assert all(found.slower(plan) <= 0.02 for plan in close)
    assert all(found.slower(plan) > 0.02 for plan in found.ranked if plan not in close)


def test_micro_batches_may_be_chosen_too() -> None:
    """One long micro-batch needs fewer gathers than four short ones: MiCS alone, no memory limit."""
    node = ShardFactor(4, 1)
    train = TrainSpec(sequence=128, micro_batch=1, micro_batches=4)
    asked = replace(
        problem(m=4),
        trainings=alternatives(train, [1, 2, 3, 4]),
        shardings=(Sharding(node, node, node, ShardFactor(4, 2)),),
    )
    assert [(t.micro_batch, t.micro_batches) for t in asked.trainings] == [(1, 4), (2, 2), (4, 1)]
    found = search(asked)
    assert len(found.ranked) == 3
    fastest = min(found.ranked, key=lambda plan: plan.objective)
    assert fastest.train.micro_batch == 4


def test_modes_that_send_the_same_are_one_plan() -> None:
    """Nothing to publish at s_os = s_p, and two levels where there is one: a single plan on one node."""
    one = ShardFactor(1, 1)
    assert len(Modes().plans(Sharding(one, one, one, ShardFactor(1, 1)))) == 1
    assert len(Modes().plans(Sharding(one, one, one, ShardFactor(4, 1)))) == 1
    assert len(Modes().plans(Sharding(one, one, ShardFactor(4, 1), ShardFactor(4, 1)))) == 4


def test_an_optimizer_that_needs_tensors_whole_gets_whole_parameters() -> None:
    train = TrainSpec(sequence=128, optimizer=OPTIMIZERS["muon"])
    found = search(replace(problem(), trainings=(train,)))
    assert found.ranked and all(plan.plan.sharding.s_p == 1 for plan in found.ranked + found.rejected)
    refused = found.space.searched - len(found.ranked) - len(found.rejected)
    assert (
        fell(found)["whole tensors"] == refused == 9
    )  # (2,4,8) by (2,4,8): 3 equal, 3 ordered pairs with two s_g each
    with pytest.raises(SpecError, match="muon needs tensors whole"):
        search(replace(problem(), trainings=(train,), shardings=(_zero3(),)))


def test_other_parallelism_takes_its_part_once() -> None:
    """Half of every matrix and half of the layers: with 2 x 2 GPUs a replica, a quarter of the layers' elements."""
    halves = MODEL.part(2, 1)
    assert halves.numel * 2 == MODEL.numel
    assert sum(halves.forward_flops(8, 1)) * 2 == sum(MODEL.forward_flops(8, 1))
    first, last = MODEL.stages(1, 2)
    assert first.numel + last.numel == MODEL.numel
    assert [unit.name for unit in first.units] == ["m0", "m1", "m2"]
    train = TrainSpec(sequence=128, tensor_parallel=2, pipeline_parallel=2)
    asked = replace(problem(nodes=2, gpus=4), trainings=(train,))
    assert asked.data_parallel == ShardFactor(2, 1)
    best = search(asked).best
    assert best is not None
    assert best.plan.sharding.s_dp == 2


# ---- bad input -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ClusterSpec(0, 8), "nodes must be a whole number of at least 1, not 0"),
        (lambda: ClusterSpec(1, 2.5), "gpus_per_node must be a whole number"),  # type: ignore[arg-type]
        (lambda: ClusterSpec(1, 8, gpu_memory=float("nan")), "gpu_memory must be a number above 0"),
        (lambda: ClusterSpec(1, 8, efficiency=1.5), "efficiency must be at most 1"),
        (lambda: TrainSpec(micro_batches=0), "micro_batches must be a whole number of at least 1"),
        (lambda: TrainSpec(gradient_bytes=3), "gradient_bytes must be 2 or 4"),
        (
            lambda: TrainSpec(tensor_parallel=3).data_parallel(ClusterSpec(2, 8)),
            "tensor_parallel = 3 must divide the 8",
        ),
        (lambda: TrainSpec(pipeline_parallel=3).data_parallel(ClusterSpec(2, 8)), "must divide the 2 nodes"),
        (lambda: MODEL.part(1, 3), "pipeline_parallel = 3 for 2 layers"),
    ],
)
def test_specs_that_make_no_sense(make: object, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        make()  # type: ignore[operator]


def test_a_batch_that_is_no_whole_number_of_micro_batches() -> None:
    assert micro_batches(4096 * 32, 4096, 1, 8) == 4
    with pytest.raises(SpecError, match="Nearest: 98304 or 131072 tokens"):
        micro_batches(100_000, 4096, 1, 8)
    with pytest.raises(SpecError, match="32768 tokens at once"):
        micro_batches(10, 4096, 1, 8)


def test_factors_that_are_not_legal_are_named() -> None:
    one, three = ShardFactor(1, 1), ShardFactor(2, 1)
    with pytest.raises(FactorError, match="divisibility"):
        Sharding(one, one, three, ShardFactor(3, 1))


def test_optimizers_have_the_sizes_of_case_k2() -> None:
    sizes = {name: optimizer.moments for name, optimizer in OPTIMIZERS.items()}
    assert sizes == {"adamw": 8, "lion": 4, "adam8bit": 2, "adafactor": 0, "muon": 4, "sgd": 0}
