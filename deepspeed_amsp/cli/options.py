"""What commands share: the launcher's option, and how a command fails."""

from __future__ import annotations

import os
import time
from typing import Any, NoReturn

import typer

LOCAL_RANK: Any = typer.Option("--local_rank", "--local-rank", hidden=True)
"""DeepSpeed's launcher puts ``--local_rank=N`` before everything else on the command line."""

GRACE_S = 2.0
"""The launcher ends all ranks when one fails, and the one that reports the error shall be the first."""


def fail(command: str, reason: str, code: int = 2) -> NoReturn:
    """End with one error per host, however many ranks find it.

    Raises:
        typer.Exit: always.
    """
    if os.environ.get("LOCAL_RANK", "0") == "0":
        typer.echo(f"amsp {command}: error: {reason}", err=True)
    else:
        time.sleep(GRACE_S)
    raise typer.Exit(code)
