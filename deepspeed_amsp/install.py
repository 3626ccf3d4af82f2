"""Taking over ``deepspeed.initialize``: the config decides which engine it makes.

Nothing here imports DeepSpeed at the top: `install` runs at the end of DeepSpeed's own import, which any module of
this package may have asked for. Nor is pydantic, which reading a config needs: whoever only plans starts at once.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.runtime.engine import DeepSpeedEngine

    from deepspeed_amsp.engine import AMSPEngine
    from deepspeed_amsp.optimizer import AMSPOptimizer

engines_made: Counter[str] = Counter()
"""How many engines of which class this process has begun to make, by name, since the plugin was installed."""


def install_with_deepspeed() -> None:
    """`install` now if DeepSpeed has been imported, else as soon as it is."""
    if "deepspeed" in sys.modules:
        install()
    else:
        sys.meta_path.insert(0, _AfterDeepSpeed())


def stay_out() -> None:
    """Undo `install_with_deepspeed`: this process works with a DeepSpeed that our engine does not support."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _AfterDeepSpeed)]


class _AfterDeepSpeed(MetaPathFinder):
    """Finds DeepSpeed as anybody would, and installs the engine when its import is over."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname != "deepspeed":
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_install(module: Any) -> None:
            try:
                execute(module)
                install()
            except BaseException:
                sys.meta_path.insert(0, self)  # whoever tries again gets the engine, too
                raise

        spec.loader.exec_module = execute_and_install  # type: ignore[method-assign]
        return spec


def install() -> None:
    """Make every later ``deepspeed.initialize`` return an AMSPEngine when its config holds the block.

    Idempotent. DeepSpeedEngine itself is extended, so scripts that bound ``initialize`` early get it, too.
    """
    import deepspeed
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.runtime.engine import DeepSpeedEngine

    from deepspeed_amsp import compat

    if getattr(DeepSpeedEngine, "_amsp_installed", False):
        return
    compat.check()
    DeepSpeedEngine._amsp_installed = True
    DeepSpeedEngine.__new__ = _choose_engine
    _check_before(DeepSpeedConfig)
    deepspeed.load_ds_config = _checked_loading(deepspeed.load_ds_config)


def _choose_engine(cls: type[DeepSpeedEngine], *args: Any, **kwargs: Any) -> DeepSpeedEngine:
    chosen = _chosen(cls, kwargs)
    engines_made[chosen.__name__] += 1
    return object.__new__(chosen)


def _chosen(cls: type[DeepSpeedEngine], kwargs: Mapping[str, Any]) -> type[DeepSpeedEngine]:
    """The class of the engine that ``cls(**kwargs)`` makes."""
    from deepspeed.runtime.engine import DeepSpeedEngine

    from deepspeed_amsp.config import read_block

    config_class = kwargs.get("config_class")
    wanted = config_class is not None and read_block(config_class._param_dict) is not None
    from deepspeed_amsp.model_checks import refusal, refuse_taken

    if not wanted or (cls is DeepSpeedEngine and _infers(kwargs)):
        if config_class is not None and kwargs.get("model") is not None:
            refuse_taken(kwargs["model"], config_class.zero_optimization_stage)
        return cls
    from deepspeed_amsp.engine import AMSPEngine

    if cls is DeepSpeedEngine:
        return AMSPEngine
    if not issubclass(cls, AMSPEngine):
        raise refusal(
            "amsp",
            f"the block cannot be used with DeepSpeed's {cls.__name__}: pass a plain nn.Module instead of a "
            f"PipelineModule and switch the hybrid engine off, or remove the block",
        )
    return cls


def _infers(kwargs: Mapping[str, Any]) -> bool:
    """Whether an engine is made that cannot train, such as a frozen reference model or an evaluation by the Trainer.

    Without an optimizer DeepSpeed only has stages 0 and 3. The block is about training, so the engine is DeepSpeed's.
    """
    import torch.distributed as dist
    from deepspeed.utils import logger

    config = kwargs["config_class"]
    if kwargs.get("optimizer") is not None or config.optimizer_name or config.zero_optimization_stage not in (0, 3):
        return False
    if not dist.is_initialized() or dist.get_rank() == 0:
        logger.info("amsp: an engine without an optimizer does not train: it is DeepSpeed's own, the block is not used")
    return True


def _check_before(config_class: type[DeepSpeedConfig]) -> None:
    """Refuse bad blocks before DeepSpeed trips over, or ignores, what stands next to them."""
    from deepspeed_amsp.config import has_block, preflight, read_block
    from deepspeed_amsp.model_parallel import batch_ranks, refuse_mpu

    original = config_class.__init__

    def checked(self: Any, config: Any, mpu: Any = None, mesh_device: Any = None) -> None:
        if isinstance(config, Mapping):
            # zero.Init reads a config that the Trainer still completes; the engine asks again when it starts.
            ranks = None
            if has_block(config):
                refuse_mpu(mpu)
                ranks = batch_ranks(mpu, mesh_device, config.get("sequence_parallel_size"))
            preflight(config, filled=False, world_size=ranks)
            read_block(config)
        original(self, config, mpu, mesh_device)

    config_class.__init__ = checked


def _checked_loading(load: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """DeepSpeed's loader reports a missing file as bad base64, and takes repeated keys in base64."""
    from deepspeed_amsp.config import is_missing_file, load_config

    def checked(config: Any) -> Any:
        if isinstance(config, str):
            if is_missing_file(config):
                raise FileNotFoundError(f"no such file: DeepSpeed config {os.path.abspath(config)}")
            load_config(config)
        return load(config)

    return checked


def initialize(*args: Any, **kwargs: Any) -> tuple[AMSPEngine, AMSPOptimizer, Any, Any]:
    """``deepspeed.initialize`` that insists on an enabled "amsp" block.

    Raises:
        ConfigError: the config holds no enabled block, so DeepSpeed would have trained plain ZeRO; or there is no
            optimizer, so nothing would have been trained.
    """
    import deepspeed

    from deepspeed_amsp.config import read_block
    from deepspeed_amsp.engine import AMSPEngine
    from deepspeed_amsp.model_checks import refusal

    install()
    engine, optimizer, dataloader, scheduler = deepspeed.initialize(*args, **kwargs)
    if not isinstance(engine, AMSPEngine):
        has_block = read_block(engine._config._param_dict) is not None
        missing = "optimizer" if has_block else 'enabled "amsp" block in the config'
        raise refusal("amsp", f"there is no {missing}; add one, or call deepspeed.initialize")
    return engine, optimizer, dataloader, scheduler
