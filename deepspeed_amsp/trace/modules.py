"""Watches the forward of modules and the gradients of units while a trace is recorded.

Torch's hooks for all modules are used instead of each module's own: they leave the model as it is (copies,
torch's fast paths that look for hooks) and go away in one piece.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from deepspeed_amsp.trace.recorder import Recorder


class ModuleWatch:
    """Feeds a recorder until it is removed.

    Args:
        gradients: trainable parameters with the name of their unit.
        forwards: False for compiled models, into whose code the hooks would be traced.
    """

    def __init__(
        self, recorder: Recorder, model: nn.Module, gradients: Iterable[tuple[nn.Parameter, str]], forwards: bool
    ) -> None:
        self._recorder = recorder
        # Modules with parameters of their own are where units are; len() does not count as reading them.
        self._names = {
            id(module): name or type(module).__name__
            for name, module in model.named_modules()
            if len(module._parameters)
        }
        self._handles: list[Any] = []
        if forwards:
            self._handles.append(register_module_forward_pre_hook(self._before))
            self._handles.append(register_module_forward_hook(self._after, always_call=True))
        for param, unit in gradients:
            self._handles.append(param.register_post_accumulate_grad_hook(self._gradient_hook(unit)))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _before(self, module: nn.Module, _args: Any) -> None:
        name = self._names.get(id(module))
        if name is not None:
            self._recorder.enter(name, "forward")

    def _after(self, module: nn.Module, _args: Any, _output: Any) -> None:
        name = self._names.get(id(module))
        if name is not None:
            self._recorder.leave(name)

    def _gradient_hook(self, unit: str) -> Any:
        return lambda _: self._recorder.gradient(unit)
