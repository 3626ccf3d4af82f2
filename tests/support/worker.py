"""The child side of ``tests.support.pool``: one forked gloo worker.

Conversation with the parent, over one pipe, every message a pickled tuple:

    parent                            worker
                                      ("port", int)          rank 0 only: where its TCPStore listens
    ("port", int)                                            to every other rank
                                      ("ready", None)
    ("job", timeout_s, payload)       ("outcome", Outcome)   payload: pickled (fn, args, kwargs)
    ("settle",)                       ("settled", Settled)
    ("stop",)                         exits

"settle" comes only when every rank has answered its job: it tidies up and checks, with a collective, that the
default group is still in step. Tensors travel by value in plain pickles, never through shared memory.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import pickle
import random
import shutil
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from tests.support.leftovers import Leftovers

WATCHDOG_MARGIN_S = 10.0
SETTLE_TIMEOUT_S = 60.0
_ORPHAN_POLL_S = 0.5

after_job: list[Callable[[], None]] = []
"""Called on each worker after each job; a module with per-job state adds its own reset here."""


@dataclass(frozen=True)
class ErrorReport:
    """An exception of a rank, in a form that always survives the pipe.

    ``pickled`` holds the exception itself, or None when it cannot be pickled.
    """

    type_name: str
    message: str
    traceback: str
    pickled: bytes | None

    @classmethod
    def of(cls, error: BaseException) -> ErrorReport:
        """Reports ``error`` with the traceback it carries."""
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        try:
            pickled: bytes | None = pickle.dumps(error)
        except Exception:  # noqa: BLE001 - a class may refuse in any way; the text above says enough
            pickled = None
        return cls(f"{type(error).__module__}.{type(error).__qualname__}", str(error), text, pickled)


@dataclass(frozen=True)
class Outcome:
    """What a job came to on one rank: ``value`` (pickled) or ``error``; ``when`` is ``time.monotonic()``."""

    when: float
    value: bytes | None = None
    error: ErrorReport | None = None


@dataclass(frozen=True)
class Settled:
    """What tidying up found: ``wrong`` ("" if nothing); ``worn`` says that another process would be quicker."""

    wrong: str
    worn: bool = False


def stacks_path(directory: Path, rank: int) -> Path:
    """Where ``faulthandler`` of ``rank`` writes."""
    return directory / f"stacks-{rank}.txt"


def serve(rank: int, world_size: int, conn: Connection, directory: Path) -> NoReturn:
    """The life of one worker; never returns."""
    from tests.support.leftovers import Leftovers  # it imports torch: not when tests are collected

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; the parent decides
    stacks = open(stacks_path(directory, rank), "w")  # noqa: SIM115 - open for life: faulthandler keeps its fd
    faulthandler.enable(file=stacks)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    _exit_when_orphaned(directory)
    _set_environment(rank, world_size, directory)
    _init_distributed(rank, world_size, conn)
    groups_at_start = _groups_state()
    environment_at_start = dict(os.environ)
    leftovers = Leftovers()
    gc.freeze()  # what torch and deepspeed imported is never garbage: each collection would cost 0.2 s for it
    _send(conn, "ready", None)
    while True:
        try:
            kind, *content = pickle.loads(conn.recv_bytes())
        except EOFError:
            _exit_as_orphan(directory)
        if kind == "job":
            timeout, payload = content
            faulthandler.dump_traceback_later(timeout + WATCHDOG_MARGIN_S, exit=True, file=stacks)
            _send(conn, "outcome", _run_job(payload))
            faulthandler.cancel_dump_traceback_later()
        elif kind == "settle":
            faulthandler.dump_traceback_later(SETTLE_TIMEOUT_S + WATCHDOG_MARGIN_S, exit=True, file=stacks)
            try:
                settled = _settle(groups_at_start, environment_at_start, leftovers)
            except Exception:  # noqa: BLE001 - this line must not be what ends the worker without a word
                settled = Settled(traceback.format_exc())
            _send(conn, "settled", settled)
            faulthandler.cancel_dump_traceback_later()
        else:
            os._exit(0)  # not sys.exit: the interpreter's own shutdown could hang in gloo


def _send(conn: Connection, *message: Any) -> None:
    conn.send_bytes(pickle.dumps(message))


def _exit_when_orphaned(directory: Path) -> None:
    """Starts a thread that ends this process once its parent is gone, whatever the job is doing."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "a worker is a child of a multiprocessing parent"

    def watch() -> None:
        while os.getppid() == parent.pid:
            time.sleep(_ORPHAN_POLL_S)
        _exit_as_orphan(directory)

    threading.Thread(target=watch, name="orphan-watch", daemon=True).start()


