"""Sharding factors against Eq. 3-7, against the paper's counts and against the rules said another way."""

from __future__ import annotations

import csv
import io
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_amsp.plan import factors
from deepspeed_amsp.plan.factors import (
    COMPONENTS,
    PRESETS,
    RULES,
    Candidate,
    FactorError,
    ShardFactor,
    Sharding,
    divisors,
    enumerate_shardings,
    legal_factors,
    preset,
    violation,
)

# Table IV of the paper: the factors of every system on 128 nodes of 8 (R, N = all of them).
TABLE_IV = """\
model,system,p,g,os
7B,AMSP,1x1,1x1,8x1
7B,ZeRO-1,1x1,1x1,8x128
7B,ZeRO-3,8x128,8x128,8x128
7B,MiCS,8x1,8x1,8x1
13B,AMSP,4x1,4x1,8x1
30B,AMSP,8x1,8x1,8x4
30B,MiCS,8x2,8x2,8x2
"""
PAPER_CLUSTER = ShardFactor(8, 128)


def factor(text: str) -> ShardFactor:
    """The factor that the paper writes as "8x2"."""
    s0, s1 = text.split("x")
    return ShardFactor(int(s0), int(s1))


def sharding(text: str) -> Sharding:
    """The sharding that is written as "p g os dp"."""
    return Sharding(*map(factor, text.split()))


def refused(text: str) -> FactorError:
    """The error of a sharding that is written as "p g os dp"."""
    with pytest.raises(FactorError) as caught:
        sharding(text)
    return caught.value


class TestPaperCounts:
    """The sizes of the search space that the paper's cluster has (8 GPUs a node, 128 nodes)."""

    def test_raw_space(self) -> None:
        pairs = len(divisors(8)) * len(divisors(128))
        assert pairs**3 == 32_768

    def test_after_divisibility_and_whole_nodes(self) -> None:
        assert len(legal_factors(PAPER_CLUSTER)) ** 3 == 1_331

    def test_after_dependency(self) -> None:
        assert len(enumerate_shardings(PAPER_CLUSTER)) == 286

    @pytest.mark.parametrize(("nodes", "count"), [(1, 16), (4, 36), (16, 64), (64, 100), (128, 121)])
    def test_with_gradients_as_the_paper_has_them(self, nodes: int, count: int) -> None:
        found = enumerate_shardings(ShardFactor(8, nodes), gradients="paper")
        assert len(found) == count
        assert all(each.s_g in (each.s_p, each.s_os) for each in found)

    def test_k_chain_factors_have_closed_counts(self) -> None:
        # Powers of two form one chain of k factors: k(k+1)(k+2)/6 triples, k^2 of them with s_g at an end.
        for nodes in (1, 2, 32):
            k = len(legal_factors(ShardFactor(8, nodes)))
            assert len(enumerate_shardings(ShardFactor(8, nodes))) == k * (k + 1) * (k + 2) // 6
            assert len(enumerate_shardings(ShardFactor(8, nodes), gradients="paper")) == k * k

    @pytest.mark.parametrize(
        "row", list(csv.DictReader(io.StringIO(TABLE_IV))), ids=lambda r: f"{r['model']}-{r['system']}"
    )
    def test_table_iv_is_legal(self, row: dict[str, str]) -> None:
        one = Sharding(factor(row["p"]), factor(row["g"]), factor(row["os"]), PAPER_CLUSTER)
        assert one in enumerate_shardings(PAPER_CLUSTER, gradients="paper")


class TestEnumeration:
    """Order and completeness of enumerate_shardings."""

    @pytest.mark.parametrize("shape", [(1, 1), (2, 2), (2, 3), (6, 1), (6, 2), (2, 6), (1, 12)])
    @pytest.mark.parametrize("gradients", ["any", "paper"])
    def test_is_everything_legal_once_and_in_order(self, shape: tuple[int, int], gradients: str) -> None:
        dp = ShardFactor(*shape)
        every = [ShardFactor(a, b) for a in range(1, shape[0] + 1) for b in range(1, shape[1] + 1)]
        legal = {
            (p, g, os)
            for p, g, os in itertools.product(every, repeat=3)
            if restated(p, g, os, dp) and (gradients == "any" or g in (p, os))
        }
        found = enumerate_shardings(dp, gradients=gradients)  # type: ignore[arg-type]
        assert [(x.parameters, x.gradients, x.optimizer_states) for x in found] == sorted(
            legal, key=lambda t: (t[0].size, t[2].size, t[1].size)
        )

    def test_unknown_gradients_choice(self) -> None:
        with pytest.raises(FactorError, match='"any" or "paper"'):
            enumerate_shardings(ShardFactor(2, 2), gradients="all")  # type: ignore[arg-type]

    def test_one_gpu_has_one_sharding(self) -> None:
        only = sharding("1x1 1x1 1x1 1x1")
        assert enumerate_shardings(ShardFactor(1, 1)) == [only]
        assert (only.param, only.optim, only.replicate) == (1, 1, 1)


