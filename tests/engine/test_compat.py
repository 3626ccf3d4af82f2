"""The self-check at import: it knows every name that we build on, and it fails loudly."""

from __future__ import annotations

import deepspeed
import pytest
import torch
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.engine import DeepSpeedEngine

from deepspeed_amsp import compat
from deepspeed_amsp.checkpoint.engine import CheckpointingEngine
from deepspeed_amsp.engine import AMSPEngine
from deepspeed_amsp.optimizer import AMSPOptimizer
from deepspeed_amsp.optimizer_surface import OptimizerSurface


def test_the_installed_versions_pass() -> None:
    compat.check()


@pytest.mark.parametrize("version", ["0.19.4", "0.20.0", "0.18.9", "1.0"])
def test_another_deepspeed_is_refused(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deepspeed, "__version__", version)
    with pytest.raises(compat.IncompatibleVersion, match=rf"DeepSpeed >= 0.19.5, < 0.20, but {version} is installed"):
        compat.check()


@pytest.mark.parametrize("version", ["0.19.5", "0.19.8+cpu", "0.19.9"])
def test_supported_deepspeeds_pass(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deepspeed, "__version__", version)
    compat.check()


def test_an_old_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.6.0")
    with pytest.raises(compat.IncompatibleVersion, match=r"torch >= 2\.7, not 2\.6\.0"):
        compat.check()


def test_a_name_that_is_gone_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(DeepSpeedEngine, "allreduce_gradients")
    with pytest.raises(compat.IncompatibleVersion, match=r"DeepSpeedEngine\.allreduce_gradients"):
        compat.check()


@pytest.mark.parametrize(
    ("ours", "theirs", "listed"),
    [
        (AMSPEngine, DeepSpeedEngine, compat.ENGINE_METHODS),
        (CheckpointingEngine, DeepSpeedEngine, compat.ENGINE_METHODS),
        (AMSPOptimizer, ZeROOptimizer, compat.OPTIMIZER_METHODS),
        (OptimizerSurface, ZeROOptimizer, compat.OPTIMIZER_METHODS),
    ],
)
def test_every_override_is_checked(ours: type, theirs: type, listed: tuple[str, ...]) -> None:
    """An override of a name that DeepSpeed has renamed would be dead code, in silence."""
    special = {
        "__init__",
        "__del__",
        "__module__",
        "__doc__",
        "__annotations__",
        "__firstlineno__",
        "__static_attributes__",
    }
    overridden = {name for name in vars(ours) if hasattr(theirs, name) and not hasattr(object, name)} - special
    overridden -= {name for name in overridden if hasattr(torch.nn.Module, name) and theirs is ZeROOptimizer}
    assert overridden <= set(listed), f"not in compat: {sorted(overridden - set(listed))}"
