"""What jobs leave in a worker: process groups that close beside the next job, and what nobody can collect."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

MOST_KEPT_GROUPS = 8
SLOW_COLLECTION_S = 0.05
_CLOSING = "closing-groups"


class Leftovers:
    """Tidies a worker's process after each job, and knows when it is worn out.

    Closing a gloo group takes no processor time, but waits 10 ms for each of its connections: some 0.2 s for an
    engine's groups. So they are closed on a thread, while the next job runs. Some groups never close, because
    something still holds their engine: those that a failed job did not destroy, and DeepSpeed's own under stage 3.
    Each has a thread that wakes 100 times a second, and what is held with it is gone through in every collection.
    """

    def __init__(self) -> None:
        """Watches which groups are made from here on: the default group, made before, is never closed."""
        self._made: weakref.WeakSet[Any] = weakref.WeakSet()
        self._given_up: weakref.WeakSet[Any] = weakref.WeakSet()
        make = distributed_c10d._new_process_group_helper

        def make_and_remember(*args: Any, **kwargs: Any) -> Any:
            group, *rest = make(*args, **kwargs)
            if isinstance(group, dist.ProcessGroup):  # else this rank is not in it
                self._made.add(group)
            return group, *rest

        distributed_c10d._new_process_group_helper = make_and_remember

    def tidy(self) -> bool:
        """Collects garbage and closes the last job's groups; True if another process would now be quicker.

        Which it is when a job has imported much, such as a compiler, or left much that cannot be collected.
        """
        wait_until_closed()
        worn = len(self._given_up) > MOST_KEPT_GROUPS  # before the last job's groups are among them
        held = list(self._made)
        self._given_up.update(held)
        began = time.process_time()
        gc.collect()
        worn = worn or time.process_time() - began > SLOW_COLLECTION_S
        for group in list(distributed_c10d._world.pg_map):
            if group is not dist.group.WORLD:
                dist.destroy_process_group(group)
        threading.Thread(target=held.clear, name=_CLOSING, daemon=True).start()
        return worn


def wait_until_closed() -> None:
    """Returns once no group of an earlier job is being closed."""
    for thread in threading.enumerate():
        if thread.name == _CLOSING:
            thread.join()