def _exit_as_orphan(directory: Path) -> NoReturn:
    """Removes what the parent can no longer remove, and ends this process."""
    shutil.rmtree(directory, ignore_errors=True)
    os._exit(1)


def _set_environment(rank: int, world_size: int, directory: Path) -> None:
    """What a launcher would set, and what keeps DeepSpeed on a CPU quick and quiet."""
    import deepspeed
    import torch
    from deepspeed.utils import logger

    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size),
        DS_ACCELERATOR="cpu", TORCH_EXTENSIONS_DIR=str(directory / "extensions"),
    )  # fmt: skip
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the host's name may resolve to nothing reachable
    torch.set_num_threads(1)
    # The op takes minutes to build, and the lock of a killed build hangs every later start. Only to ask DeepSpeed
    # which of its ops could be built runs compilers for seconds, so the answer is put where it looks for it.
    vars(deepspeed.ops)["__compatible_ops__"] = {"deepspeed_shm_comm": False}
    logger.setLevel("ERROR")
    warnings.simplefilter("ignore")


def _init_distributed(rank: int, world_size: int, conn: Connection) -> None:
    """Makes the default gloo group, and DeepSpeed's view of it.

    Rank 0 binds port 0 and the parent passes the number on, so that no port is chosen before it is bound.
    """
    import deepspeed.comm
    import torch.distributed as dist

    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, world_size, is_master=True, wait_for_workers=False)
        port = store.port
        _send(conn, "port", port)
    else:
        _, port = pickle.loads(conn.recv_bytes())
        store = dist.TCPStore("127.0.0.1", port, world_size, is_master=False, wait_for_workers=False)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    deepspeed.comm.init_distributed("gloo", verbose=False)


def _run_job(payload: bytes) -> Outcome:
    """Runs one job; whatever goes wrong, including pickling, is in the outcome."""
    import numpy
    import torch

    # Forked ranks share one random state, and a job's numbers must not depend on the jobs before it.
    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)
    try:
        fn, args, kwargs = pickle.loads(payload)
        value = pickle.dumps(fn(*args, **kwargs))
    except BaseException as error:  # noqa: BLE001 - SystemExit too: a worker must always answer
        # In the frames of the traceback live the job's tensors and engines: only the text may stay.
        return Outcome(time.monotonic(), error=ErrorReport.of(error))
    return Outcome(time.monotonic(), value=value)


def _settle(groups_at_start: dict[str, Any], environment: dict[str, str], leftovers: Leftovers) -> Settled:
    """Tidies up after a job and says what is wrong.

    Every group but the default one is destroyed, DeepSpeed forgets its cached groups, the environment is
    restored. Then all ranks meet in a collective: one that the job left unmatched on the default group makes this
    one hang, here and not in an innocent later test.
    """
    import torch
    import torch.distributed as dist

    for hook in after_job:
        hook()
    _restore_groups_state(groups_at_start)
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    if not dist.is_initialized():
        return Settled("the job destroyed the default group")
    worn = leftovers.tidy()
    try:
        dist.all_reduce(torch.zeros(1), async_op=True).wait(timedelta(seconds=SETTLE_TIMEOUT_S / 2))
    except RuntimeError as error:
        return Settled(f"the job left the default group out of step ({error})")
    return Settled("", worn)


def _groups_state() -> dict[str, Any]:
    """DeepSpeed's module-level cache of process groups, as it is before any engine exists."""
    from deepspeed.utils import groups

    kept = {}
    for name, value in vars(groups).items():
        is_state = name in ("mpu", "mesh_device") or (name.startswith("_") and not name.startswith("__"))
        if is_state and (value is None or isinstance(value, (dict, int))):
            kept[name] = dict(value) if isinstance(value, dict) else value
    return kept


def _restore_groups_state(state: dict[str, Any]) -> None:
    from deepspeed.utils import groups

    for name, value in state.items():  # copies: the state serves again after the next job
        setattr(groups, name, dict(value) if isinstance(value, dict) else value)
