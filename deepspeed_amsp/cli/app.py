"""The console script ``amsp``."""

from __future__ import annotations

from typing import Annotated

import typer

from deepspeed_amsp.cli.checkpoint import checkpoint, export
from deepspeed_amsp.cli.compare import compare
from deepspeed_amsp.cli.launch import CONTEXT as LAUNCH_CONTEXT
from deepspeed_amsp.cli.launch import launch
from deepspeed_amsp.cli.options import LOCAL_RANK
from deepspeed_amsp.cli.plan import OneLine, plan
from deepspeed_amsp.cli.profile import profile
from deepspeed_amsp.cli.report import report
from deepspeed_amsp.cli.trace import CONTEXT, trace

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def amsp(ctx: typer.Context, local_rank: Annotated[int | None, LOCAL_RANK] = None) -> None:
    """Tools of deepspeed_amsp."""
    ctx.obj = local_rank


app.command(context_settings=LAUNCH_CONTEXT)(launch)
app.command(context_settings=CONTEXT)(trace)
app.command()(profile)
app.command()(report)
app.command(cls=OneLine)(plan)
app.command()(compare)
app.command()(export)
app.add_typer(checkpoint, name="checkpoint")


def main() -> None:
    """Entry point."""
    app()
