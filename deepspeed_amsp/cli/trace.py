"""``amsp trace``: run a script, record some of its steps, write a Chrome/Perfetto trace.

    amsp trace train.py ...                                                  one process
    deepspeed --num_gpus 4 --module deepspeed_amsp.cli.trace train.py ...    under the launcher
    deepspeed --num_gpus 4 --no_python amsp trace train.py ...               the same
    torchrun --nproc-per-node 4 -m deepspeed_amsp.cli.trace train.py ...     the same

The script runs unchanged, as ``__main__``, and gets the launcher's --local_rank. Nothing here imports torch or
DeepSpeed: the script does, after it has set what it wants to be set before.
"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import Annotated

import typer

from deepspeed_amsp.cli.options import LOCAL_RANK, fail
from deepspeed_amsp.launch import Command, LaunchError
from deepspeed_amsp.trace.session import Outcome, Session, TraceComplete, TraceRequest, requests

CONTEXT = {"allow_interspersed_args": False}
"""Everything after the script is the script's."""

LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
"""Any of these in the environment says that a launcher started this process."""


def trace(
    ctx: typer.Context,
    script: Annotated[Path, typer.Argument(help="The training script; options behind it are its own.")],
    arguments: Annotated[list[str] | None, typer.Argument(help="The script's arguments.")] = None,
    steps: Annotated[int, typer.Option(help="Optimizer steps to record.")] = 3,
    skip: Annotated[int, typer.Option(help="Steps to run before, as a warm-up.")] = 3,
    out: Annotated[Path, typer.Option(help="Where the trace goes.")] = Path("trace.json"),
    keep_going: Annotated[
        bool, typer.Option("--keep-going", help="Let the script run on when the steps are recorded.")
    ] = False,
    local_rank: Annotated[int | None, LOCAL_RANK] = None,
) -> None:
    """Record what computes and what communicates in some steps of SCRIPT, and how much of it was exposed.

    The file opens in https://ui.perfetto.dev or chrome://tracing. One process is rank, one row a kind of work.
    """
    if local_rank is None and isinstance(ctx.obj, int):
        local_rank = ctx.obj
    if steps < 1:
        fail("trace", f"--steps must be at least 1, got {steps}")
    if skip < 0:
        fail("trace", f"--skip must be at least 0, got {skip}")
    launcher = [] if local_rank is None else [f"--local_rank={local_rank}"]
    try:
        command = Command(str(script), (*launcher, *(arguments or ())))
    except LaunchError as error:
        fail("trace", str(error))
    out = out.absolute()  # the script may change the folder
    if not out.parent.is_dir() or out.is_dir():
        fail("trace", f"--out must be a file in a folder that exists, got {out}")
    request = TraceRequest(steps, skip, out, keep_going, _report)
    requests.append(request)
    _alone_unless_launched()
    _run(command, request)


def _run(command: Command, request: TraceRequest) -> None:
    """Run the script to its end or to that of the trace.

    Raises:
        SystemExit: the script's, when it failed.
    """
    try:
        command.run()
    except TraceComplete:
        _leave_groups()
        return
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
    request.finish()
    if request.session is None:
        fail(
            "trace",
            f"{command.target} made no amsp engine, so there is nothing to record: its ds_config needs an enabled "
            '"amsp" block',
            code=1,
        )
    if request.session.outcome is None or not request.session.outcome.steps:
        taken = request.session.recorder.step - 1
        fail(
            "trace",
            f"{command.target} took {taken} steps, and --skip {request.skip} leaves none of them to record",
            code=1,
        )


def _report(session: Session, outcome: Outcome) -> None:
    """Rank 0 says what was recorded."""
    if session.rank != 0 or not outcome.steps:
        return
    lines = [f"amsp trace: {line}" for line in outcome.lines]
    ranks = "1 rank" if outcome.joined == 1 else f"{outcome.joined} ranks; times are their mean"
    lines.append(f"amsp trace: {len(outcome.steps)} steps of {ranks} in {outcome.file} (open it in ui.perfetto.dev)")
    if outcome.elsewhere:
        lines.append(
            f"amsp trace: {len(outcome.elsewhere)} ranks wrote files that this host does not see, each a trace of its "
            f"own: {', '.join(outcome.elsewhere)}"
        )
    print("\n".join(lines), flush=True)


def _alone_unless_launched() -> None:
    """Without a launcher, what it would have set for one process: DeepSpeed would look for MPI otherwise."""
    if any(name in os.environ for name in LAUNCHED):
        return
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", str(port))


def _leave_groups() -> None:
    """What the script would have done at its end, if we had let it get there."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


if __name__ == "__main__":
    command = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    command.command(context_settings=CONTEXT)(trace)
    command()
