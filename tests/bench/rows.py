"""What tests/bench/overlap.py measures, and what theory says about each row."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from deepspeed_amsp.compare.catalog import Strategy, built_in, from_block
from deepspeed_amsp.compare.cluster import ClusterSpec
from deepspeed_amsp.compare.config import CompareConfig
from deepspeed_amsp.compare.llama import LlamaConfig, parameter_count
from deepspeed_amsp.compare.results import LIMIT

NODES, RANKS_PER_NODE = 2, 2
WARM_UP_STEPS = 2
RESULT = "RESULT "
"""Before the JSON of a result in what rank 0 prints."""
CONFIG = CompareConfig(strategies=(LIMIT,))
"""The model, its data and how it is trained: what `amsp compare` takes by default."""
MODEL = LlamaConfig(**CONFIG.model.shape.model_dump())
PHI = 2 * parameter_count(MODEL)
"""Bytes of the parameters in bf16."""
BLOCK_BUCKET = 4_800_000
"""Bytes that a block of the model fits into, and the first one together with the embedding."""

Factors = tuple[tuple[int, int], tuple[int, int], tuple[int, int]]
IN_NODE: Factors = ((1, 1), (1, 1), (2, 1))
"""The paper's 7B plan: only gradients of owned tensors cross nodes."""
SHARDED: Factors = ((2, 1), (2, 1), (2, 2))
"""The shape of the paper's 30B plan: P and G within a node, OS across nodes."""
ACROSS: Factors = ((1, 1), (1, 1), (2, 2))

TABLE_V: dict[str, dict[str, bool]] = {
    "full": {},
    "no publish": {"publish": False},
    "no publish, all_reduce": {"publish": False, "all_reduce": False},
    "none": {"publish": False, "all_reduce": False, "gather": False, "reduce_scatter": False},
}
"""The four rows of the paper's Table V, its Broadcast being our publish, as the switches that are off."""


@dataclass(frozen=True)
class Row:
    """One setting. factors None: plain torch without any communication. bucket_bytes: of whole parameters, so that a
    bucket ends with the same module whatever a rank holds of it."""

    factors: Factors | None
    micro_batches: int
    nic_mbit: float
    overlap: str = "full"
    hierarchical: bool = False
    bucket_bytes: int = 0

    @property
    def plan(self) -> str:
        """The factors as design.md writes them."""
        if self.factors is None:
            return "no communication"
        words = ("x".join(map(str, pair)) if pair != (1, 1) else "1" for pair in self.factors)
        return f"({','.join(words)})" + (" two-stage" if self.hierarchical else "")

    @property
    def name(self) -> str:
        """What --only looks at."""
        switches = "" if self.factors is None else f" {self.overlap}"
        return f"{self.plan}{switches} M={self.micro_batches} {self.nic_mbit:g}Mbit"

    @property
    def bucket_of_shard(self) -> int:
        """The engine's ``bucket_bytes``: of what a rank holds of the parameters."""
        (in_node, nodes), *_ = self.factors or ((1, 1),)
        return self.bucket_bytes // (in_node * nodes)

    def strategy(self, nodes: int) -> Strategy:
        """What `amsp compare` trains for this row."""
        shape = (RANKS_PER_NODE, nodes)
        if self.factors is None:
            return built_in(LIMIT, shape)
        p, g, states = self.factors
        block: dict[str, Any] = {
            "sharding": {"parameters": list(p), "gradients": list(g), "optimizer_states": list(states)},
            "overlap": TABLE_V[self.overlap],
            "bucket_bytes": self.bucket_of_shard,
            "hierarchical": self.hierarchical,
        }
        return from_block("amsp", self.name, block, shape)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Row:
        """The inverse of `as_dict`, also after a trip through JSON."""
        factors = values["factors"]
        whole = None if factors is None else tuple((pair[0], pair[1]) for pair in factors)
        return cls(**{**values, "factors": whole})

    # ---- theory -----------------------------------------------------------------------------------------------

    def bytes_by_phase(self) -> tuple[float, float]:
        """Bytes that must leave a node per step: under the last backward, and under the next forward.

        Two nodes, so an all-reduce across them sends what it reduces once from every rank.
        """
        if self.factors is None:
            return 0.0, 0.0
        if self.factors == IN_NODE:
            return float(PHI), 0.0  # each of two ranks all-reduces the half that it owns
        if self.factors == SHARDED or self.hierarchical:
            return PHI / 2, PHI / 2  # to the owner across nodes, and back
        # Flat: a rank sends a quarter of its gradients to each of the others, two of which are in the other
        # node; gloo's broadcast tree crosses from node 0 five times for the four owners' quarters.
        return float(PHI), 1.25 * PHI

    def floor_s(self, compute: Phases) -> float:
        """max(computation, communication that cannot be avoided), in seconds a step."""
        rate = ClusterSpec(NODES, RANKS_PER_NODE, self.nic_mbit).nic_bytes_per_s
        return max(compute.total(self.micro_batches), sum(self.bytes_by_phase()) / rate)

    def reachable_s(self, compute: Phases) -> float:
        """What a schedule block by block can reach: nothing sends a gradient before it is made or uses a parameter
        before it is there, so with backward goes all but what the last block makes, with forward all but what the
        first one needs."""
        rate = ClusterSpec(NODES, RANKS_PER_NODE, self.nic_mbit).nic_bytes_per_s
        behind_backward, behind_forward = (size / rate for size in self.bytes_by_phase())
        more = self.micro_batches - 1
        return (
            beside(compute.forward, behind_forward, MODEL.layers)
            + more * (compute.forward + compute.backward)
            + beside(compute.backward, behind_backward, MODEL.layers)
            + compute.update
        )


def beside(computation: float, communication: float, blocks: int) -> float:
    """Seconds of two chains of ``blocks`` equal links, where the k-th link of the second follows the k-th of the first.

    Either the second chain never waits once it has begun, or it ends one link after the first.
    """
    return max(computation / blocks + communication, computation + communication / blocks)


@dataclass(frozen=True)
class Phases:
    """Seconds of one micro-batch's forward and backward, and of the update, as the host saw them."""

    forward: float
    backward: float
    update: float

    @property
    def parts(self) -> tuple[float, float, float]:
        """All three."""
        return self.forward, self.backward, self.update

    def total(self, micro_batches: int) -> float:
        """Seconds of a step."""
        return micro_batches * (self.forward + self.backward) + self.update


def all_rows(nic_mbit: float, slow_mbit: float, micro_batches: list[int], bucket_bytes: int) -> list[Row]:
    """Every row of the report, those without communication first."""
    rows = []
    for count in micro_batches:
        rows.append(Row(None, count, nic_mbit))
        for factors in (IN_NODE, SHARDED):
            rows += [Row(factors, count, nic_mbit, switches, False, bucket_bytes) for switches in TABLE_V]
    rows.append(Row(None, 1, slow_mbit))
    for factors, hierarchical in ((IN_NODE, False), (ACROSS, True), (ACROSS, False)):
        rows.append(Row(factors, 1, slow_mbit, "full", hierarchical, bucket_bytes))
    return rows
