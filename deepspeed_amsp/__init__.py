"""deepspeed_amsp: DeepSpeed with independent sharding factors for parameters, gradients and optimizer states.

Importing it makes every later ``deepspeed.initialize`` return an `AMSPEngine` when the config holds an
``"amsp"`` block (arXiv 2311.00257 is the method).

Importing it loads neither torch nor DeepSpeed nor pydantic: a command answers at once, and a script may still choose
DeepSpeed's accelerator. The engine is installed when DeepSpeed is imported, or now if it has been.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from deepspeed_amsp.install import initialize, install, install_with_deepspeed

if TYPE_CHECKING:
    from deepspeed_amsp.config import ConfigError
    from deepspeed_amsp.engine import AMSPEngine
    from deepspeed_amsp.optimizer import AMSPOptimizer
    from deepspeed_amsp.partition.stream import Init, WeightsError
    from deepspeed_amsp.plan.factors import FactorError, ShardFactor, Sharding
    from deepspeed_amsp.plan.layout import LayoutError
    from deepspeed_amsp.plan.resolve import Plan
    from deepspeed_amsp.topology import TopologyError

__version__ = "0.1.0"
__all__ = [
    "AMSPEngine",
    "AMSPOptimizer",
    "ConfigError",
    "FactorError",
    "Init",
    "LayoutError",
    "Plan",
    "ShardFactor",
    "Sharding",
    "TopologyError",
    "WeightsError",
    "initialize",
    "install",
]

_HOMES = {
    "AMSPEngine": "engine",
    "AMSPOptimizer": "optimizer",
    "ConfigError": "config",
    "FactorError": "plan.factors",
    "Init": "partition.stream",
    "LayoutError": "plan.layout",
    "Plan": "plan.resolve",
    "ShardFactor": "plan.factors",
    "Sharding": "plan.factors",
    "TopologyError": "topology",
    "WeightsError": "partition.stream",
}
"""Public names that are imported when somebody asks for them: some need DeepSpeed, and planning needs few."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"deepspeed_amsp.{_HOMES[name]}"), name)


install_with_deepspeed()
