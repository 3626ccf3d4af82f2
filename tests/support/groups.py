"""What every process group written in Python needs so that ``torch.distributed`` takes it for one."""

from __future__ import annotations

from typing import ClassVar

import torch.distributed as dist


class PythonGroup(dist.ProcessGroup):
    """The base; a subclass names its backend and has the methods that ``torch.distributed`` calls."""

    backend: ClassVar[str]

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)  # the form with a store cannot be subclassed in Python
        self._name = ""

    def getBackendName(self) -> str:
        """The registered name."""
        return self.backend

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> str:
        """The name under which dist has registered this group (the base class would ask a backend inside)."""
        return self._name
