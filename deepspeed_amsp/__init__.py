"""deepspeed_amsp: DeepSpeed with independent sharding factors for parameters, gradients and optimizer states.

Importing it makes every later ``deepspeed.initialize`` return an `AMSPEngine` when the config holds an
``"amsp"`` block (arXiv 2311.00257 is the method).
"""

from deepspeed_amsp.config import ConfigError
from deepspeed_amsp.engine import AMSPEngine
from deepspeed_amsp.install import initialize, install
from deepspeed_amsp.optimizer import AMSPOptimizer
from deepspeed_amsp.partition.layout import LayoutError
from deepspeed_amsp.plan.factors import FactorError, ShardFactor, Sharding
from deepspeed_amsp.plan.resolve import Plan
from deepspeed_amsp.topology import TopologyError

__version__ = "0.1.0"
__all__ = [
    "AMSPEngine",
    "AMSPOptimizer",
    "ConfigError",
    "FactorError",
    "LayoutError",
    "Plan",
    "ShardFactor",
    "Sharding",
    "TopologyError",
    "initialize",
    "install",
]

install()
