"""Sharding factors: how many GPUs hold one copy of the parameters, gradients and optimizer states.

A factor is a pair (s0 GPUs in a node, s1 nodes); s = s0 * s1 is its size. A `Sharding` holds one factor
each for parameters, gradients and optimizer states, next to the data-parallel factor
(R = gpus_per_node, N = nodes), and checks the rules of the paper (arXiv 2311.00257, Eq. 3-7) plus one of
our own: the sizes form a chain of divisors, because the ranks are laid out as one mesh

    (replicate = s_dp / s_os, optim = s_os / s_p, param = s_p)        param varies fastest.

Pure arithmetic: imports neither torch nor deepspeed.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

COMPONENTS: tuple[str, ...] = ("parameters", "gradients", "optimizer_states")
PRESETS: tuple[str, ...] = ("ddp", "zero1", "zero2", "zero3", "mics")


class FactorError(ValueError):
    """A sharding factor is not legal. `rule` and `component` name what is broken, where that is known."""

    def __init__(self, message: str, rule: str | None = None, component: str | None = None) -> None:
        """Keep the rule's name and the component for callers that decide on them."""
        super().__init__(message)
        self.rule = rule
        self.component = component


# Deliberately without order=True: lexicographic order would make (2, 2) < (4, 1) true, and the
# dependency rule compares both members.
@dataclass(frozen=True)
class ShardFactor:
    """s0 GPUs in each of s1 nodes. Checks types only; `Sharding` checks the values, as it knows R and N."""

    s0: int
    s1: int = 1

    def __post_init__(self) -> None:
        """Check the types."""
        for name, value in (("s0", self.s0), ("s1", self.s1)):
            if isinstance(value, bool) or not isinstance(value, int):
                raise FactorError(f"{name} of a sharding factor must be an integer, not {value!r}.")

    @property
    def size(self) -> int:
        """GPUs that together hold one copy."""
        return self.s0 * self.s1

    def __str__(self) -> str:
        """The paper's spelling, "2x1"."""
        return f"{self.s0}x{self.s1}"

    def as_list(self) -> list[int]:
        """[s0, s1], the spelling of the amsp block."""
        return [self.s0, self.s1]

    def divides(self, other: ShardFactor) -> bool:
        """Whether s0 divides other's s0 and s1 divides other's s1."""
        return other.s0 % self.s0 == 0 and other.s1 % self.s1 == 0

    @staticmethod
    def fill(n: int, gpus_per_node: int) -> ShardFactor:
        """The factor of size n that fills a node before it crosses to the next one (Eq. 7).

        Raises FactorError unless n divides gpus_per_node or is a multiple of it.
        """
        if isinstance(n, bool) or not isinstance(n, int):
            raise FactorError(f"a sharding factor must be an integer, not {n!r}.")
        if 1 <= n <= gpus_per_node and gpus_per_node % n == 0:
            return ShardFactor(n, 1)
        if n > gpus_per_node and n % gpus_per_node == 0:
            return ShardFactor(gpus_per_node, n // gpus_per_node)
        legal = ", ".join(str(d) for d in divisors(gpus_per_node))
        raise FactorError(
            f"{n} GPUs cannot fill whole nodes of gpus_per_node = {gpus_per_node}: "
            f"legal values are {legal}, or a multiple of {gpus_per_node}."
        )


class Candidate(NamedTuple):
    """Factors that nobody has checked yet; what the rules look at. A legal one becomes a `Sharding`."""

    parameters: ShardFactor
    gradients: ShardFactor
    optimizer_states: ShardFactor
    data_parallel: ShardFactor


@dataclass(frozen=True)
class Sharding:
    """One legal choice of factors. data_parallel is (gpus_per_node R, nodes N), its size the world size."""

    parameters: ShardFactor
    gradients: ShardFactor
    optimizer_states: ShardFactor
    data_parallel: ShardFactor

    def __post_init__(self) -> None:
        """Check every rule of RULES."""
        for name in (*COMPONENTS, "data_parallel"):
            value = getattr(self, name)
            if not isinstance(value, ShardFactor):
                raise FactorError(f"{name} must be a ShardFactor, not {value!r}.", component=name)
        candidate = Candidate(self.parameters, self.gradients, self.optimizer_states, self.data_parallel)
        broken = violation(candidate)
        if broken is not None:
            raise _refusal(candidate, *broken)

    @property
    def s_p(self) -> int:
        """GPUs that share one copy of the parameters."""
        return self.parameters.size

    @property
    def s_g(self) -> int:
        """GPUs that share one copy of the gradients."""
        return self.gradients.size

    @property
    def s_os(self) -> int:
        """GPUs that share one copy of the optimizer states."""
        return self.optimizer_states.size

    @property
    def s_dp(self) -> int:
        """The world size W."""
        return self.data_parallel.size

    @property
    def param(self) -> int:
        """Ranks of the param axis: P is cut into this many shards."""
        return self.s_p

    @property
    def optim_inner(self) -> int:
        """Ranks of the inner part of the optim axis, over which every micro-batch reduces."""
        return self.s_g // self.s_p

    @property
    def optim_outer(self) -> int:
        """Ranks of the outer part of the optim axis, over which the last micro-batch reduces."""
        return self.s_os // self.s_g

    @property
    def optim(self) -> int:
        """Ranks that hold the same P shard and own different tensors' optimizer states."""
        return self.s_os // self.s_p

    @property
    def replicate(self) -> int:
        """Identical copies of everything."""
        return self.s_dp // self.s_os

    @property
    def stage(self) -> int:
        """The zero_optimization.stage that goes with these factors; never 0 (it would not synchronise)."""
        if self.s_p > 1:
            return 3
        return 2 if self.s_g > 1 else 1

    @property
    def stage_reason(self) -> str:
        """Why `stage` is what it is, for error messages."""
        if self.s_p > 1:
            return f"parameters are sharded over {self.s_p} GPUs (s_p > 1 needs stage 3)"
        if self.s_g > 1:
            return f"gradients are sharded over {self.s_g} GPUs and parameters not (s_g > 1 needs stage 2)"
        return "neither parameters nor gradients are sharded (s_p = s_g = 1 needs stage 1, never 0)"

    def as_dict(self) -> dict[str, list[int]]:
        """The "sharding" object of the amsp block."""
        return {name: getattr(self, name).as_list() for name in COMPONENTS}

    def __str__(self) -> str:
        """The factors on one line, "P 1x1 | G 2x1 | OS 2x2 of 2x2"."""
        return f"P {self.parameters} | G {self.gradients} | OS {self.optimizer_states} of {self.data_parallel}"


@dataclass(frozen=True)
class Rule:
    """A named check. broken_by returns the component at fault, or None when the candidate obeys the rule."""

    name: str
    equation: str
    text: str
    broken_by: Callable[[Candidate], str | None]


def _named(candidate: Candidate) -> list[tuple[str, ShardFactor]]:
    return list(zip(COMPONENTS, candidate[:3], strict=True))


def _pairs(candidate: Candidate) -> list[tuple[str, ShardFactor, ShardFactor]]:
    """(name of the larger, smaller, larger) for neighbours in the chain p, g, os."""
    return [
        ("gradients", candidate.parameters, candidate.gradients),
        ("optimizer_states", candidate.gradients, candidate.optimizer_states),
    ]


def _positive(candidate: Candidate) -> str | None:
    every = [("data_parallel", candidate.data_parallel), *_named(candidate)]
    return next((name for name, f in every if f.s0 < 1 or f.s1 < 1), None)


def _capacity(candidate: Candidate) -> str | None:
    dp = candidate.data_parallel
    return next((name for name, f in _named(candidate) if f.s0 > dp.s0 or f.s1 > dp.s1), None)


def _divisibility(candidate: Candidate) -> str | None:
    return next((name for name, f in _named(candidate) if not f.divides(candidate.data_parallel)), None)


def _whole_nodes(candidate: Candidate) -> str | None:
    full = candidate.data_parallel.s0
    return next((name for name, f in _named(candidate) if f.s1 > 1 and f.s0 != full), None)


def _dependency(candidate: Candidate) -> str | None:
    pairs = _pairs(candidate)
    return next((name for name, low, high in pairs if low.s0 > high.s0 or low.s1 > high.s1), None)


def _chain(candidate: Candidate) -> str | None:
    return next((name for name, low, high in _pairs(candidate) if not low.divides(high)), None)


# In this order: each rule may rely on the ones before it (divisibility on positive numbers, for one).
RULES: tuple[Rule, ...] = (
    Rule("positive", "Eq. 3-4", "s0 >= 1 and s1 >= 1", _positive),
    Rule("capacity", "Eq. 3-4", "s0 <= gpus_per_node and s1 <= nodes", _capacity),
    Rule("divisibility", "Eq. 5-6", "s0 divides gpus_per_node and s1 divides nodes", _divisibility),
    Rule("whole nodes", "Eq. 7", "cross nodes only with whole nodes (s1 > 1 needs s0 = R)", _whole_nodes),
    Rule("dependency", "Eq. 3-4", "parameters <= gradients <= optimizer_states in s0 and in s1", _dependency),
    Rule("chain", "three-axis mesh", "parameters divides gradients divides optimizer_states", _chain),
)


def violation(candidate: Candidate) -> tuple[Rule, str] | None:
    """The first rule of RULES that the candidate breaks and the component at fault; None when it is legal."""
    for rule in RULES:
        component = rule.broken_by(candidate)
        if component is not None:
            return rule, component
    return None


def _refusal(candidate: Candidate, rule: Rule, component: str) -> FactorError:
    """The error: rule, equation, component, W, gpus_per_node, nodes, legal values."""
    dp = candidate.data_parallel
    head = (
        f"{component} {getattr(candidate, component).as_list()} breaks the rule {rule.name!r} "
        f"({rule.equation}): {rule.text}. World size W = {dp.size}, gpus_per_node = {dp.s0}, nodes = {dp.s1}."
    )
    if dp.s0 < 1 or dp.s1 < 1:  # nothing is legal
        return FactorError(head, rule.name, component)
    others = [name for name in COMPONENTS if name != component]
    beside = " and ".join(f"{name} {getattr(candidate, name).as_list()}" for name in others)
    every = legal_factors(dp)
    fitting = [factor for factor in every if violation(candidate._replace(**{component: factor})) is None]
    if fitting:
        tail = f"Legal values of {component} next to {beside}: {_listed(fitting)}."
    else:
        tail = (
            f"No value of {component} fits next to {beside}; legal values of {component} on its own: {_listed(every)}."
        )
    return FactorError(f"{head} {tail}", rule.name, component)


def _listed(factors: list[ShardFactor]) -> str:
    return ", ".join(str(factor.as_list()) for factor in factors)


def divisors(n: int) -> list[int]:
    """All positive divisors of n, ascending."""
    return [d for d in range(1, n + 1) if n % d == 0]


def legal_factors(data_parallel: ShardFactor) -> list[ShardFactor]:
    """Every factor that obeys Eq. 3-7 on its own, in ascending size (sizes are distinct)."""
    within = [ShardFactor(d, 1) for d in divisors(data_parallel.s0)]
    across = [ShardFactor(data_parallel.s0, d) for d in divisors(data_parallel.s1) if d > 1]
    return within + across


def enumerate_shardings(data_parallel: ShardFactor, gradients: Literal["any", "paper"] = "any") -> list[Sharding]:
    """Every legal triple, ordered by (s_p, s_os, s_g). "paper" keeps s_g in {s_p, s_os} (section IV-B)."""
    if gradients not in ("any", "paper"):
        raise FactorError(f'gradients must be "any" or "paper", not {gradients!r}.')
    legal = legal_factors(data_parallel)
    found: list[Sharding] = []
    for p in legal:
        for os in (factor for factor in legal if p.divides(factor)):
            between = [g for g in legal if p.divides(g) and g.divides(os)]
            chosen = between if gradients == "any" else [g for g in between if g in (p, os)]
            found.extend(Sharding(p, g, os, data_parallel) for g in chosen)
    return found


def preset(name: str, data_parallel: ShardFactor) -> Sharding:
    """The factors of a known strategy: ddp, zero1, zero2, zero3, or mics (one node each)."""
    one, full, node = ShardFactor(1, 1), data_parallel, ShardFactor(data_parallel.s0, 1)
    known: dict[str, tuple[ShardFactor, ShardFactor, ShardFactor]] = {
        "ddp": (one, one, one),
        "zero1": (one, one, full),
        "zero2": (one, full, full),
        "zero3": (full, full, full),
        "mics": (node, node, node),
    }
    if name not in known:
        nearest = difflib.get_close_matches(str(name).lower(), PRESETS, n=1, cutoff=0.0)[0]
        raise FactorError(f"unknown preset {name!r}: did you mean {nearest!r}? The presets are {', '.join(PRESETS)}.")
    return Sharding(*known[name], data_parallel)
