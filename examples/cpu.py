"""What a DeepSpeed script needs before it starts on a machine without an accelerator.

On a GPU machine `prepare()` changes nothing.
"""

from __future__ import annotations

import os

import torch


def prepare() -> None:
    """Choose the CPU accelerator where there is no other. Call it before deepspeed is imported.

    DeepSpeed picks its accelerator at import time. Naming it saves the search through every vendor.
    """
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    if os.environ.get("DS_ACCELERATOR") != "cpu":
        return
    _share_cores()
    _skip_shared_memory_build()


def _share_cores() -> None:
    """Divide the cores among the ranks of this machine.

    Each rank starts one thread per core by default; four ranks on two cores then spend their time
    switching. An OMP_NUM_THREADS that the user set stays.
    """
    if "OMP_NUM_THREADS" in os.environ:
        return
    # DeepSpeed's launcher says LOCAL_SIZE, torchrun says LOCAL_WORLD_SIZE.
    ranks = int(os.environ.get("LOCAL_SIZE") or os.environ.get("LOCAL_WORLD_SIZE") or 1)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))


def _skip_shared_memory_build() -> None:
    """Tell DeepSpeed that its shared-memory collectives cannot be built here, so that it uses gloo alone.

    The CPU backend compiles them at the first start, which takes a minute or more; a run killed
    meanwhile leaves a lock file on which every later start hangs.
    """
    import deepspeed.ops

    # Releases since 0.19.6 probe every op, with a compiler, when the table is first read, so the table is
    # replaced rather than changed. DeepSpeed reads it only here, to decide on this one op.
    deepspeed.ops.__compatible_ops__ = {"deepspeed_shm_comm": False}