def restated(p: ShardFactor, g: ShardFactor, os: ShardFactor, dp: ShardFactor) -> bool:
    """The rules once more, by sets of ranks instead of arithmetic on factors.

    Lay R x N ranks out node by node. A factor cuts them into blocks of s0 * s1 consecutive ranks. It is legal
    when the blocks tile the ranks and each touches s1 nodes with s0 ranks in each of them; the three cuts
    are legal together when each refines the next.
    """
    world = range(dp.s0 * dp.s1)

    def blocks(f: ShardFactor) -> set[frozenset[int]] | None:
        size = f.s0 * f.s1
        if size < 1 or len(world) % size:
            return None
        cut = {frozenset(world[i : i + size]) for i in range(0, len(world), size)}
        for block in cut:
            of_nodes = [len([r for r in block if r // dp.s0 == n]) for n in {r // dp.s0 for r in block}]
            if of_nodes != [f.s0] * f.s1:
                return None
        return cut

    cuts = [blocks(f) for f in (p, g, os)]
    if any(cut is None for cut in cuts) or min(p.s0, p.s1, g.s0, g.s1, os.s0, os.s1) < 1:
        return False
    return all(
        all(any(small <= large for large in larger) for small in smaller)
        for smaller, larger in itertools.pairwise(cut for cut in cuts if cut is not None)
    )


class TestRules:
    """Each rule by itself, and all of them against `restated`."""

    numbers = st.integers(min_value=-1, max_value=12)
    pairs = st.builds(ShardFactor, numbers, numbers)
    shapes = st.tuples(st.integers(1, 12), st.integers(1, 12)).map(lambda t: ShardFactor(*t))

    @given(pairs, pairs, pairs, shapes)
    def test_any_triple(self, p: ShardFactor, g: ShardFactor, os: ShardFactor, dp: ShardFactor) -> None:
        self.agrees(p, g, os, dp)

    @given(st.data(), shapes)
    def test_triples_of_divisors(self, data: st.DataObject, dp: ShardFactor) -> None:
        # Random numbers are seldom legal; divisors reach the last rules.
        one = st.builds(ShardFactor, st.sampled_from(divisors(dp.s0)), st.sampled_from(divisors(dp.s1)))
        self.agrees(data.draw(one), data.draw(one), data.draw(one), dp)

    @given(st.data(), shapes)
    def test_triples_of_legal_factors(self, data: st.DataObject, dp: ShardFactor) -> None:
        one = st.sampled_from(legal_factors(dp))
        self.agrees(data.draw(one), data.draw(one), data.draw(one), dp)

    def agrees(self, p: ShardFactor, g: ShardFactor, os: ShardFactor, dp: ShardFactor) -> None:
        accepted = violation(Candidate(p, g, os, dp)) is None
        assert accepted == restated(p, g, os, dp)
        if accepted:
            made = Sharding(p, g, os, dp)
            assert made.replicate * made.optim_outer * made.optim_inner * made.param == made.s_dp
            assert made.optim == made.optim_outer * made.optim_inner
            assert made.stage in (1, 2, 3)
        else:
            with pytest.raises(FactorError) as caught:
                Sharding(p, g, os, dp)
            assert caught.value.component in COMPONENTS

    # One sharding for each rule that breaks this rule and obeys those before it.
    broken = (
        ("positive", "0x1 1x1 1x1 2x2", "parameters"),
        ("positive", "1x1 1x-1 1x1 2x2", "gradients"),
        ("positive", "1x1 1x1 1x1 0x2", "data_parallel"),
        ("capacity", "1x1 1x1 4x1 2x2", "optimizer_states"),
        ("capacity", "1x1 1x1 2x4 2x2", "optimizer_states"),
        ("divisibility", "1x1 1x1 3x1 4x1", "optimizer_states"),
        ("divisibility", "1x1 1x1 2x2 2x3", "optimizer_states"),
        ("whole nodes", "1x2 2x2 2x2 2x2", "parameters"),
        ("dependency", "2x1 1x1 2x1 2x2", "gradients"),
        ("dependency", "1x1 2x2 2x1 2x2", "optimizer_states"),
        ("chain", "2x1 3x1 6x1 6x1", "gradients"),
        ("chain", "2x1 2x2 2x3 2x6", "optimizer_states"),
    )

    def test_every_rule_has_a_case(self) -> None:
        assert {case[0] for case in self.broken} == {rule.name for rule in RULES}

    @pytest.mark.parametrize(("rule", "text", "component"), broken)
    def test_names_what_is_broken(self, rule: str, text: str, component: str) -> None:
        error = refused(text)
        dp = factor(text.split()[-1])
        equation = next(each.equation for each in RULES if each.name == rule)
        assert (error.rule, error.component) == (rule, component)
        for word in (
            component,
            repr(rule),
            equation,
            f"W = {dp.size}",
            f"gpus_per_node = {dp.s0}",
            f"nodes = {dp.s1}",
        ):
            assert word in str(error)

    def test_equations(self) -> None:
        said = {rule.name: rule.equation for rule in RULES}
        assert said == {
            "positive": "Eq. 3-4",
            "capacity": "Eq. 3-4",
            "divisibility": "Eq. 5-6",
            "whole nodes": "Eq. 7",
            "dependency": "Eq. 3-4",
            "chain": "three-axis mesh",
        }


class TestErrorText:
    """The legal values in the message."""

    def test_six_gpus_in_two_nodes_and_a_factor_of_four(self) -> None:
        assert "W = 6, gpus_per_node = 3, nodes = 2" in str(refused("1x1 1x1 2x2 3x2"))
        assert "next to parameters [1, 1] and gradients [1, 1]: [1, 1], [3, 1], [3, 2]." in str(
            refused("1x1 1x1 2x2 3x2")
        )

    def test_four_gpus_and_a_factor_of_three(self) -> None:
        error = str(refused("1x1 1x1 3x1 4x1"))
        assert "optimizer_states [3, 1]" in error
        assert error.endswith("[1, 1], [2, 1], [4, 1].")

    def test_one_gpu(self) -> None:
        assert str(refused("1x1 1x1 2x1 1x1")).endswith("gradients [1, 1]: [1, 1].")

    def test_legal_values_obey_the_other_components(self) -> None:
        assert str(refused("2x1 3x1 6x1 6x1")).endswith("optimizer_states [6, 1]: [2, 1], [6, 1].")

    def test_when_nothing_fits_next_to_the_others(self) -> None:
        error = str(refused("2x1 1x1 1x1 2x2"))
        assert "No value of gradients fits next to parameters [2, 1] and optimizer_states [1, 1]" in error
        assert error.endswith("on its own: [1, 1], [2, 1], [2, 2].")

    @pytest.mark.parametrize("bad", [True, 2.0, "2", None])
    def test_factors_are_integers(self, bad: object) -> None:
        with pytest.raises(FactorError, match="must be an integer"):
            ShardFactor(bad)  # type: ignore[arg-type]
        with pytest.raises(FactorError, match="must be an integer"):
            ShardFactor(1, bad)  # type: ignore[arg-type]

    def test_sharding_wants_factors(self) -> None:
        one = ShardFactor(1)
        with pytest.raises(FactorError, match=r"gradients must be a ShardFactor, not \(1, 1\)"):
            Sharding(one, (1, 1), one, one)  # type: ignore[arg-type]


class TestShardFactor:
    """fill, size and text."""

    @pytest.mark.parametrize(
        ("n", "per_node", "expected"),
        [
            (1, 8, "1x1"),
            (2, 8, "2x1"),
            (8, 8, "8x1"),
            (16, 8, "8x2"),
            (24, 8, "8x3"),
            (3, 6, "3x1"),
            (5, 1, "1x5"),
        ],
    )
    def test_fill(self, n: int, per_node: int, expected: str) -> None:
        filled = ShardFactor.fill(n, per_node)
        assert str(filled) == expected
        assert filled.size == n

    @pytest.mark.parametrize(("n", "per_node"), [(3, 8), (12, 8), (0, 8), (-2, 8), (4, 6)])
    def test_fill_refuses(self, n: int, per_node: int) -> None:
        legal = ", ".join(map(str, divisors(per_node)))
        with pytest.raises(FactorError, match=f"legal values are {legal}, or a multiple of {per_node}"):
            ShardFactor.fill(n, per_node)

    @pytest.mark.parametrize("bad", [True, 2.0, "2"])
    def test_fill_wants_an_integer(self, bad: object) -> None:
        with pytest.raises(FactorError, match="must be an integer"):
            ShardFactor.fill(bad, 8)  # type: ignore[arg-type]

    def test_legal_factors_have_distinct_ascending_sizes(self) -> None:
        sizes = [one.size for one in legal_factors(ShardFactor(6, 4))]
        assert sizes == [1, 2, 3, 6, 12, 24]


class TestSharding:
    """Derived sizes."""

    @pytest.mark.parametrize(
        ("text", "axes", "stage"),
        [
            # axes: replicate, optim_outer, optim_inner, param
            ("1x1 1x1 1x1 2x2", (4, 1, 1, 1), 1),
            ("1x1 1x1 2x2 2x2", (1, 4, 1, 1), 1),
            ("1x1 2x1 2x2 2x2", (1, 2, 2, 1), 2),
            ("1x1 2x2 2x2 2x2", (1, 1, 4, 1), 2),
            ("2x1 2x1 2x2 2x2", (1, 2, 1, 2), 3),
            ("2x2 2x2 2x2 2x2", (1, 1, 1, 4), 3),
            ("1x1 1x1 8x1 8x128", (128, 8, 1, 1), 1),
            ("8x1 8x1 8x4 8x128", (32, 4, 1, 8), 3),
            ("2x1 4x1 8x2 8x2", (1, 4, 2, 2), 3),
        ],
    )
    def test_axes_and_stage(self, text: str, axes: tuple[int, int, int, int], stage: int) -> None:
        one = sharding(text)
        assert (one.replicate, one.optim_outer, one.optim_inner, one.param) == axes
        assert one.optim == axes[1] * axes[2]
        assert one.stage == stage
        assert f"stage {stage}" in one.stage_reason
        assert one.stage_reason.startswith(("neither", "gradients", "parameters")[stage - 1])

    def test_text_and_block(self) -> None:
        one = sharding("1x1 2x1 2x2 2x2")
        assert str(one) == "P 1x1 | G 2x1 | OS 2x2 of 2x2"
        assert one.as_dict() == {"parameters": [1, 1], "gradients": [2, 1], "optimizer_states": [2, 2]}
        assert (one.s_p, one.s_g, one.s_os, one.s_dp) == (1, 2, 4, 4)

    def test_is_a_value(self) -> None:
        assert len({sharding("1x1 1x1 8x1 8x2"), sharding("1x1 1x1 8x1 8x2")}) == 1


class TestPresets:
    """The strategies that the space contains."""

    @pytest.mark.parametrize(
        ("name", "text"),
        [
            ("ddp", "1x1 1x1 1x1 8x4"),
            ("zero1", "1x1 1x1 8x4 8x4"),
            ("zero2", "1x1 8x4 8x4 8x4"),
            ("zero3", "8x4 8x4 8x4 8x4"),
            ("mics", "8x1 8x1 8x1 8x4"),
        ],
    )
    def test_factors(self, name: str, text: str) -> None:
        assert preset(name, ShardFactor(8, 4)) == sharding(text)

    @given(st.sampled_from(PRESETS), st.integers(1, 12), st.integers(1, 12))
    def test_is_legal_everywhere(self, name: str, per_node: int, nodes: int) -> None:
        assert preset(name, ShardFactor(per_node, nodes)).s_dp == per_node * nodes

    @pytest.mark.parametrize(("name", "nearest"), [("zero4", "zero3"), ("ZeRO-1", "zero1"), ("MICS", "mics")])
    def test_unknown_name(self, name: str, nearest: str) -> None:
        with pytest.raises(FactorError, match=f"did you mean '{nearest}'"):
            preset(name, ShardFactor(2, 2))


def test_module_is_pure() -> None:
    names = set(vars(factors))
    assert not names & {"torch", "deepspeed"}
