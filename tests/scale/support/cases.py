"""The plans and models that are run as single ranks of 1024: the paper's, and two that go other ways."""

from __future__ import annotations

from dataclasses import dataclass, replace

from deepspeed_amsp.compare.llama import LlamaConfig
from deepspeed_amsp.plan.factors import ShardFactor, Sharding

GPUS_PER_NODE, NODES = 8, 128
WORLD = GPUS_PER_NODE * NODES
MIB = 2**20


@dataclass(frozen=True)
class Model:
    """A LLaMA by the paper's sizes; one sequence is one micro-batch, in bf16."""

    name: str
    layers: int
    dim: int
    heads: int
    ffn: int
    vocab: int = 32_000
    recompute: bool = False
    sequence: int = 4096

    def config(self) -> LlamaConfig:
        return LlamaConfig(
            vocab=self.vocab,
            dim=self.dim,
            layers=self.layers,
            heads=self.heads,
            ffn=self.ffn,
            recompute=self.recompute,
        )


@dataclass(frozen=True)
class ScalePlan:
    """What the amsp block says."""

    sharding: Sharding
    reduce: str = "two_level"
    publish: str = "broadcast"
    micro_batches: int = 1
    hierarchical: bool = False
    bucket_bytes: int = 128 * MIB  # the upper end of the paper's 64-128 MB

    def ds_config(self) -> dict[str, object]:
        return {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": self.micro_batches,
            "gradient_clipping": 1.0,
            # Without it a step has no reason to read anything on the host, and the tests see that it does not.
            "bf16": {"enabled": True, "check_grad_overflow": False},
            "zero_optimization": {"stage": self.sharding.stage},
            "steps_per_print": 10**9,
            "amsp": {
                "sharding": self.sharding.as_dict(),
                "reduce": self.reduce,
                "publish": self.publish,
                "hierarchical": self.hierarchical,
                "bucket_bytes": self.bucket_bytes,
                "topology": {"gpus_per_node": self.sharding.data_parallel.s0},
            },
        }


@dataclass(frozen=True)
class Case:
    """A plan for a model."""

    name: str
    model: Model
    plan: ScalePlan

    def cut(self, layers: int) -> Case:
        """The same with fewer layers of the true width."""
        return replace(self, model=replace(self.model, layers=layers))

    def __str__(self) -> str:
        return f"{self.name}x{self.model.layers}"


def sharding(p: tuple[int, int], g: tuple[int, int], os: tuple[int, int]) -> Sharding:
    return Sharding(ShardFactor(*p), ShardFactor(*g), ShardFactor(*os), ShardFactor(GPUS_PER_NODE, NODES))


LLAMA_7B = Model("LLaMA-7B", layers=32, dim=4096, heads=32, ffn=11_008)
LLAMA_13B = Model("LLaMA-13B", layers=40, dim=5120, heads=40, ffn=13_824)
LLAMA_30B = Model("LLaMA-30B", layers=60, dim=6656, heads=52, ffn=17_920, recompute=True)

CASES = (
    Case("7b", LLAMA_7B, ScalePlan(sharding((1, 1), (1, 1), (8, 1)))),
    Case("7b-all_reduce", LLAMA_7B, ScalePlan(sharding((1, 1), (1, 1), (8, 1)), "all_reduce", "all_gather")),
    Case("13b", LLAMA_13B, ScalePlan(sharding((4, 1), (4, 1), (8, 1)))),
    Case("30b", LLAMA_30B, ScalePlan(sharding((8, 1), (8, 1), (8, 4)))),
    Case("7b-mixed", LLAMA_7B, ScalePlan(sharding((2, 1), (8, 1), (8, 1)), micro_batches=2)),
    Case("7b-two_nodes", LLAMA_7B, ScalePlan(sharding((1, 1), (1, 1), (8, 2)), hierarchical=True)),
)
"""The paper's three plans, the first again with the other modes, s_p < s_g = s_os with accumulation, and optimizer
states over two nodes with collectives in two stages."""

RANKS = (0, 1, 7, 8, 1023)
"""The first two and the last of a node, the first of the next, and the last of all."""
